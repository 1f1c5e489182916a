package vfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
)

// newTestState returns a State until the test ends.
func newTestState(t *testing.T, buffers int) *State {
	t.Helper()
	s, err := NewState([]byte("test"), buffers, [16]byte{1})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// stateFile returns the descriptor and the data of the file of a State that is then closed.
func stateFile(t *testing.T, s *State) (f *os.File, data []byte) {
	t.Helper()
	f, err := s.Descriptor()
	must(t, err)
	t.Cleanup(func() { f.Close() })
	must(t, s.Close())
	return f, fileBytes(t, f)
}

// fileBytes returns the first bytes of a file: those of all tables with records of these tests.
func fileBytes(t *testing.T, f *os.File) []byte {
	t.Helper()
	b := make([]byte, 1<<20)
	_, err := unix.Pread(int(f.Fd()), b, 0)
	must(t, err)
	return b
}

// TestDamagedStateIsRefused damages the file of a State. OpenState must return an error and leave
// the file alone.
func TestDamagedStateIsRefused(t *testing.T) {
	secret := [16]byte{0xa5, 0x5a, 0xa5, 0x5a, 0xa5, 0x5a, 0xa5, 0x5a}
	for _, c := range []struct {
		name   string
		damage func(b []byte)
		want   error
	}{
		{"record of the mount", func(b []byte) { b[slices.Index(b, 0xa5)+1] ^= 1 }, slotfile.ErrCorrupt},
		{"magic", func(b []byte) { b[0] ^= 1 }, slotfile.ErrCorrupt},
		{"name of a table", func(b []byte) { b[64] ^= 1 }, slotfile.ErrCorrupt},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := NewState(nil, 4, secret)
			must(t, err)
			f, b := stateFile(t, s)
			good := slices.Clone(b)
			c.damage(b)
			_, err = unix.Pwrite(int(f.Fd()), b, 0)
			must(t, err)
			if s, err := OpenState(f); !errors.Is(err, c.want) {
				t.Errorf("OpenState: got %v, %v, want %v", s, err, c.want)
			}
			if !slices.Equal(fileBytes(t, f), b) {
				t.Error("OpenState has changed the file")
			}
			_, err = unix.Pwrite(int(f.Fd()), good, 0)
			must(t, err)
			s, err = OpenState(f)
			must(t, err)
			must(t, s.Close())
		})
	}
}

// openDirect opens a file of the FS as the kernel does.
func openDirect(t *testing.T, fs *FS, name string) (node, handle uint64) {
	t.Helper()
	var entry fuse.EntryOut
	root := fuse.InHeader{NodeId: fuse.FUSE_ROOT_ID, Unique: 1 << 40}
	if status := call(fs, kernel.OpLookup, root, name+"\x00", &entry); !status.Ok() {
		t.Fatalf("lookup: %v", status)
	}
	var out fuse.OpenOut
	in := fuse.OpenIn{InHeader: fuse.InHeader{NodeId: entry.NodeId, Unique: 1<<40 + 2}, Flags: syscall.O_RDWR}
	if status := call(fs, kernel.OpOpen, in, "", &out); !status.Ok() {
		t.Fatalf("open: %v", status)
	}
	return entry.NodeId, out.Fh
}

// TestCachedLookupIsRecorded looks a name up until the FS answers without the server. The record
// has each reference of the kernel: the next process would otherwise forget the node too early.
func TestCachedLookupIsRecorded(t *testing.T) {
	e := startOwnExport(t)
	must(t, os.WriteFile(e.dir+"/f", nil, 0o644))
	state := newTestState(t, 16)
	m := e.mount(t, mountConfig{opts: Options{State: state}})
	const lookups = 5
	root := fuse.InHeader{NodeId: fuse.FUSE_ROOT_ID, Unique: 1 << 40}
	var entry fuse.EntryOut
	for range lookups {
		if status := call(m.fs, kernel.OpLookup, root, "f\x00", &entry); !status.Ok() {
			t.Fatalf("lookup: %v", status)
		}
	}
	if got := state.nodes.Counter(m.fs.inodes.get(entry.NodeId).kept); got != lookups {
		t.Errorf("recorded references: got %d, want %d", got, lookups)
	}
	m.fs.Forget(entry.NodeId, lookups)
}

// TestFullTables fills the tables of records. Operations that need a record must fail without an
// effect.
func TestFullTables(t *testing.T) {
	e := startOwnExport(t)
	must(t, os.WriteFile(e.dir+"/f", []byte("content"), 0o644))
	state := newTestState(t, 16)
	m := e.mount(t, mountConfig{opts: Options{State: state}})
	f, err := os.Open(m.path("f"))
	must(t, err)
	defer f.Close()
	for _, c := range []struct {
		name  string
		table *slotfile.Table
		call  func() error
	}{
		{"files", state.files.Table, func() error {
			g, err := os.Open(m.path("f"))
			if err == nil {
				g.Close()
			}
			return err
		}},
		{"directories", state.dirs.Table, func() error {
			_, err := os.ReadDir(m.dir)
			return err
		}},
		{"hidden names", state.hidden.Table, func() error { return os.Remove(m.path("f")) }},
	} {
		var slots []slotfile.Slot
		for {
			s, err := c.table.Alloc()
			if err != nil {
				break
			}
			slots = append(slots, s)
		}
		if err := c.call(); !errors.Is(err, syscall.ENFILE) {
			t.Errorf("full table of %s: got error %v, want ENFILE", c.name, err)
		}
		for _, s := range slots {
			c.table.Free(s)
		}
		if _, err := os.Stat(e.dir + "/f"); err != nil {
			t.Errorf("full table of %s: %v", c.name, err)
		}
		if err := c.call(); err != nil {
			t.Errorf("table of %s with room: %v", c.name, err)
		}
	}
}

// smallState returns a State whose tables with these names have few records.
func smallState(t *testing.T, slots int, names ...string) *State {
	t.Helper()
	specs := stateTables(4)
	for i := range specs {
		if slices.Contains(names, specs[i].Name) {
			specs[i].MaxSlots = slots
		}
	}
	file, err := slotfile.Create("test", stateSchema, specs)
	must(t, err)
	s := newState(file)
	s.mountSlot, err = s.mount.Add(&s.mu.mount, 0)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) }) // after the unmount
	return s
}

// TestUserCannotTakeAllRecords opens files and directories as one user, and removes open files,
// until that fails. Other users can still do so, and root gets the records that are left for it.
func TestUserCannotTakeAllRecords(t *testing.T) {
	const slots = 32
	e := startOwnExport(t)
	openExport(t, e)
	var mu sync.Mutex
	var warned []any
	warn := func(_ string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		warned = append(warned, args[slices.Index(args, any("uid"))+1])
	}
	s := smallState(t, slots, "files", "dirs", "hidden")
	m := e.mount(t, mountConfig{opts: Options{State: s, Warn: warn}}).severalUsers()
	n := 0
	for _, c := range []struct {
		name string
		use  func(fds *[]int) error
	}{
		{"files", func(fds *[]int) error {
			n++
			fd, err := unix.Open(m.path(fmt.Sprint("f", n)), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
			if err == nil {
				*fds = append(*fds, fd)
			}
			return err
		}},
		{"directories", func(fds *[]int) error {
			fd, err := unix.Open(m.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err == nil {
				*fds = append(*fds, fd)
			}
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var fds []int
			for _, x := range []struct {
				user user
				n    int
				err  error
			}{{alice, slots / 2, unix.EMFILE}, {bob, slots/2 - slots/16, unix.ENFILE},
				{user{}, slots / 16, unix.ENFILE}} {
				before := len(fds)
				err := x.user.do(t, func() error {
					for range slots + 1 {
						if err := c.use(&fds); err != nil {
							return err
						}
					}
					return nil
				})
				if got := len(fds) - before; got != x.n || !errors.Is(err, x.err) {
					t.Errorf("uid %d: got %d, then error %v; want %d, %v", x.user.uid, got, err, x.n, x.err)
				}
			}
			for _, fd := range fds {
				unix.Close(fd)
			}
			if !eventually(func() bool { return s.files.users.Used()+s.dirs.users.Used() == 0 }) {
				t.Errorf("after the close: got %d files, %d directories", s.files.users.Used(), s.dirs.users.Used())
			}
		})
	}
	t.Run("removed open files", func(t *testing.T) {
		must(t, os.Mkdir(m.path("d"), 0o700))
		must(t, os.Chown(m.path("d"), int(alice.uid), int(alice.gid)))
		removed := 0
		var fds []int
		err := alice.do(t, func() error {
			for ; removed <= slots; removed++ {
				name := m.path(fmt.Sprint("d/f", removed))
				fd, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
				if err != nil {
					return err
				}
				fds = append(fds, fd)
				if removed == slots/2-1 {
					s.hidden.users.Add(alice.uid, 1) // the share of files ends at the same number
				}
				if err := unix.Unlink(name); err != nil {
					return err
				}
			}
			return nil
		})
		if removed != slots/2-1 || !errors.Is(err, unix.EMFILE) {
			t.Errorf("got %d removals, then error %v; want %d, %v", removed, err, slots/2-1, unix.EMFILE)
		}
		s.hidden.users.Release(alice.uid)
		for _, fd := range fds {
			unix.Close(fd)
		}
		if !eventually(func() bool { return s.hidden.users.Used() == 0 }) {
			t.Errorf("after the close: got %d hidden names", s.hidden.users.Used())
		}
	})
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(warned, []any{alice.uid, alice.uid, alice.uid}) {
		t.Errorf("warnings: got users %v, want %d once for each table", warned, alice.uid)
	}
}

// TestRequestsOfOneUserAreRecordedUpToShare records requests of one user, and one of another user.
func TestRequestsOfOneUserAreRecordedUpToShare(t *testing.T) {
	const slots = 8
	s := smallState(t, slots, "requests")
	unique := uint64(0)
	record := func(uid uint32) bool {
		unique += 2
		r := &request{Request: &kernel.Request{Unique: unique, Header: &fuse.InHeader{}}, state: s}
		r.Header.Uid = uid
		return r.record() != nil
	}
	for i := range slots {
		if got, want := record(1), i < slots/2; got != want {
			t.Errorf("request %d: recorded %v, want %v", i, got, want)
		}
	}
	if !record(2) {
		t.Error("the request of another user is not recorded")
	}
	s.mu.Lock()
	for unique, k := range s.mu.byUnique {
		s.forgetRequest(unique, k)
	}
	s.mu.Unlock()
	if n := s.requestUsers.Used(); n != 0 {
		t.Errorf("after the end: got %d requests", n)
	}
}

// TestFullTableOfNodes uses more nodes than the State has records. The first node without a record
// is reported.
func TestFullTableOfNodes(t *testing.T) {
	const room, names = 8, 12
	s := smallState(t, room, "nodes")
	e := startOwnExport(t)
	var warnings []string
	warn := func(msg string, _ ...any) { warnings = append(warnings, msg) } // by one request at a time
	m := e.mount(t, mountConfig{opts: Options{State: s, Warn: warn}})
	for i := range names {
		must(t, os.Mkdir(m.path(fmt.Sprint("d", i)), 0o777))
	}
	if n := m.fs.Counters.NodesWithoutRecord.Load(); n != names-room {
		t.Errorf("nodes without record: got %d, want %d", n, names-room)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "restart") {
		t.Errorf("warnings: got %q, want one", warnings)
	}
	if n := s.Stats().Records["nodes"]; n != room {
		t.Errorf("records of nodes: got %d, want %d", n, room)
	}
}

// TestForgetReleasesFiles forgets a node whose RELEASEs were lost: its open file is closed,
// and a removed file is removed on the server.
func TestForgetReleasesFiles(t *testing.T) {
	e := startOwnExport(t)
	must(t, os.WriteFile(e.dir+"/f", nil, 0o644))
	state := newTestState(t, 16)
	m := e.mount(t, mountConfig{opts: Options{State: state}})
	node, handle := openDirect(t, m.fs, "f")
	must(t, os.Remove(m.path("f")))
	hidden := func() []string {
		names, err := filepath.Glob(e.dir + "/.nfs*")
		must(t, err)
		return names
	}
	if n := hidden(); len(n) != 1 {
		t.Fatalf("hidden names of an open file on the server: got %v, want 1", n)
	}
	m.fs.Forget(node, 1<<20) // all references, also that of unlink(2)
	if !eventually(func() bool {
		return len(hidden()) == 0 && state.files.Len()+state.nodes.Len() == 0
	}) {
		t.Errorf("got hidden names %v and records of %d files and %d nodes, want none", hidden(),
			state.files.Len(), state.nodes.Len())
	}
	call(m.fs, kernel.OpRelease, fuse.ReleaseIn{Fh: handle}, "", none) // no effect
}
