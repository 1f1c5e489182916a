package mountd

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/vmware/go-nfs-client/nfs/xdr"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const (
	maxPath    = 1024 // MNTPATHLEN in bytes (RFC 1813 §5.1.4)
	maxFlavors = 64   // limit for the list of authentication flavors; about a dozen are defined
)

var (
	errTooLong = errors.New("length exceeds the maximum or the message")
	errEmptyFH = errors.New("empty file handle")
)

// decode calls read with the decoders of go-nfs-client. Those decoders panic on some input, so
// decode recovers. Errors wrap [sunrpc.ErrMalformed].
func decode[T any](b []byte, read func(r *bytes.Reader) (T, error)) (v T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("go-nfs-client panicked: %v", p)
		}
		if err != nil {
			err = fmt.Errorf("%w: %w", sunrpc.ErrMalformed, err)
		}
	}()
	return read(bytes.NewReader(b))
}

// checkLength checks the length that comes next in r and does not consume it. The decoders of
// go-nfs-client allocate what the message claims, so every opaque and list needs this check.
func checkLength(r *bytes.Reader, limit int) error {
	n, err := xdr.ReadUint32(r)
	if err != nil {
		return err
	}
	if int64(n) > int64(min(limit, r.Len())) {
		return errTooLong
	}
	_, err = r.Seek(-sunrpc.SizeUint32, io.SeekCurrent)
	return err
}

// A mountReply is mountres3 (RFC 1813 §5.2.1).
type mountReply struct {
	stat    Stat
	fh      nfs3.FH  // only with MNT3OK
	flavors []uint32 // only with MNT3OK
}

func readMount(r *bytes.Reader) (m mountReply, err error) {
	stat, err := xdr.ReadUint32(r)
	m.stat = Stat(stat)
	if err != nil || m.stat != MNT3OK {
		return m, err
	}
	if err := checkLength(r, nfs3.FHSize); err != nil {
		return m, fmt.Errorf("file handle: %w", err)
	}
	var handle []byte
	if err := xdr.Read(r, &handle); err != nil { // xdr.ReadOpaque does not skip the pad
		return m, fmt.Errorf("file handle: %w", err)
	}
	if len(handle) == 0 {
		return m, errEmptyFH
	}
	if m.fh, err = nfs3.NewFH(handle); err != nil {
		return m, err
	}
	if err := checkLength(r, maxFlavors); err != nil {
		return m, fmt.Errorf("authentication flavors: %w", err)
	}
	m.flavors, err = xdr.ReadUint32List(r)
	return m, err
}

func decodeMount(b []byte) (mountReply, error) { return decode(b, readMount) }

// maxName is MNTNAMLEN in bytes (RFC 1813 §5.1.4).
const maxName = 255

// decodeExports decodes exports (RFC 1813 §5.2.5). It uses the decoder of package sunrpc, because
// that of go-nfs-client has no list. An entry takes at least 8 bytes of b, which bounds the memory.
// Errors wrap [sunrpc.ErrMalformed].
func decodeExports(b []byte) (list []Export, err error) {
	d := sunrpc.NewDecoder(b)
	for d.Bool() {
		e := Export{Dir: string(d.Opaque(maxPath))}
		for d.Bool() {
			e.Groups = append(e.Groups, string(d.Opaque(maxName)))
		}
		list = append(list, e)
	}
	if err := d.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", sunrpc.ErrMalformed, err)
	}
	return list, nil
}

func decodePort(b []byte) (uint32, error) {
	return decode(b, func(r *bytes.Reader) (uint32, error) { return xdr.ReadUint32(r) })
}
