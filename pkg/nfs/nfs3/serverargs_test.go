package nfs3

import (
	"bytes"
	"context"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// argsCaller records the arguments of each call as a server gets them.
type argsCaller struct {
	proc Proc
	args []byte
}

func (c *argsCaller) Call(_ context.Context, m *sunrpc.Message) error {
	c.proc = Proc(m.Proc)
	c.args = append(c.args[:0], m.Args...)
	if m.ArgDataPos == len(m.Args) && len(m.ArgData) > 0 {
		c.args = sunrpc.AppendFixed(c.args, m.ArgData)
	}
	m.ResultDataLen = -1
	return context.Canceled
}

// clientArgs returns the arguments of every exchange as the client encodes them.
func clientArgs(each func(name string, proc Proc, args []byte)) {
	caller := new(argsCaller)
	c := NewClient(caller)
	for _, x := range exchanges {
		caller.proc = NumProcs
		if _, err := x.call(context.Background(), c); err != nil && caller.proc == x.proc {
			each(x.name, x.proc, bytes.Clone(caller.args))
		}
	}
}

func TestParseArgsOfClient(t *testing.T) {
	seen := map[Proc]bool{}
	clientArgs(func(name string, proc Proc, args []byte) {
		seen[proc] = true
		var a Args
		if err := ParseArgs(proc, args, &a); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if proc == ProcNull {
			return
		}
		for n := range len(args) {
			if ParseArgs(proc, args[:n], &a) == nil {
				t.Errorf("%s: %d of %d bytes were accepted", name, n, len(args))
			}
		}
		if ParseArgs(proc, append(args, 0, 0, 0, 0), &a) == nil {
			t.Errorf("%s: 4 more bytes were accepted", name)
		}
	})
	if len(seen) != NumProcs {
		t.Errorf("got arguments of %d procedures, want %d", len(seen), NumProcs)
	}
}

func TestParseArgsFields(t *testing.T) {
	caller := new(argsCaller)
	c := NewClient(caller)
	ctx := context.Background()
	set := SetAttr{HasMode: true, Mode: 0o4755, HasUID: true, UID: 7, HasGID: true, GID: 8, HasSize: true, Size: 9,
		AtimeHow: SetToClientTime, Atime: Time3{Sec: 1, Nsec: 2}, MtimeHow: SetToServerTime}
	check := func(name string, want Args) {
		t.Helper()
		var got Args
		if err := ParseArgs(caller.proc, caller.args, &got); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if !sameArgs(&got, &want) {
			t.Errorf("%s: got %+v, want %+v", name, got, want)
		}
	}
	_ = c.SetAttr(ctx, nil, fh1, &set, &Time3{Sec: 3, Nsec: 4}, new(WccData))
	check("SETATTR", Args{FH: fh1, Set: set, HasGuard: true, Guard: Time3{Sec: 3, Nsec: 4}})
	_ = c.Write(ctx, nil, fh1, 5, []byte("abc"), DataSync, new(WriteResult))
	check("WRITE", Args{FH: fh1, Offset: 5, Count: 3, Stable: DataSync, Data: []byte("abc")})
	_ = c.Rename(ctx, nil, fh1, "a", fh2, "b", new(RenameResult))
	check("RENAME", Args{FH: fh1, FH2: fh2, Name: []byte("a"), Name2: []byte("b")})
	_ = c.Link(ctx, nil, fh1, fh2, "a", new(LinkResult))
	check("LINK", Args{FH: fh1, FH2: fh2, Name: []byte("a")})
	_ = c.Create(ctx, nil, fh1, "a", &CreateHow{Mode: Exclusive, Verf: Verifier{1}}, new(CreateResult))
	check("CREATE exclusive", Args{FH: fh1, Name: []byte("a"), Create: Exclusive, CreateVerf: Verifier{1}})
	_ = c.Symlink(ctx, nil, fh1, "a", "to", &SetAttr{}, new(CreateResult))
	check("SYMLINK", Args{FH: fh1, Name: []byte("a"), Data: []byte("to")})
	_ = c.Mknod(ctx, nil, fh1, "a", NF3BLK, &SetAttr{}, Device{Major: 1, Minor: 2}, new(CreateResult))
	check("MKNOD", Args{FH: fh1, Name: []byte("a"), Type: NF3BLK, Dev: Device{Major: 1, Minor: 2}})
	_ = c.ReadDirPlus(ctx, nil, fh1, 6, Verifier{9}, 7, 8, new(ReadDirResult), nil)
	check("READDIRPLUS", Args{FH: fh1, Cookie: 6, CookieVerf: Verifier{9}, DirCount: 7, Count: 8})
}

func sameArgs(a, b *Args) bool {
	x, y := *a, *b
	same := bytes.Equal(x.Name, y.Name) && bytes.Equal(x.Name2, y.Name2) && bytes.Equal(x.Data, y.Data)
	x.Name, x.Name2, x.Data, y.Name, y.Name2, y.Data = nil, nil, nil, nil, nil, nil
	return same && x.FH == y.FH && x.FH2 == y.FH2 && x.Offset == y.Offset && x.Count == y.Count &&
		x.DirCount == y.DirCount && x.Cookie == y.Cookie && x.CookieVerf == y.CookieVerf && x.Stable == y.Stable &&
		x.Create == y.Create && x.CreateVerf == y.CreateVerf && x.Set == y.Set && x.HasGuard == y.HasGuard &&
		x.Guard == y.Guard && x.Type == y.Type && x.Dev == y.Dev && x.Access == y.Access
}

// FuzzArgs parses any bytes as the arguments of each procedure. Accepted arguments must lie within
// the message and its bounds, and parsing must not allocate.
func FuzzArgs(f *testing.F) {
	clientArgs(func(_ string, proc Proc, args []byte) { f.Add(uint8(proc), args) })
	f.Add(uint8(ProcWrite), bytes.Repeat([]byte{0xff}, 64))
	f.Fuzz(func(t *testing.T, proc uint8, b []byte) {
		var a Args
		if ParseArgs(Proc(proc), b, &a) != nil {
			return
		}
		if Proc(proc) >= NumProcs {
			t.Fatalf("procedure %d was accepted", proc)
		}
		if len(a.Name) > MaxNameTaken || len(a.Name2) > MaxNameTaken || len(a.Data) > len(b) || a.FH.Len() > FHSize ||
			Proc(proc) == ProcWrite && int(a.Count) != len(a.Data) || a.Set.Mode > ModeMask || a.Stable > FileSync {
			t.Fatalf("out of bounds: %+v", a)
		}
		if n := testing.AllocsPerRun(1, func() { _ = ParseArgs(Proc(proc), b, &a) }); n > 0 {
			t.Fatalf("got %v allocations, want none", n)
		}
	})
}
