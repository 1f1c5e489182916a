package nfsd

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestReadOnlyExport(t *testing.T) {
	c := start(t, func(cfg *Config) {
		kit.Must(t, os.WriteFile(cfg.Dir+"/f", []byte("data"), 0o666))
		cfg.ReadOnly = true
	})
	fh := c.MustLookup(c.Root, "f").FH
	before := c.stat("f")
	var made nfs3.CreateResult
	var wcc nfs3.WccData
	set := nfs3.SetAttr{HasMode: true}
	for name, err := range map[string]error{
		"SETATTR":   c.SetAttr(c.Ctx, root, fh, &set, nil, &wcc),
		"WRITE":     c.Write(c.Ctx, root, fh, 0, []byte("x"), nfs3.FileSync, new(nfs3.WriteResult)),
		"COMMIT":    c.Commit(c.Ctx, root, fh, 0, 0, new(nfs3.CommitResult)),
		"CREATE":    c.Create(c.Ctx, root, c.Root, "g", &nfs3.CreateHow{}, &made),
		"exclusive": c.Create(c.Ctx, root, c.Root, "g", &nfs3.CreateHow{Mode: nfs3.Exclusive}, &made),
		"existing":  c.Create(c.Ctx, root, c.Root, "f", &nfs3.CreateHow{}, &made),
		"MKDIR":     c.Mkdir(c.Ctx, root, c.Root, "g", &set, &made),
		"SYMLINK":   c.Symlink(c.Ctx, root, c.Root, "g", "x", &set, &made),
		"MKNOD":     c.Mknod(c.Ctx, root, c.Root, "g", nfs3.NF3FIFO, &set, nfs3.Device{}, &made),
		"REMOVE":    c.Remove(c.Ctx, root, c.Root, "f", &wcc),
		"RMDIR":     c.Rmdir(c.Ctx, root, c.Root, "f", &wcc),
		"RENAME":    c.Rename(c.Ctx, root, c.Root, "f", c.Root, "g", new(nfs3.RenameResult)),
		"LINK":      c.Link(c.Ctx, root, fh, c.Root, "g", new(nfs3.LinkResult)),
	} {
		if nfs3.Errno(err) != unix.EROFS {
			t.Errorf("%s: got %v, want EROFS", name, err)
		}
	}
	var acc nfs3.AccessResult
	c.OK(c.Access(c.Ctx, root, fh, ^uint32(0), &acc))
	if acc.Access != nfs3.AccessRead {
		t.Errorf("ACCESS: got %#x, want READ alone", acc.Access)
	}
	if got := c.read(root, fh); got != "data" {
		t.Errorf("READ: got %q", got)
	}
	if after := c.stat("f"); after.Ctim != before.Ctim {
		t.Error("the file changed")
	}
}

// Clients outside the allow list, and those with an unprivileged source port, can neither mount nor
// use a handle.
func TestAllow(t *testing.T) {
	c := start(t, func(cfg *Config) {
		cfg.Allow = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/25"), netip.MustParsePrefix("fe80::/64")}
	})
	fh := c.MustCreate(root, c.Root, "f", 0o666)
	for addr, want := range map[string]bool{"192.0.2.1:700": true, "192.0.2.128:700": false,
		"[::ffff:192.0.2.2]:700": true, "127.0.0.1:700": false, "[fe80::1%eth0]:700": true, "[2001:db8::1]:700": false,
		"192.0.2.1:1023": true, "192.0.2.1:1024": false} {
		from := netip.MustParseAddrPort(addr)
		msg := sunrpc.AppendCall(nil, 1, progMount, versMount, mountMnt, root)
		reply, err := c.s.ServeRPC(c.Ctx, from, sunrpc.AppendString(msg, "/"), nil)
		c.OK(err)
		_, results, err := sunrpc.ParseReply(reply)
		c.OK(err)
		d := sunrpc.NewDecoder(results)
		status := nfs3.ErrAcces
		if want {
			status = nfs3.OK
		}
		if got := nfs3.Status(d.Uint32()); got != status {
			t.Errorf("%s: MNT: got %v, want %v", addr, got, status)
		}
		err = nfs3.NewClient(&caller{s: c.s, peer: from}).GetAttr(c.Ctx, root, c.Root, new(nfs3.Attr))
		var denied *sunrpc.DeniedError
		if (err == nil) != want || !want && !errors.As(err, &denied) {
			t.Errorf("%s: GETATTR: got %v, want success %v", addr, err, want)
		}
		_, err = c.lock(from, root, fh)
		if (err == nil) != want || !want && !errors.As(err, &denied) {
			t.Errorf("%s: LOCK: got %v, want success %v", addr, err, want)
		}
		acl := nfsacl.NewClient(&caller{s: c.s, peer: from})
		_, err = acl.Get(c.Ctx, root, c.Root, nfsacl.MaskAccess, new(nfs3.PostOpAttr))
		if (err == nil) != want || !want && !errors.As(err, &denied) {
			t.Errorf("%s: GETACL: got %v, want success %v", addr, err, want)
		}
	}
}

// The table of objects, and with it the open descriptors, is bounded; idle objects are closed.
func TestObjectsAreBounded(t *testing.T) {
	c := start(t, nil)
	c.s.objects.max = 8
	var handles []nfs3.FH
	for i := range 40 {
		fh := c.MustCreate(root, c.Root, fmt.Sprint(i), 0o644)
		c.write(root, fh, fmt.Sprint("data ", i))
		handles = append(handles, fh)
	}
	count := func() int {
		c.s.objects.mu.Lock()
		defer c.s.objects.mu.Unlock()
		if len(c.s.objects.table) != len(c.s.objects.inodes) {
			t.Errorf("%d handles, %d inodes", len(c.s.objects.table), len(c.s.objects.inodes))
		}
		return len(c.s.objects.table)
	}
	if n := count(); n > 9 { // with the one in use
		t.Errorf("got %d objects, want at most 9", n)
	}
	for i, fh := range handles {
		if got, want := c.read(root, fh), fmt.Sprint("data ", i); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		c.OK(c.Commit(c.Ctx, root, fh, 0, 0, new(nfs3.CommitResult)))
	}
	for range idleSweeps + 1 {
		c.s.objects.sweep()
	}
	if n := count(); n != 0 {
		t.Errorf("got %d objects after some idle time, want 0", n)
	}
}

// A file that is removed is closed at once: its disk space must be free.
func TestRemovedFileIsClosed(t *testing.T) {
	c := start(t, nil)
	replace := func() error {
		c.MustCreate(root, c.Root, "g", 0o644)
		return c.Rename(c.Ctx, root, c.Root, "g", c.Root, "f", new(nfs3.RenameResult))
	}
	for _, tt := range []struct {
		name string
		do   func() error
	}{
		{"REMOVE", func() error { return c.Remove(c.Ctx, root, c.Root, "f", new(nfs3.WccData)) }},
		{"RENAME", replace},
	} {
		fh := c.MustCreate(root, c.Root, "f", 0o644)
		c.write(root, fh, "data")
		c.OK(tt.do())
		if c.s.objects.get(&fh) != nil {
			t.Errorf("%s: the file is still open", tt.name)
		}
		c.s.forgetSearches()
		c.Want(c.GetAttr(c.Ctx, root, fh, new(nfs3.Attr)), unix.ESTALE)
	}
	// A file with another link stays.
	fh := c.MustCreate(root, c.Root, "h", 0o644)
	c.OK(c.Link(c.Ctx, root, fh, c.Root, "i", new(nfs3.LinkResult)))
	c.OK(c.Remove(c.Ctx, root, c.Root, "h", new(nfs3.WccData)))
	if a := c.getattr(fh); a.Nlink != 1 {
		t.Errorf("got %d links, want 1", a.Nlink)
	}
	c.OK(c.Rename(c.Ctx, root, c.Root, "i", c.Root, "i", new(nfs3.RenameResult)))
	c.getattr(fh)
}

// wcc_data holds the attributes before a call, unless another call came between.
func TestAttributesBefore(t *testing.T) {
	c := start(t, nil)
	before := c.getattr(c.Root)
	var res nfs3.CreateResult
	c.OK(c.Create(c.Ctx, root, c.Root, "f", &nfs3.CreateHow{}, &res))
	want := nfs3.WccAttr{Size: before.Size, Mtime: before.Mtime, Ctime: before.Ctime}
	if !res.DirChange.HasBefore || res.DirChange.Before != want || !res.DirChange.HasAfter ||
		res.DirChange.After != c.getattr(c.Root) {
		t.Errorf("CREATE: got %+v, want the attributes before and after", res.DirChange)
	}
	var ren nfs3.RenameResult
	c.OK(c.Rename(c.Ctx, root, c.Root, "f", c.Root, "g", &ren))
	if !ren.From.HasBefore || !ren.To.HasBefore || ren.From.After != ren.To.After {
		t.Errorf("RENAME in one directory: got %+v", ren)
	}
	// A failure tells the client the directory's attributes, too.
	err := c.Create(c.Ctx, root, c.Root, "g", &nfs3.CreateHow{Mode: nfs3.Guarded}, &res)
	if c.Want(err, unix.EEXIST); !res.DirChange.HasAfter {
		t.Errorf("failed CREATE: got %+v, want attributes", res.DirChange)
	}
}

// FuzzCall executes any message. The reply is an RPC message of bounded size, or the call gets
// none.
func FuzzCall(f *testing.F) {
	c := start(f, func(cfg *Config) {
		cfg.NoRootSquash = false
		cfg.fsync = func(int) error { return nil }
	})
	c.Cred = user
	file := c.MustCreate(user, c.Root, "file", 0o644)
	header := func(prog, vers, proc uint32) []byte { return sunrpc.AppendCall(nil, 1, prog, vers, proc, user) }
	for proc := range uint32(nfs3.NumProcs) {
		h := header(nfs3.Program, nfs3.Version, proc)
		f.Add(append(nfs3.AppendFH(h, &file), make([]byte, 40)...))
		f.Add(append(sunrpc.AppendString(nfs3.AppendFH(h, &c.Root), "name"), make([]byte, 40)...))
	}
	f.Add(sunrpc.AppendString(header(progMount, versMount, mountMnt), "/"))
	f.Add(append(header(progPortmap, versPortmap, pmapGetPort), make([]byte, 16)...))
	h := header(nfsacl.Program, nfsacl.Version, nfsacl.ProcGetACL)
	f.Add(sunrpc.AppendUint32(nfs3.AppendFH(h, &file), nfsacl.MaskAll))
	locked := nlmwire.Args{Exclusive: true, Region: nlmwire.Region{Caller: "client", FH: file.Bytes(), OH: []byte{1}}}
	f.Add(nlmwire.AppendArgs(header(nlmwire.Program, nlmwire.Version, uint32(nlmwire.ProcLock)), nlmwire.ProcLock,
		&locked))
	f.Fuzz(func(t *testing.T, msg []byte) {
		for _, try := range []bool{true, false} {
			var reply []byte
			var err error
			if try {
				ok := false
				if reply, ok = c.s.TryServe(peer, msg, nil); !ok {
					continue
				}
			} else if reply, err = c.s.ServeRPC(c.Ctx, peer, msg, nil); err != nil {
				continue
			}
			_, _, err = sunrpc.ParseReply(reply)
			if len(reply) > MaxRecord || errors.Is(err, sunrpc.ErrMalformed) {
				t.Fatalf("reply of %d bytes: %v", len(reply), err)
			}
		}
		if _, err := os.Stat(c.dir); err != nil {
			t.Fatal(err)
		}
	})
}

// A call claims to have been alone only when no other call changed the object meanwhile.
func TestChangesAreNotAloneTogether(t *testing.T) {
	var ch changes
	var value atomic.Int64
	var wrong atomic.Int64
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for range 20000 {
				ticket, alone := ch.begin()
				before := value.Load()
				value.Add(1)
				after := value.Load()
				if ch.end(ticket, alone) && after != before+1 {
					wrong.Add(1)
				}
			}
		})
	}
	callers.Wait()
	if n := wrong.Load(); n > 0 {
		t.Errorf("changes that claim to have been alone: got %d wrong, want 0", n)
	}
}
