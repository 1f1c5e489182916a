package nfs3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// TestGanesha calls every procedure of NFS-Ganesha.
func TestGanesha(t *testing.T) {
	dir := t.TempDir()
	s := ganesha.Start(t, dir)
	session{
		root: mount(t, mountd.Args{Host: s.Host, Port: s.MountPort, Export: s.Export}),
		c:    dial(t, s.Addr()),
		dir:  dir,
	}.run(t)
}

func mount(t *testing.T, args mountd.Args) nfs3.FH {
	t.Helper()
	args.Cred = &sunrpc.AuthSys{Machine: "test"}
	res, err := mountd.Mount(t.Context(), args)
	kit.Must(t, err)
	return res.FH
}

func dial(t *testing.T, addr string) *nfs3.Client {
	t.Helper()
	rpc, err := rpctcp.Dial(t.Context(), addr, rpctcp.Options{})
	kit.Must(t, err)
	t.Cleanup(func() { rpc.Close() })
	return nfs3.NewClient(rpc)
}

// A session is a connection to a server and the directory that the server exports.
type session struct {
	c    *nfs3.Client
	root nfs3.FH
	dir  string
}

var (
	ctx  = context.Background()
	root = sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test"})
	user = sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test", UID: 1000, GID: 1000, GIDs: []uint32{1001}})
)

func (s session) run(t *testing.T) {
	for _, step := range []struct {
		name string
		do   func(t *testing.T)
	}{
		{"file system", s.fileSystem},
		{"file", s.file},
		{"names", s.names},
		{"special files", s.specialFiles},
		{"attributes", s.attributes},
		{"directory", s.directory},
		{"errors", s.errors},
	} {
		t.Run(step.name, step.do)
	}
}

func (s session) fileSystem(t *testing.T) {
	if err := s.c.Null(ctx, root); err != nil {
		t.Errorf("NULL: %v", err)
	}
	var attr nfs3.Attr
	if err := s.c.GetAttr(ctx, root, s.root, &attr); err != nil || attr.Type != nfs3.NF3DIR {
		t.Errorf("GETATTR of the root: got %+v, error %v; want a directory", attr, err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(s.dir, &st); err != nil || attr.FileID != st.Ino ||
		attr.Mode != st.Mode&nfs3.ModeMask {
		t.Errorf("GETATTR of the root: got %+v, want the attributes on disk %+v", attr, st)
	}
	var info nfs3.FSInfoResult
	if err := s.c.FSInfo(ctx, root, s.root, &info); err != nil || info.ReadMax < 4096 || info.WriteMax < 4096 ||
		info.Properties&nfs3.FSFSymlink == 0 {
		t.Errorf("FSINFO: got %+v, error %v", info, err)
	}
	var stat nfs3.FSStatResult
	if err := s.c.FSStat(ctx, root, s.root, &stat); err != nil || stat.FreeBytes > stat.TotalBytes {
		t.Errorf("FSSTAT: got %+v, error %v", stat, err)
	}
	var conf nfs3.PathConfResult
	if err := s.c.PathConf(ctx, root, s.root, &conf); err != nil || conf.NameMax < 255 {
		t.Errorf("PATHCONF: got %+v, error %v", conf, err)
	}
	var acc nfs3.AccessResult
	if err := s.c.Access(ctx, root, s.root, nfs3.AccessRead|nfs3.AccessLookup|nfs3.AccessModify, &acc); err != nil ||
		acc.Access&nfs3.AccessLookup == 0 {
		t.Errorf("ACCESS: got %+v, error %v; want LOOKUP granted", acc, err)
	}
}

// create creates a file and returns its handle.
func (s session) create(t *testing.T, dir nfs3.FH, name string) nfs3.FH {
	t.Helper()
	var made nfs3.CreateResult
	if err := s.c.Create(ctx, root, dir, name, &nfs3.CreateHow{Attr: nfs3.SetAttr{HasMode: true, Mode: 0o640}},
		&made); err != nil {
		t.Fatal(err)
	}
	return s.handle(t, dir, name, &made)
}

// handle returns the handle of a new object. It calls LOOKUP if the server omitted the handle.
func (s session) handle(t *testing.T, dir nfs3.FH, name string, made *nfs3.CreateResult) nfs3.FH {
	t.Helper()
	if made.HasFH {
		return made.FH
	}
	var look nfs3.LookupResult
	kit.Must(t, s.c.Lookup(ctx, root, dir, name, &look))
	return look.FH
}

func (s session) file(t *testing.T) {
	fh := s.create(t, s.root, "file")
	var wrote nfs3.WriteResult
	if err := s.c.Write(ctx, root, fh, 0, []byte("some content"), nfs3.Unstable, &wrote); err != nil ||
		wrote.Count != 12 {
		t.Fatalf("WRITE: got %+v, error %v; want 12 bytes", wrote, err)
	}
	var com nfs3.CommitResult
	if err := s.c.Commit(ctx, root, fh, 0, 0, &com); err != nil || com.Verf != wrote.Verf {
		t.Errorf("COMMIT: got %+v, error %v; want verifier %x", com, err, wrote.Verf)
	}
	if err := s.c.Write(ctx, root, fh, 5, []byte("CONT"), nfs3.FileSync, &wrote); err != nil ||
		wrote.Committed != nfs3.FileSync {
		t.Errorf("WRITE: got %+v, error %v; want FILE_SYNC", wrote, err)
	}
	onDisk, err := os.ReadFile(filepath.Join(s.dir, "file"))
	if err != nil || string(onDisk) != "some CONTent" {
		t.Errorf("file on disk: got %q, error %v", onDisk, err)
	}
	buf := make([]byte, 100)
	var rd nfs3.ReadResult
	if err := s.c.Read(ctx, root, fh, 0, buf, &rd); err != nil || string(buf[:rd.N]) != "some CONTent" || !rd.EOF {
		t.Errorf("READ: got %q, %+v, error %v", buf[:rd.N], rd, err)
	}
	if err := s.c.Read(ctx, root, fh, 3, buf[:3], &rd); err != nil || string(buf[:rd.N]) != "e C" {
		t.Errorf("READ of 3 bytes: got %q, %+v, error %v", buf[:rd.N], rd, err)
	}
	if err := s.c.Read(ctx, root, fh, 1000, buf, &rd); err != nil || rd.N != 0 || !rd.EOF {
		t.Errorf("READ after the end: got %+v, error %v; want EOF", rd, err)
	}
	var wcc nfs3.WccData
	if err := s.c.SetAttr(ctx, root, fh, &nfs3.SetAttr{HasSize: true, Size: 4}, nil, &wcc); err != nil {
		t.Errorf("SETATTR: %v", err)
	}
	var attr nfs3.Attr
	if err := s.c.GetAttr(ctx, root, fh, &attr); err != nil || attr.Size != 4 || attr.Mode != 0o640 ||
		attr.Type != nfs3.NF3REG {
		t.Errorf("GETATTR: got %+v, error %v; want size 4, mode 640", attr, err)
	}
}

func (s session) names(t *testing.T) {
	var made nfs3.CreateResult
	if err := s.c.Mkdir(ctx, root, s.root, "dir", &nfs3.SetAttr{HasMode: true, Mode: 0o750}, &made); err != nil {
		t.Fatal(err)
	}
	dir := s.handle(t, s.root, "dir", &made)
	fh := s.create(t, dir, "one")
	if err := s.c.Link(ctx, root, fh, dir, "two", new(nfs3.LinkResult)); err != nil {
		t.Errorf("LINK: %v", err)
	}
	var ren nfs3.RenameResult
	if err := s.c.Rename(ctx, root, dir, "one", s.root, "three", &ren); err != nil {
		t.Errorf("RENAME: %v", err)
	}
	var look nfs3.LookupResult
	if err := s.c.Lookup(ctx, root, s.root, "three", &look); err != nil || look.Attr.Nlink != 2 {
		t.Errorf("LOOKUP: got %+v, error %v; want link count 2", look, err)
	}
	if err := s.c.Rmdir(ctx, root, s.root, "dir", new(nfs3.WccData)); !errors.Is(err, syscall.ENOTEMPTY) {
		t.Errorf("RMDIR of a full directory: got error %v, want ENOTEMPTY", err)
	}
	if err := s.c.Remove(ctx, root, dir, "two", new(nfs3.WccData)); err != nil {
		t.Errorf("REMOVE: %v", err)
	}
	if err := s.c.Rmdir(ctx, root, s.root, "dir", new(nfs3.WccData)); err != nil {
		t.Errorf("RMDIR: %v", err)
	}
	target := "../some/where/" + string(bytes.Repeat([]byte("x"), 900))
	if err := s.c.Symlink(ctx, root, s.root, "link", target, &nfs3.SetAttr{}, &made); err != nil {
		t.Fatalf("SYMLINK: %v", err)
	}
	link := s.handle(t, s.root, "link", &made)
	buf := make([]byte, nfs3.MaxPath)
	var got nfs3.ReadLinkResult
	if err := s.c.ReadLink(ctx, root, link, buf, &got); err != nil || string(buf[:got.N]) != target {
		t.Errorf("READLINK: got %q, error %v; want %q", buf[:got.N], err, target)
	}
	if onDisk, err := os.Readlink(filepath.Join(s.dir, "link")); err != nil || onDisk != target {
		t.Errorf("link on disk: got %q, error %v; want %q", onDisk, err, target)
	}
	exclusive := nfs3.CreateHow{Mode: nfs3.Exclusive, Verf: nfs3.Verifier{1, 2, 3, 4, 5, 6, 7, 8}}
	if err := s.c.Create(ctx, root, s.root, "excl", &exclusive, &made); err != nil {
		t.Errorf("CREATE exclusive: %v", err)
	}
	if err := s.c.Create(ctx, root, s.root, "three", &nfs3.CreateHow{Mode: nfs3.Guarded}, &made); !errors.Is(err,
		syscall.EEXIST) {
		t.Errorf("CREATE guarded of an existing file: got error %v, want EEXIST", err)
	}
}

func (s session) specialFiles(t *testing.T) {
	for _, x := range []struct {
		name string
		typ  nfs3.FileType
		dev  nfs3.Device
		mode uint32
	}{
		{"null", nfs3.NF3CHR, nfs3.Device{Major: 1, Minor: 3}, syscall.S_IFCHR},
		{"loop", nfs3.NF3BLK, nfs3.Device{Major: 7, Minor: 300}, syscall.S_IFBLK},
		{"pipe", nfs3.NF3FIFO, nfs3.Device{}, syscall.S_IFIFO},
		{"sock", nfs3.NF3SOCK, nfs3.Device{}, syscall.S_IFSOCK},
	} {
		var made nfs3.CreateResult
		set := nfs3.SetAttr{HasMode: true, Mode: 0o600}
		if err := s.c.Mknod(ctx, root, s.root, x.name, x.typ, &set, x.dev, &made); err != nil {
			t.Errorf("MKNOD %s: %v", x.name, err)
			continue
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(filepath.Join(s.dir, x.name), &st); err != nil || st.Mode&syscall.S_IFMT != x.mode {
			t.Errorf("%s on disk: got mode %o, error %v; want type %o", x.name, st.Mode, err, x.mode)
		}
		var attr nfs3.Attr
		if err := s.c.GetAttr(ctx, root, s.handle(t, s.root, x.name, &made), &attr); err != nil ||
			attr.Type != x.typ || attr.Rdev != x.dev {
			t.Errorf("GETATTR %s: got %+v, error %v; want type %v, device %v", x.name, attr, err, x.typ, x.dev)
		}
	}
}

func (s session) attributes(t *testing.T) {
	fh := s.create(t, s.root, "attrs")
	var before nfs3.Attr
	kit.Must(t, s.c.GetAttr(ctx, root, fh, &before))
	mtime := nfs3.Time3{Sec: 1234567890, Nsec: 123456000}
	set := nfs3.SetAttr{HasMode: true, Mode: 0o711, HasUID: true, UID: 1000, HasGID: true, GID: 1001,
		AtimeHow: nfs3.SetToServerTime, MtimeHow: nfs3.SetToClientTime, Mtime: mtime}
	var wcc nfs3.WccData
	if err := s.c.SetAttr(ctx, root, fh, &set, &before.Ctime, &wcc); err != nil {
		t.Fatalf("SETATTR: %v", err)
	}
	var after nfs3.Attr
	if err := s.c.GetAttr(ctx, root, fh, &after); err != nil || after.UID != 1000 || after.GID != 1001 ||
		after.Mtime != mtime {
		t.Errorf("GETATTR: got %+v, error %v; want the attributes that SETATTR sent", after, err)
	}
	// A separate call, because a change of the owner clears the set-ID bits.
	if err := s.c.SetAttr(ctx, root, fh, &nfs3.SetAttr{HasMode: true, Mode: 0o6711}, nil, &wcc); err != nil ||
		wcc.After.Mode != 0o6711 {
		t.Errorf("SETATTR of the mode: got %+v, error %v; want mode 6711", wcc, err)
	}
	wrong := nfs3.Time3{Sec: before.Ctime.Sec - 5}
	if err := s.c.SetAttr(ctx, root, fh, &nfs3.SetAttr{HasMode: true}, &wrong, &wcc); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("SETATTR with a wrong guard: got error %v, want EAGAIN", err)
	}
	var acc nfs3.AccessResult
	if err := s.c.SetAttr(ctx, root, fh, &nfs3.SetAttr{HasMode: true, Mode: 0o640, HasUID: true, UID: 5}, nil,
		&wcc); err != nil {
		t.Error(err)
	}
	if err := s.c.Access(ctx, user, fh, nfs3.AccessRead|nfs3.AccessModify, &acc); err != nil ||
		acc.Access != nfs3.AccessRead {
		t.Errorf("ACCESS of a group member: got %+v, error %v; want READ only", acc, err)
	}
	if err := s.c.Write(ctx, user, fh, 0, []byte("x"), nfs3.Unstable, new(nfs3.WriteResult)); !errors.Is(err,
		syscall.EACCES) {
		t.Errorf("WRITE of a group member: got error %v, want EACCES", err)
	}
}

// directory lists a directory of several pages with READDIR and READDIRPLUS.
func (s session) directory(t *testing.T) {
	const files = 700
	var made nfs3.CreateResult
	if err := s.c.Mkdir(ctx, root, s.root, "many", &nfs3.SetAttr{HasMode: true, Mode: 0o755}, &made); err != nil {
		t.Fatal(err)
	}
	dir := s.handle(t, s.root, "many", &made)
	var want []string
	for i := range files {
		name := fmt.Sprintf("entry-%04d-%s", i, bytes.Repeat([]byte("n"), i%200))
		want = append(want, name)
		kit.Must(t, os.WriteFile(filepath.Join(s.dir, "many", name), nil, 0o644))
	}
	slices.Sort(want)
	for _, plus := range []bool{false, true} {
		var got []string
		var res nfs3.ReadDirResult
		var cookie uint64
		pages := 0
		for !res.EOF {
			each := func(e *nfs3.DirEntry) bool {
				cookie = e.Cookie
				if name := string(e.Name); name != "." && name != ".." {
					got = append(got, name)
					if plus && (!e.HasFH || !e.Attr.Present || e.Attr.FileID != e.FileID) {
						t.Errorf("READDIRPLUS: got incomplete entry %+v", e)
					}
				}
				return true
			}
			var err error
			if plus {
				err = s.c.ReadDirPlus(ctx, root, dir, cookie, res.Verf, 8192, 32768, &res, each)
			} else {
				err = s.c.ReadDir(ctx, root, dir, cookie, res.Verf, 8192, &res, each)
			}
			if pages++; err != nil || pages > 2*files {
				t.Fatalf("page %d after cookie %d: got error %v", pages, cookie, err)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("plus %v: got %d names in %d pages, want %d names", plus, len(got), pages, len(want))
		}
		if pages < 3 {
			t.Errorf("plus %v: got %d pages, want at least 3", plus, pages)
		}
	}
}

func (s session) errors(t *testing.T) {
	var look nfs3.LookupResult
	if err := s.c.Lookup(ctx, root, s.root, "nothing", &look); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("LOOKUP of a missing name: got error %v, want ENOENT", err)
	}
	if err := s.c.Remove(ctx, root, s.root, "nothing", new(nfs3.WccData)); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("REMOVE of a missing name: got error %v, want ENOENT", err)
	}
	invalid, err := nfs3.NewFH(bytes.Repeat([]byte{0x55}, 32))
	kit.Must(t, err)
	err = s.c.GetAttr(ctx, root, invalid, new(nfs3.Attr))
	if !errors.Is(err, syscall.ESTALE) {
		t.Errorf("GETATTR of an invalid handle: got error %v, want ESTALE", err)
	}
}
