package mountd

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/vmware/go-nfs-client/nfs/xdr"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Limits of MOUNT (RFC 1813 §5.1.4), in bytes.
const (
	maxPath = 1024 // MNTPATHLEN
	maxName = 255  // MNTNAMLEN
)

// maxFlavors limits the list of authentication flavors. IANA lists about a dozen flavors.
const maxFlavors = 64

var (
	errTooLong = errors.New("length exceeds the maximum or the message")
	errEmptyFH = errors.New("empty file handle")
)

// decode calls read with the decoders of go-nfs-client. Those decoders panic on some input, so decode
// recovers. Errors wrap [sunrpc.ErrMalformed].
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
// go-nfs-client allocate what the message claims, so every string, opaque and list needs this check.
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

// readValue reads a value without a length, for example a bool.
func readValue[T bool | uint32](r *bytes.Reader) (v T, err error) {
	err = xdr.Read(r, &v)
	return v, err
}

// readBytes reads a string or an opaque of at most limit bytes.
func readBytes[T string | []byte](r *bytes.Reader, limit int) (v T, err error) {
	if err := checkLength(r, limit); err != nil {
		return v, err
	}
	err = xdr.Read(r, &v)
	return v, err
}

// readList reads an XDR linked list, in which a bool precedes each element. The record limits the
// number of elements.
func readList[T any](r *bytes.Reader, read func(r *bytes.Reader) (T, error)) ([]T, error) {
	var list []T
	for {
		more, err := readValue[bool](r)
		if err != nil || !more {
			return list, err
		}
		v, err := read(r)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
}

// A mountReply is mountres3 (RFC 1813 §5.2.1).
type mountReply struct {
	stat    Stat
	fh      nfs3.FH  // only with MNT3OK
	flavors []uint32 // only with MNT3OK
}

func readMount(r *bytes.Reader) (m mountReply, err error) {
	stat, err := readValue[uint32](r)
	m.stat = Stat(stat)
	if err != nil || m.stat != MNT3OK {
		return m, err
	}
	handle, err := readBytes[[]byte](r, nfs3.FHSize)
	if err != nil {
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

// readExport reads one element of the result of EXPORT (RFC 1813 §5.2.5).
func readExport(r *bytes.Reader) (e Export, err error) {
	if e.Dir, err = readBytes[string](r, maxPath); err != nil {
		return e, err
	}
	e.Groups, err = readList(r, func(r *bytes.Reader) (string, error) { return readBytes[string](r, maxName) })
	return e, err
}

// readEntry reads one element of the result of DUMP (RFC 1813 §5.2.2).
func readEntry(r *bytes.Reader) (e Entry, err error) {
	if e.Host, err = readBytes[string](r, maxName); err != nil {
		return e, err
	}
	e.Dir, err = readBytes[string](r, maxPath)
	return e, err
}

func decodeMount(b []byte) (mountReply, error) { return decode(b, readMount) }

func decodeExports(b []byte) ([]Export, error) {
	return decode(b, func(r *bytes.Reader) ([]Export, error) { return readList(r, readExport) })
}

func decodeDump(b []byte) ([]Entry, error) {
	return decode(b, func(r *bytes.Reader) ([]Entry, error) { return readList(r, readEntry) })
}

func decodePort(b []byte) (uint32, error) { return decode(b, readValue[uint32]) }
