package nfsacl

import (
	"bytes"
	"errors"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// grown returns the bytes that f allocates.
func grown(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func checkACL(t *testing.T, a ACL) {
	t.Helper()
	if len(a) > MaxEntries {
		t.Fatalf("got %d entries", len(a))
	}
	sorted := slices.Clone(a)
	sorted.sort()
	if !reflect.DeepEqual(sorted, a) {
		t.Fatal("entries are not sorted")
	}
	for _, e := range a {
		if !e.Tag.valid() || e.Perm > PermMask || !e.Tag.named() && e.ID != UndefinedID {
			t.Fatalf("got entry %+v", e)
		}
	}
}

// FuzzReply passes any bytes as a reply to GETACL. The call must return a documented error or valid
// ACLs, and must allocate in proportion to the reply.
func FuzzReply(f *testing.F) {
	f.Add(kit.Unhex("00000000 00000000 00000005" + minimalWire + extendedDefaultWire))
	f.Add(kit.Unhex("00000046 00000000"))
	f.Fuzz(func(t *testing.T, reply []byte) {
		var acls ACLs
		var err error
		n := grown(func() {
			c := NewClient(&fixed{result: reply})
			acls, err = c.Get(t.Context(), nil, fh, MaskAccess, new(nfs3.PostOpAttr))
		})
		var nfsErr *nfs3.Error
		if err != nil && !errors.As(err, &nfsErr) && !errors.Is(err, nfs3.ErrMalformed) {
			t.Fatalf("got undocumented error %v", err)
		}
		if n > 256<<10+8*uint64(len(reply)) {
			t.Fatalf("allocated %d bytes for a reply of %d", n, len(reply))
		}
		checkACL(t, acls.Access)
		checkACL(t, acls.Default)
	})
}

// FuzzArgs passes any bytes as arguments to a server. Valid arguments must survive a round trip.
func FuzzArgs(f *testing.F) {
	f.Add(uint32(ProcSetACL), kit.Unhex("00000004 01020304 00000005"+minimalWire+extendedDefaultWire))
	f.Add(uint32(ProcGetACL), kit.Unhex("00000004 01020304 0000000f"))
	f.Fuzz(func(t *testing.T, proc uint32, b []byte) {
		var args, again Args
		if ParseArgs(proc%3, b, &args) != nil || proc%3 != ProcSetACL {
			return
		}
		checkACL(t, args.Access)
		checkACL(t, args.Default)
		wire := args.append(nfs3.AppendFH(nil, &args.FH), owner)
		if max(len(args.Access), len(args.Default)) == MaxEntries {
			return
		}
		if err := ParseArgs(ProcSetACL, wire, &again); err != nil || !reflect.DeepEqual(args, again) {
			t.Fatalf("second pass: got %+v, %v, want %+v", again, err, args)
		}
	})
}

// FuzzXattr parses any bytes as the value of an extended attribute.
func FuzzXattr(f *testing.F) {
	f.Add(extended.AppendXattr(nil))
	f.Fuzz(func(t *testing.T, value []byte) {
		a, err := ParseXattr(value)
		if err != nil {
			return
		}
		checkACL(t, a)
		b, err := ParseXattr(a.AppendXattr(nil))
		if err != nil || !reflect.DeepEqual(a, b) || !bytes.Equal(a.AppendXattr(nil), b.AppendXattr(nil)) {
			t.Fatalf("second pass: got %v, %v, want %v", b, err, a)
		}
	})
}
