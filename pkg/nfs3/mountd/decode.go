package mountd

import (
	"errors"
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Limits of MOUNT (RFC 1813 §5.1.4), in octets.
const (
	maxPath = 1024 // MNTPATHLEN
	maxName = 255  // MNTNAMLEN
)

// maxFlavors bounds the list of authentication flavors; a dozen are defined.
const maxFlavors = 64

var (
	errFlavors = errors.New("too many authentication flavors")
	errEmptyFH = errors.New("an empty file handle")
)

// decodeMount reads a mountres3 (RFC 1813 §5.2.1).
func decodeMount(b []byte) (Stat, Result, error) {
	d := sunrpc.NewDecoder(b)
	stat := Stat(d.Uint32())
	if d.Err() != nil || stat != MNT3OK {
		return stat, Result{}, d.Err()
	}
	handle := d.Opaque(nfs3.FHSize)
	n := d.Uint32()
	if d.Err() != nil {
		return stat, Result{}, d.Err()
	}
	if len(handle) == 0 {
		return stat, Result{}, fmt.Errorf("%w: %w", sunrpc.ErrMalformed, errEmptyFH)
	}
	if n > maxFlavors {
		return stat, Result{}, fmt.Errorf("%w: %w", sunrpc.ErrMalformed, errFlavors)
	}
	var res Result
	for range n {
		res.AuthFlavors = append(res.AuthFlavors, d.Uint32())
	}
	if d.Err() != nil {
		return stat, Result{}, d.Err()
	}
	fh, err := nfs3.NewFH(handle)
	res.FH = fh
	return stat, res, err
}

// decodeExports reads the exports of EXPORT (RFC 1813 §5.2.5). The lists are as long as the record
// allows, and no longer.
func decodeExports(b []byte) ([]Export, error) {
	d := sunrpc.NewDecoder(b)
	var list []Export
	for d.Bool() {
		e := Export{Dir: string(d.Opaque(maxPath))}
		for d.Bool() {
			e.Groups = append(e.Groups, string(d.Opaque(maxName)))
		}
		list = append(list, e)
	}
	if d.Err() != nil {
		return nil, d.Err()
	}
	return list, nil
}

// decodeDump reads the mountlist of DUMP (RFC 1813 §5.2.2).
func decodeDump(b []byte) ([]Entry, error) {
	d := sunrpc.NewDecoder(b)
	var list []Entry
	for d.Bool() {
		list = append(list, Entry{Host: string(d.Opaque(maxName)), Dir: string(d.Opaque(maxPath))})
	}
	if d.Err() != nil {
		return nil, d.Err()
	}
	return list, nil
}
