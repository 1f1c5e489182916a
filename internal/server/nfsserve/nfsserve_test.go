package nfsserve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// start serves a temporary directory and returns the server with its directory.
func start(t testing.TB, change func(*Config)) (*Server, string) {
	t.Helper()
	dir := t.TempDir()
	kit.Must(t, os.Chmod(dir, 0o777))
	cfg := Config{Dir: dir, RDMAListen: "127.0.0.1:0", TCPListen: "127.0.0.1:0", NoRootSquash: true,
		Insecure: true, StateDir: t.TempDir(), Provider: softiwarp.New(softiwarp.Config{})}
	if change != nil {
		change(&cfg)
	}
	s, err := Run(context.Background(), cfg)
	kit.Must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s, dir
}

// client is an NFSv3 client over TCP with the root handle.
type client struct {
	*mounts.Client
	rpc *rpctcp.Client
}

func dial(t testing.TB, addr string) *client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	t.Cleanup(cancel)
	r, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	kit.Must(t, err)
	t.Cleanup(func() { r.Close() })
	c := &client{Client: &mounts.Client{Client: nfs3.NewClient(r), T: t, Ctx: ctx,
		Cred: mounts.Credential(0, 0)}, rpc: r}
	m := sunrpc.Message{Prog: progMount, Vers: versMount, Proc: mountMnt, Cred: c.Cred,
		Args: sunrpc.AppendString(nil, "/"), MaxResult: 200, Result: make([]byte, 0, 200)}
	c.OK(r.Call(ctx, &m))
	d := sunrpc.NewDecoder(m.Result)
	if st := d.Uint32(); st != 0 {
		t.Fatalf("MNT: status %d", st)
	}
	c.Root, err = nfs3.NewFH(d.Opaque(nfs3.FHSize))
	c.OK(err)
	return c
}

func TestReadWriteCommit(t *testing.T) {
	s, dir := start(t, nil)
	c := dial(t, s.TCPAddr)
	fh := c.MustCreate(c.Cred, c.Root, "file", 0o640)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	var w nfs3.WriteResult
	c.OK(c.Write(c.Ctx, c.Cred, fh, 0, data, nfs3.Unstable, &w))
	if w.Count != uint32(len(data)) || w.Committed != nfs3.Unstable {
		t.Errorf("WRITE: %d bytes, %v", w.Count, w.Committed)
	}
	var cm nfs3.CommitResult
	c.OK(c.Commit(c.Ctx, c.Cred, fh, 0, 0, &cm))
	if cm.Verf != w.Verf || cm.Verf == (nfs3.Verifier{}) {
		t.Errorf("verifiers %x and %x", cm.Verf, w.Verf)
	}
	c.OK(c.Write(c.Ctx, c.Cred, fh, uint64(len(data)), []byte("abc"), nfs3.FileSync, &w))
	if w.Committed != nfs3.FileSync {
		t.Errorf("stable WRITE: %v", w.Committed)
	}
	buf := make([]byte, 1<<20)
	var r nfs3.ReadResult
	c.OK(c.Read(c.Ctx, c.Cred, fh, 0, buf, &r))
	if r.N != len(data) || r.EOF || !bytes.Equal(buf[:r.N], data) {
		t.Errorf("READ: %d bytes, eof %v", r.N, r.EOF)
	}
	c.OK(c.Read(c.Ctx, c.Cred, fh, uint64(len(data)), buf, &r))
	if r.N != 3 || !r.EOF || string(buf[:3]) != "abc" {
		t.Errorf("READ at the end: %d %v", r.N, r.EOF)
	}
	if info, err := os.Stat(filepath.Join(dir, "file")); err != nil || info.Mode().Perm() != 0o640 ||
		info.Size() != int64(len(data)+3) {
		t.Errorf("on disk: %v %v", info, err)
	}
}

// A WRITE without disk space fails with ENOSPC. The space is free again when the file is removed.
func TestDiskFull(t *testing.T) {
	kit.NeedsRoot(t)
	var disk string
	s, _ := start(t, func(c *Config) {
		disk = c.Dir
		kit.Must(t, syscall.Mount("none", disk, "tmpfs", 0, "size=64k"))
		t.Cleanup(func() {
			if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	})
	c := dial(t, s.TCPAddr)
	var w nfs3.WriteResult
	for _, name := range []string{"first", "second"} {
		fh := c.MustCreate(c.Cred, c.Root, name, 0o600)
		c.OK(c.Write(c.Ctx, c.Cred, fh, 0, make([]byte, 60<<10), nfs3.Unstable, &w))
		off := uint64(60 << 10)
		// a short WRITE
		c.OK(c.Write(c.Ctx, c.Cred, fh, off, make([]byte, 60<<10), nfs3.Unstable, &w))
		off += uint64(w.Count)
		c.Want(c.Write(c.Ctx, c.Cred, fh, off, make([]byte, 60<<10), nfs3.Unstable, &w), syscall.ENOSPC)
		if err := c.Write(c.Ctx, c.Cred, fh, 1<<63, []byte("x"), nfs3.Unstable, &w); err == nil {
			t.Error("an offset that no file has was taken")
		}
		var wcc nfs3.WccData
		c.OK(c.Remove(c.Ctx, c.Cred, c.Root, name, &wcc))
	}
}

func TestErrnos(t *testing.T) {
	s, _ := start(t, nil)
	c := dial(t, s.TCPAddr)
	var cr nfs3.CreateResult
	var wcc nfs3.WccData
	var ren nfs3.RenameResult
	c.OK(c.Mkdir(c.Ctx, c.Cred, c.Root, "full", &nfs3.SetAttr{}, &cr))
	full := cr.FH
	c.OK(c.Create(c.Ctx, c.Cred, full, "f", &nfs3.CreateHow{}, &cr))
	c.OK(c.Mkdir(c.Ctx, c.Cred, c.Root, "other", &nfs3.SetAttr{}, &cr))
	c.Want(c.Rmdir(c.Ctx, c.Cred, c.Root, "full", &wcc), syscall.ENOTEMPTY)
	c.Want(c.Rename(c.Ctx, c.Cred, c.Root, "other", c.Root, "full", &ren), syscall.ENOTEMPTY)
	c.Want(c.Rename(c.Ctx, c.Cred, c.Root, "full", full, "sub", &ren), syscall.EINVAL)
	c.OK(c.Rename(c.Ctx, c.Cred, c.Root, "full", c.Root, "other", &ren)) // over an empty directory
	c.OK(c.Rename(c.Ctx, c.Cred, c.Root, "other", c.Root, "full", &ren))
	c.Want(c.Rmdir(c.Ctx, c.Cred, full, "f", &wcc), syscall.ENOTDIR)
	c.Want(c.Remove(c.Ctx, c.Cred, c.Root, "full", &wcc), syscall.EISDIR)
	c.Want(c.Remove(c.Ctx, c.Cred, c.Root, "none", &wcc), syscall.ENOENT)
	c.Want(c.Mkdir(c.Ctx, c.Cred, c.Root, "full", &nfs3.SetAttr{}, &cr), syscall.EEXIST)
	c.Want(c.Create(c.Ctx, c.Cred, full, "f", &nfs3.CreateHow{Mode: nfs3.Guarded}, &cr), syscall.EEXIST)
	var lk nfs3.LookupResult
	c.Want(c.Lookup(c.Ctx, c.Cred, c.Root, "none", &lk), syscall.ENOENT)
	c.Want(c.Lookup(c.Ctx, c.Cred, c.MustLookup(full, "f").FH, "x", &lk), syscall.ENOTDIR)
	var r nfs3.ReadResult
	c.Want(c.Read(c.Ctx, c.Cred, full, 0, make([]byte, 10), &r), syscall.EISDIR)
}

func TestAttributes(t *testing.T) {
	kit.NeedsRoot(t)
	s, dir := start(t, nil)
	c := dial(t, s.TCPAddr)
	fh := c.MustCreate(c.Cred, c.Root, "f", 0o644)
	var wcc nfs3.WccData
	set := func(a nfs3.SetAttr) { t.Helper(); c.OK(c.SetAttr(c.Ctx, c.Cred, fh, &a, nil, &wcc)) }
	set(nfs3.SetAttr{HasSize: true, Size: 1234})
	set(nfs3.SetAttr{HasUID: true, UID: 1000, HasGID: true, GID: 1001})
	set(nfs3.SetAttr{HasMode: true, Mode: 0o1751})
	set(nfs3.SetAttr{MtimeHow: nfs3.SetToClientTime, Mtime: nfs3.Time3{Sec: 1e9, Nsec: 5}})
	var a nfs3.Attr
	c.OK(c.GetAttr(c.Ctx, c.Cred, fh, &a))
	if a.Size != 1234 || a.UID != 1000 || a.GID != 1001 || a.Mode != 0o1751 ||
		a.Mtime != (nfs3.Time3{Sec: 1e9, Nsec: 5}) {
		t.Errorf("%+v", a)
	}
	// NFS3ERR_NOT_SYNC
	c.Want(c.SetAttr(c.Ctx, c.Cred, fh, &nfs3.SetAttr{}, &nfs3.Time3{Sec: 1}, &wcc), syscall.EAGAIN)

	var cr nfs3.CreateResult
	for name, tc := range map[string]struct {
		typ  nfs3.FileType
		mode os.FileMode
	}{
		"fifo": {nfs3.NF3FIFO, os.ModeNamedPipe},
		"sock": {nfs3.NF3SOCK, os.ModeSocket},
		"chr":  {nfs3.NF3CHR, os.ModeDevice | os.ModeCharDevice},
		"blk":  {nfs3.NF3BLK, os.ModeDevice},
	} {
		if err := c.Mknod(c.Ctx, c.Cred, c.Root, name, tc.typ, &nfs3.SetAttr{HasMode: true, Mode: 0o600},
			nfs3.Device{Major: 1, Minor: 3}, &cr); err != nil {
			t.Errorf("MKNOD %s: %v", name, err)
			continue
		}
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil || info.Mode() != tc.mode|0o600 {
			t.Errorf("MKNOD %s: %v %v", name, info, err)
		}
		if !cr.HasFH || cr.Attr.Type != tc.typ {
			t.Errorf("MKNOD %s: %+v", name, cr)
		}
	}
	c.OK(c.Symlink(c.Ctx, c.Cred, c.Root, "sym", "../../etc/passwd", &nfs3.SetAttr{HasMode: true, Mode: 0o777}, &cr))
	buf := make([]byte, 100)
	var rl nfs3.ReadLinkResult
	c.OK(c.ReadLink(c.Ctx, c.Cred, cr.FH, buf, &rl))
	if string(buf[:rl.N]) != "../../etc/passwd" {
		t.Errorf("READLINK: %q", buf[:rl.N])
	}
}

func TestExclusiveCreate(t *testing.T) {
	kit.NeedsRoot(t)
	s, _ := start(t, nil)
	c := dial(t, s.TCPAddr)
	var cr nfs3.CreateResult
	how := nfs3.CreateHow{Mode: nfs3.Exclusive, Verf: nfs3.Verifier{1, 2, 3, 4, 5, 6, 7, 8}}
	c.OK(c.Create(c.Ctx, c.Cred, c.Root, "x", &how, &cr))
	fh := cr.FH
	c.OK(c.Create(c.Ctx, c.Cred, c.Root, "x", &how, &cr))
	if cr.FH != fh {
		t.Error("the same verifier gives another handle")
	}
	how.Verf[7]++
	c.Want(c.Create(c.Ctx, c.Cred, c.Root, "x", &how, &cr), syscall.EEXIST)

	// UNCHECKED keeps the data.
	var w nfs3.WriteResult
	c.OK(c.Write(c.Ctx, c.Cred, fh, 0, []byte("keep"), nfs3.Unstable, &w))
	c.OK(c.Create(c.Ctx, c.Cred, c.Root, "x", &nfs3.CreateHow{}, &cr))
	if cr.Attr.Size != 4 {
		t.Errorf("UNCHECKED truncated to %d", cr.Attr.Size)
	}
	c.OK(c.Create(c.Ctx, c.Cred, c.Root, "x", &nfs3.CreateHow{Attr: nfs3.SetAttr{HasSize: true}}, &cr))
	if cr.Attr.Size != 0 {
		t.Errorf("UNCHECKED with size 0: %d", cr.Attr.Size)
	}
}

// Symbolic links do not lead out of the export.
func TestConfined(t *testing.T) {
	s, dir := start(t, nil)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	kit.Must(t, os.MkdirAll(outside, 0o777))
	secret := filepath.Join(outside, "secret")
	kit.Must(t, os.WriteFile(secret, []byte("secret"), 0o666))
	for name, target := range map[string]string{"file": secret, "dir": outside, "rel": "../outside"} {
		kit.Must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	c := dial(t, s.TCPAddr)
	var lk nfs3.LookupResult
	var r nfs3.ReadResult
	var w nfs3.WriteResult
	var cr nfs3.CreateResult
	var wcc nfs3.WccData
	fails := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s succeeded", what)
		}
	}
	f := c.MustLookup(c.Root, "file")
	if f.Attr.Type != nfs3.NF3LNK {
		t.Errorf("LOOKUP followed the link: %v", f.Attr.Type)
	}
	fails("READ", c.Read(c.Ctx, c.Cred, f.FH, 0, make([]byte, 10), &r))
	fails("WRITE", c.Write(c.Ctx, c.Cred, f.FH, 0, []byte("x"), nfs3.Unstable, &w))
	fails("SETATTR size", c.SetAttr(c.Ctx, c.Cred, f.FH, &nfs3.SetAttr{HasSize: true}, nil, &wcc))
	_ = c.SetAttr(c.Ctx, c.Cred, f.FH, &nfs3.SetAttr{HasMode: true, Mode: 0o600, MtimeHow: nfs3.SetToServerTime,
		HasUID: true, UID: 7}, nil, &wcc)
	fails("CREATE over the link", c.Create(c.Ctx, c.Cred, c.Root, "file",
		&nfs3.CreateHow{Attr: nfs3.SetAttr{HasSize: true}}, &cr))
	for _, d := range []string{"dir", "rel"} {
		fh := c.MustLookup(c.Root, d).FH
		fails("LOOKUP behind "+d, c.Lookup(c.Ctx, c.Cred, fh, "secret", &lk))
		fails("CREATE behind "+d, c.Create(c.Ctx, c.Cred, fh, "new", &nfs3.CreateHow{}, &cr))
		fails("REMOVE behind "+d, c.Remove(c.Ctx, c.Cred, fh, "secret", &wcc))
	}
	if up := c.MustLookup(c.Root, ".."); up.FH != c.Root {
		t.Errorf("LOOKUP of .. in the root: got %v, want the root", up.FH)
	}
	info, err := os.Stat(secret)
	if err != nil || info.Size() != 6 || info.Mode().Perm() != 0o644 && info.Mode().Perm() != 0o666 ||
		ownerOf(info) != uint32(os.Getuid()) {
		t.Errorf("the file outside was touched: %v %v", info, err)
	}
}

func TestFSInfo(t *testing.T) {
	s, dir := start(t, nil)
	c := dial(t, s.TCPAddr)
	var fi nfs3.FSInfoResult
	c.OK(c.FSInfo(c.Ctx, c.Cred, c.Root, &fi))
	if fi.ReadMax != 1<<20 || fi.WriteMax != 1<<20 || fi.DirPref == 0 {
		t.Errorf("%+v", fi)
	}
	var fs nfs3.FSStatResult
	c.OK(c.FSStat(c.Ctx, c.Cred, c.Root, &fs))
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil || fs.TotalBytes != st.Blocks*uint64(st.Bsize) {
		t.Errorf("FSSTAT: %+v, disk %d", fs, st.Blocks*uint64(st.Bsize))
	}
	var pc nfs3.PathConfResult
	c.OK(c.PathConf(c.Ctx, c.Cred, c.Root, &pc))
	bad, _ := nfs3.NewFH([]byte("0123456789abcdef"))
	c.Want(c.FSInfo(c.Ctx, c.Cred, bad, &fi), syscall.ESTALE)
}

// The TCP port answers the port mapper and MOUNT, and refuses other programs.
func TestOtherPrograms(t *testing.T) {
	s, _ := start(t, nil)
	c := dial(t, s.TCPAddr)
	call := func(prog, vers, proc uint32, args []byte) ([]byte, error) {
		m := sunrpc.Message{Prog: prog, Vers: vers, Proc: proc, Cred: c.Cred, Args: args, MaxResult: 200,
			Result: make([]byte, 0, 200)}
		err := c.rpc.Call(c.Ctx, &m)
		return m.Result, err
	}
	words := func(ws ...uint32) (b []byte) {
		for _, w := range ws {
			b = sunrpc.AppendUint32(b, w)
		}
		return b
	}
	_, port, _ := net.SplitHostPort(s.TCPAddr)
	for _, prog := range [][2]uint32{{nfs3.Program, 3}, {progMount, 3}} {
		got, err := call(progPortmap, 2, pmapGetPort, words(prog[0], prog[1], ipprotoTCP, 0))
		c.OK(err)
		d := sunrpc.NewDecoder(got)
		if p := d.Uint32(); fmt.Sprint(p) != port {
			t.Errorf("port of %v: %d, want %s", prog, p, port)
		}
	}
	got, err := call(progMount, 3, mountMnt, sunrpc.AppendString(nil, "/nowhere"))
	if d := sunrpc.NewDecoder(got); err != nil || d.Uint32() != stNoEnt {
		t.Errorf("MNT of another path: %x %v", got, err)
	}
	for _, proc := range []uint32{mountNull, mountDump, mountUmntAll, mountExport} {
		if _, err := call(progMount, 3, proc, nil); err != nil {
			t.Errorf("MOUNT procedure %d: %v", proc, err)
		}
	}
	for _, tc := range []struct {
		prog, vers, proc uint32
		args             []byte
		want             sunrpc.AcceptStat
	}{
		{99, 1, 1, nil, sunrpc.ProgUnavail},
		{nfs3.Program, 4, 1, nil, sunrpc.ProgMismatch},
		{progMount, 1, 1, nil, sunrpc.ProgMismatch},
		{nfs3.Program, 3, 22, nil, sunrpc.ProcUnavail},
		{nfs3.Program, 3, 1, words(0xffffffff), sunrpc.GarbageArgs},
		{nfs3.Program, 3, 7, words(0, 0, 0, 5, 0, 0xfffffff0), sunrpc.GarbageArgs},
		{progMount, 3, 1, words(5000), sunrpc.GarbageArgs},
	} {
		_, err := call(tc.prog, tc.vers, tc.proc, tc.args)
		var ae *sunrpc.AcceptError
		if !errors.As(err, &ae) || ae.Stat != tc.want {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

func TestConfigRefused(t *testing.T) {
	p := softiwarp.New(softiwarp.Config{})
	for name, cfg := range map[string]Config{
		"nothing":       {Provider: p},
		"both":          {Provider: p, Dir: "/", Backend: "127.0.0.1:2049"},
		"no provider":   {Dir: "/"},
		"no directory":  {Provider: p, Dir: "/nowhere/at/all", RDMAListen: "127.0.0.1:0"},
		"backend":       {Provider: p, Backend: "nowhere", RDMAListen: "127.0.0.1:0"},
		"RDMA address":  {Provider: p, Backend: "127.0.0.1:1", RDMAListen: "127.0.0.1:many"},
		"TCP port":      {Provider: p, Dir: t.TempDir(), RDMAListen: "127.0.0.1:0", TCPListen: "127.0.0.1:99999"},
		"RDMA occupied": {Provider: p, Dir: t.TempDir(), RDMAListen: occupied(t), TCPListen: "127.0.0.1:0"},
	} {
		if s, err := Run(context.Background(), cfg); err == nil {
			s.Close()
			t.Errorf("%s: accepted", name)
		}
	}
}

func occupied(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return l.Addr().String()
}
