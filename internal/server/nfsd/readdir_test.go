package nfsd

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// list reads a directory in pages of count bytes; between is called after each page.
func (c *client) list(dir nfs3.FH, plus bool, count uint32, between func(page int)) (names []string) {
	c.T.Helper()
	var res nfs3.ReadDirResult
	var cookie uint64
	for page := 0; !res.EOF; page++ {
		each := func(e *nfs3.DirEntry) bool {
			names, cookie = append(names, string(e.Name)), e.Cookie
			if plus && (!e.HasFH || !e.Attr.Present) {
				c.T.Errorf("%s: no attributes or no handle", e.Name)
			}
			return true
		}
		var err error
		if plus {
			err = c.ReadDirPlus(c.Ctx, c.Cred, dir, cookie, res.Verf, count, count, &res, each)
		} else {
			err = c.ReadDir(c.Ctx, c.Cred, dir, cookie, res.Verf, count, &res, each)
		}
		c.OK(err)
		if between != nil {
			between(page)
		}
	}
	return names
}

// Files that exist during the whole listing are listed once, whatever is created and removed
// meanwhile, and when the server starts again in the middle.
func TestListingWhileEntriesChange(t *testing.T) {
	for _, plus := range []bool{false, true} {
		c := start(t, nil)
		var want []string
		for i := range 400 {
			want = append(want, fmt.Sprintf("stays-%03d", i))
			c.OK(os.WriteFile(c.path(want[i]), nil, 0o644))
			c.OK(os.WriteFile(c.path(fmt.Sprintf("goes-%03d", i)), nil, 0o644))
		}
		got := c.list(c.Root, plus, 2048, func(page int) {
			for i := page * 10; i < page*10+10; i++ {
				_ = os.Remove(c.path(fmt.Sprintf("goes-%03d", i)))
				c.OK(os.WriteFile(c.path(fmt.Sprintf("comes-%03d", i)), nil, 0o644))
			}
			if page%5 == 4 {
				c.s.objects.end() // as after a restart: nothing is open
			}
		})
		got = slices.DeleteFunc(got, func(name string) bool { return !strings.HasPrefix(name, "stays") })
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("plus %v: got %d names, want %d", plus, len(got), len(want))
		}
	}
}

// A listing from the start is complete after one from the end, also if the descriptor is new. The
// lab runs this test on ext4 of Linux 6.12, where a new descriptor has an error.
func TestListingAfterEnd(t *testing.T) {
	c := start(t, nil)
	for i := range 60 {
		c.OK(os.WriteFile(c.path(fmt.Sprintf("name-%02d", i)), nil, 0o644))
	}
	var res nfs3.ReadDirResult
	var last uint64
	c.OK(c.ReadDir(c.Ctx, root, c.Root, 0, nfs3.Verifier{}, 8192, &res, func(e *nfs3.DirEntry) bool {
		last = e.Cookie
		return true
	}))
	if !res.EOF {
		t.Fatal("one reply is not the whole directory")
	}
	c.s.objects.end()
	c.OK(c.ReadDir(c.Ctx, root, c.Root, last, res.Verf, 8192, &res, func(e *nfs3.DirEntry) bool {
		t.Errorf("entry %q after the end", e.Name)
		return true
	}))
	if got := c.list(c.Root, false, 8192, nil); len(got) != 62 {
		t.Errorf("got %d names, want 62: %v", len(got), got)
	}
}

// A reply never exceeds the count of the call, and one that has no room for an entry is an error.
func TestListingKeepsToCount(t *testing.T) {
	c := start(t, nil)
	for i := range 50 {
		c.OK(os.WriteFile(c.path(strings.Repeat("n", 1+4*i)), nil, 0o644))
	}
	for count := uint32(0); count < 3000; count += 37 {
		for _, proc := range []nfs3.Proc{nfs3.ProcReadDir, nfs3.ProcReadDirPlus} {
			args := append(nfs3.AppendFH(nil, &c.Root), make([]byte, 16)...)
			if proc == nfs3.ProcReadDirPlus {
				args = sunrpc.AppendUint32(args, count)
			}
			msg := sunrpc.AppendCall(nil, 1, nfs3.Program, nfs3.Version, uint32(proc), root)
			reply, err := c.s.ServeRPC(c.Ctx, peer, append(msg, sunrpc.AppendUint32(args, count)...), nil)
			c.OK(err)
			_, results, err := sunrpc.ParseReply(reply)
			c.OK(err)
			d := sunrpc.NewDecoder(results)
			switch st := nfs3.Status(d.Uint32()); {
			case st == nfs3.OK && d.Remaining() > int(count):
				t.Errorf("%v: got %d bytes for a count of %d", proc, d.Remaining(), count)
			case st != nfs3.OK && (st != nfs3.ErrTooSmall || count > 700):
				t.Errorf("%v with count %d: got %v", proc, count, st)
			}
		}
	}
}

func TestBadCookies(t *testing.T) {
	c := start(t, nil)
	none := func(*nfs3.DirEntry) bool { return true }
	var res nfs3.ReadDirResult
	c.OK(c.ReadDir(c.Ctx, root, c.Root, 0, nfs3.Verifier{}, 4096, &res, none))
	good, bad := res.Verf, res.Verf
	bad[0] ^= 1
	for _, tt := range []struct {
		cookie uint64
		verf   nfs3.Verifier
	}{{1, bad}, {1, nfs3.Verifier{}}, {1 << 63, good}, {1<<64 - 1, good}} {
		err := c.ReadDir(c.Ctx, root, c.Root, tt.cookie, tt.verf, 4096, &res, none)
		var e *nfs3.Error
		if !asError(err, &e) || e.Status != nfs3.ErrBadCookie {
			t.Errorf("cookie %#x: got %v, want NFS3ERR_BAD_COOKIE", tt.cookie, err)
		}
	}
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	c.Want(c.ReadDir(c.Ctx, root, fh, 0, nfs3.Verifier{}, 4096, &res, none), unix.ENOTDIR)
}

// Who may read a directory but not search it gets no handles.
func TestListingWithoutSearchPermission(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	d := c.mkdir(root, c.Root, "d", 0o755)
	c.MustCreate(root, d, "f", 0o644)
	c.OK(os.Chmod(c.path("d"), 0o744))
	var res nfs3.ReadDirResult
	c.OK(c.ReadDirPlus(c.Ctx, user, d, 0, nfs3.Verifier{}, 4096, 4096, &res, func(e *nfs3.DirEntry) bool {
		if e.HasFH || !e.Attr.Present {
			t.Errorf("%s: got handle %v, attributes %v, want attributes alone", e.Name, e.HasFH, e.Attr.Present)
		}
		return true
	}))
	c.OK(os.Chmod(c.path("d"), 0o711))
	c.Want(c.ReadDirPlus(c.Ctx, user, d, 0, nfs3.Verifier{}, 4096, 4096, &res, nil), unix.EACCES)
}
