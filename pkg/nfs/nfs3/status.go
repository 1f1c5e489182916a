package nfs3

import (
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// operation returns the name of a procedure in errors.
func operation(p Proc) string { return "NFSv3 " + p.String() }

// statusErrors holds one Error for each procedure and status, so that a frequent status, for
// example NOENT of LOOKUP, does not cost an allocation. It is read-only after initialization.
var statusErrors = func() (table [NumProcs]map[Status]*Error) {
	for p := range table {
		table[p] = make(map[Status]*Error, len(nfs.Statuses()))
		for _, s := range nfs.Statuses() {
			table[p][s] = &Error{Op: operation(Proc(p)), Status: s}
		}
	}
	return table
}()

func statusError(p Proc, s Status) error {
	if e, ok := statusErrors[p][s]; ok {
		return e
	}
	return &Error{Op: operation(p), Status: s}
}

func malformed(p Proc, reason error) error {
	return fmt.Errorf("%s: %w: %w", operation(p), ErrMalformed, reason)
}
