package vfs

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// walkMount mounts an export with files in the directory d, and returns their names in the order of
// the listing. The attributes of all files have expired.
func walkMount(t *testing.T, files int) (e *export, m *testMount, s *scripted, names []string) {
	t.Helper()
	e = startOwnExport(t)
	createNames(t, filepath.Join(e.dir, "d"), files)
	m, s = e.mountScripted(t, mountConfig{opts: Options{AcRegMin: time.Minute, AcRegMax: time.Minute,
		AcDirMin: time.Minute, AcDirMax: time.Minute}})
	m.severalUsers() // the kernel keeps no names
	f, err := os.Open(m.path("d"))
	must(t, err)
	defer f.Close()
	for err == nil { // as ls -l
		var more []string
		more, err = f.Readdirnames(100)
		walk(t, m, more)
		names = append(names, more...)
	}
	if err != io.EOF || len(names) != files {
		t.Fatalf("list d: got %d names, %v, want %d", len(names), err, files)
	}
	m.expireAttrs(t)
	return e, m, s, names
}

// expireAttrs makes the file system ask the server for the attributes of all files.
func (m *testMount) expireAttrs(t *testing.T) {
	t.Helper()
	m.fs.inodes.mu.Lock()
	defer m.fs.inodes.mu.Unlock()
	for _, ino := range m.fs.inodes.byID {
		if !ino.attr.IsDir() {
			m.fs.invalidateAttr(ino)
		}
	}
}

// walk gets the attributes of files in d.
func walk(t *testing.T, m *testMount, names []string) {
	t.Helper()
	var st unix.Stat_t
	for _, name := range names {
		must(t, unix.Lstat(m.path("d/"+name), &st))
	}
}

// walkCalls returns the number of calls that walks cause.
func (s *scripted) walkCalls() int {
	return s.count(nfs3.ProcGetAttr) + s.count(nfs3.ProcLookup) + s.count(nfs3.ProcReadDirPlus)
}

// TestWalkRenewsAttributes checks that a walk of a directory whose attributes have expired needs
// few calls, in the order of the listing and in another order.
func TestWalkRenewsAttributes(t *testing.T) {
	const files = 1000
	_, m, s, names := walkMount(t, files)
	for _, c := range []struct {
		name  string
		calls int // maximum
	}{{"order of the listing", files / 10}, {"any order", files / 2}} {
		before := s.walkCalls()
		walk(t, m, names)
		if n := s.walkCalls() - before; n == 0 || n > c.calls {
			t.Errorf("%s: calls for %d files: got %d, want 1 to %d", c.name, files, n, c.calls)
		}
		m.expireAttrs(t)
		rand.New(rand.NewPCG(1, 2)).Shuffle(files, func(i, j int) { names[i], names[j] = names[j], names[i] })
	}
}

// TestWalkSeesChanges checks that a walk sees what another client has changed since the attributes
// expired, in connection of the program, and that an open gets the attributes from the server.
func TestWalkSeesChanges(t *testing.T) {
	const files = 2000
	e, m, s, names := walkMount(t, files)
	dir := filepath.Join(e.dir, "d")
	walk(t, m, names[:50])
	if m.fs.Counters.Renewals.Load() == 0 {
		t.Fatal("no renewal at the start of the walk")
	}
	want := []byte("changed after the renewal")
	must(t, os.WriteFile(filepath.Join(dir, names[60]), want, 0o644))
	wantContent(t, m.path("d/"+names[60]), want)
	must(t, os.WriteFile(filepath.Join(dir, names[1000]), []byte("changed"), 0o644))
	must(t, os.Remove(filepath.Join(dir, names[1200])))
	must(t, os.WriteFile(filepath.Join(dir, "new"), []byte("replaced"), 0o600))
	must(t, os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, names[1400])))
	before := s.walkCalls()
	for i, name := range names[100:] {
		var st unix.Stat_t
		err := unix.Lstat(m.path("d/"+name), &st)
		if i += 100; i == 1200 {
			if !errors.Is(err, unix.ENOENT) {
				t.Errorf("lstat of a removed file: got %v, want ENOENT", err)
			}
			continue
		}
		must(t, err)
		if want := map[int]string{1000: "changed", 1400: "replaced"}[i]; st.Size != int64(len(want)) {
			t.Errorf("size of file %d: got %d bytes, want %d", i, st.Size, len(want))
		}
	}
	if n := s.walkCalls() - before; n > files/4 {
		t.Errorf("calls: got %d, want at most %d", n, files/4)
	}
}

// TestWalkKeepsOwnChange checks that the attributes of a renewal do not replace those of a change
// that this mount makes while the renewal is in flight.
func TestWalkKeepsOwnChange(t *testing.T) {
	_, m, s, names := walkMount(t, 500)
	over := make(chan struct{})
	replied := make(chan struct{}, 1)
	s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
		err := pass()
		replied <- struct{}{} // the server has the attributes from before the change
		<-over
		return err
	}, nfs3.ProcReadDirPlus)
	walked := make(chan struct{})
	go func() {
		defer close(walked)
		walk(t, m, names[:50])
	}()
	<-replied
	must(t, os.Chmod(m.path("d/"+names[60]), 0o600))
	close(over)
	<-walked
	if n := m.fs.countMode(0o600); n != 1 { // the kernel does not ask for them now
		t.Errorf("nodes with the new mode: got %d, want 1", n)
	}
}

// countMode returns the number of nodes whose cached attributes have a mode.
func (fs *FS) countMode(mode uint32) (n int) {
	fs.inodes.mu.Lock()
	defer fs.inodes.mu.Unlock()
	for _, ino := range fs.inodes.byID {
		if a, _ := ino.attr.Attr(); a.Mode == mode {
			n++
		}
	}
	return n
}

// TestWalkNeedsCachedAttributes checks that a mount without attribute caching renews nothing, and
// that each lstat(2) asks the server.
func TestWalkNeedsCachedAttributes(t *testing.T) {
	for name, opts := range map[string]Options{
		"noac":      {NoAC: true, AcRegMin: time.Minute, AcRegMax: time.Minute, AcDirMax: time.Minute},
		"actimeo=0": {AcDirMax: 1},
	} {
		t.Run(name, func(t *testing.T) {
			const files = 50
			e := startOwnExport(t)
			names := createNames(t, filepath.Join(e.dir, "d"), files)
			m, s := e.mountScripted(t, mountConfig{opts: opts})
			_, err := os.ReadDir(m.path("d"))
			must(t, err)
			before := s.walkCalls() - s.count(nfs3.ProcReadDirPlus)
			walk(t, m, names)
			if n := s.walkCalls() - s.count(nfs3.ProcReadDirPlus) - before; n < files {
				t.Errorf("calls for %d files: got %d, want as many or more", files, n)
			}
			if n := m.fs.Counters.Renewals.Load(); n != 0 {
				t.Errorf("renewals: got %d, want 0", n)
			}
		})
	}
}

// TestWalkRefusedRenewal checks that a walk gets the attributes of all files when the server
// refuses the renewals.
func TestWalkRefusedRenewal(t *testing.T) {
	_, m, s, names := walkMount(t, 500)
	s.on(status(nfs.ErrAcces), nfs3.ProcReadDirPlus)
	walk(t, m, names)
	s.on(status(nfs.ErrBadCookie), nfs3.ProcReadDirPlus)
	walk(t, m, names)
	if n := m.fs.Counters.Renewals.Load(); n != 0 {
		t.Errorf("renewals: got %d, want 0", n)
	}
}

// TestWalkShortReplies walks a directory of a server whose replies have fewer entries than a chunk.
// The renewals then do not return the needed files, and end.
func TestWalkShortReplies(t *testing.T) {
	_, m, s, names := walkMount(t, 1000)
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		binary.BigEndian.PutUint32(call.Args[len(call.Args)-4:], 4096) // maxcount
		return pass()
	}, nfs3.ProcReadDirPlus)
	before := s.count(nfs3.ProcReadDirPlus)
	walk(t, m, names)
	if n := s.count(nfs3.ProcReadDirPlus) - before; n == 0 || n > 10 {
		t.Errorf("READDIRPLUS calls: got %d, want 1 to 10", n)
	}
}
