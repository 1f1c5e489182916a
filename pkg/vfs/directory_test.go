package vfs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

var dirProcs = []nfs3.Proc{nfs3.ProcReadDir, nfs3.ProcReadDirPlus}

// TestReadDirCookieLoopsFail lists directories of servers whose cookies repeat or never end. Each
// listing fails after few calls.
func TestReadDirCookieLoopsFail(t *testing.T) {
	const maxCalls = 40 // maximum calls per listing
	e := startExport(t)
	for _, c := range []struct {
		name string
		a    answer
	}{
		{"the same reply every time", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setDirResult(m, false, scriptedEntry{"a", 1}, scriptedEntry{"b", 2})
			return nil
		}},
		{"two alternating replies", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			next := map[uint64]uint64{0: 1, 1: 2, 2: 1}[dirCookie(m)]
			setDirResult(m, false, scriptedEntry{fmt.Sprint("f", next), next})
			return nil
		}},
		{"one cookie for two entries", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setDirResult(m, true, scriptedEntry{"a", 7}, scriptedEntry{"b", 7})
			return nil
		}},
		{"a cookie of 0", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setDirResult(m, false, scriptedEntry{"a", 1}, scriptedEntry{"b", 0})
			return nil
		}},
		{"no entries and no EOF", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setDirResult(m, false)
			return nil
		}},
		{"BAD_COOKIE for every cookie", func(ctx context.Context, m *sunrpc.Message, pass func() error) error {
			if dirCookie(m) != 0 {
				return status(nfs.ErrBadCookie)(ctx, m, pass)
			}
			setDirResult(m, false, scriptedEntry{"a", 1})
			return nil
		}},
		{"BAD_COOKIE at the start", status(nfs.ErrBadCookie)},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			must(t, os.MkdirAll(m.path("d"), 0o755))
			s.on(c.a, dirProcs...)
			if _, err := os.ReadDir(m.path("d")); err == nil {
				t.Error("readdir: got no error, want one")
			}
			if n := s.count(nfs3.ProcReadDir) + s.count(nfs3.ProcReadDirPlus); n == 0 || n > maxCalls {
				t.Errorf("READDIR calls: got %d, want 1 to %d", n, maxCalls)
			}
			s.on(nil, dirProcs...)
			if list, err := os.ReadDir(m.path("d")); err != nil || len(list) != 0 {
				t.Errorf("readdir after the server recovered: got %v, %v, want an empty list", list, err)
			}
		})
	}
}

// createNames creates n empty files in a new directory and returns their names in order.
func createNames(t *testing.T, dir string, n int) []string {
	t.Helper()
	must(t, os.Mkdir(dir, 0o755))
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("name-%05d", i))
		must(t, os.WriteFile(filepath.Join(dir, names[i]), nil, 0o644))
	}
	return names
}

func wantNames(t *testing.T, dir string, want []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, entry := range list {
		got = append(got, entry.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("names: got %d, want %d in the same order", len(got), len(want))
	}
}

// TestReadDirRestartsAfterBadCookie lists a directory while the server returns NFS3ERR_BAD_COOKIE
// three times (RFC 1813 §3.3.16). The listing has each name once.
func TestReadDirRestartsAfterBadCookie(t *testing.T) {
	e := startExport(t)
	want := createNames(t, filepath.Join(e.dir, "d"), 1500)
	m, s := e.mountScripted(t, mountConfig{opts: Options{DirCount: 8 << 10}})
	calls := 0
	// The second one occurs while the client looks for the reader's position.
	forgets := map[int]bool{6: true, 9: true, 40: true}
	s.on(func(ctx context.Context, msg *sunrpc.Message, pass func() error) error {
		if calls++; dirCookie(msg) != 0 && forgets[calls] {
			return status(nfs.ErrBadCookie)(ctx, msg, pass)
		}
		return pass()
	}, dirProcs...)
	wantNames(t, m.path("d"), want)
	if m.fs.Counters.ReadDirRestarts.Load() == 0 {
		t.Error("restarts of the listing: got 0, want at least 1")
	}
}

// TestReadDirWithoutReadDirPlus lists directories of servers without READDIRPLUS. The client tries
// READDIRPLUS only once.
func TestReadDirWithoutReadDirPlus(t *testing.T) {
	e := startExport(t)
	want := createNames(t, filepath.Join(e.dir, "d"), 300)
	for name, a := range map[string]answer{
		"NFS3ERR_NOTSUPP": status(nfs.ErrNotSupp),
		"PROC_UNAVAIL": func(context.Context, *sunrpc.Message, func() error) error {
			return &sunrpc.AcceptError{Stat: sunrpc.ProcUnavail}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{opts: Options{DirCount: 4 << 10}})
			s.on(a, nfs3.ProcReadDirPlus)
			for range 3 {
				wantNames(t, m.path("d"), want)
			}
			if n := s.count(nfs3.ProcReadDirPlus); n != 1 {
				t.Errorf("READDIRPLUS calls: got %d, want 1", n)
			}
		})
	}
}

// TestReadDirFindsPositionByName lists a directory of a server that numbers its entries again when
// another client changes the directory, and then returns NFS3ERR_BAD_COOKIE for old cookies. The
// listing has each unchanged name once. Between the calls of a program with a small buffer, the
// kernel goes back to the last entry that the program got.
func TestReadDirFindsPositionByName(t *testing.T) {
	t.Parallel()
	e := startExport(t)
	list := func(first uint64, names ...string) (entries []scriptedEntry) {
		for i, name := range names {
			entries = append(entries, scriptedEntry{name, first + uint64(i)})
		}
		return entries
	}
	for _, tt := range []struct {
		name  string
		after []scriptedEntry // the directory after the change
		want  []string
	}{
		{"earlier entry removed", list(1, "a", "c", "d", "e"), []string{"a", "b", "c", "d", "e"}},
		{"last entry removed", list(1, "a", "b", "d", "e"), []string{"a", "b", "c", "d", "e"}},
		{"entry added in front", list(1, "0", "a", "b", "c", "d", "e"), []string{"a", "b", "c", "d", "e"}},
		{"other cookies", list(100, "a", "b", "c", "d", "e"), []string{"a", "b", "c", "d", "e"}},
		{"other order", list(1, "c", "a", "d", "b", "e"), []string{"a", "b", "c", "d", "e"}},
		{"two last entries removed", list(7, "a", "d", "e"), []string{"a", "b", "c", "d", "e"}},
		{"all entries replaced", list(1, "x", "y", "z"), []string{"a", "b", "c", "x", "y", "z"}},
	} {
		for i, buffer := range []int{48, 8192, 48, 8192} { // 48 bytes are two entries
			partial := i > 1 // the client does not know all names that the program got
			t.Run(fmt.Sprintf("%s, buffer of %d bytes, partial %v", tt.name, buffer, partial), func(t *testing.T) {
				m, s := e.mountScripted(t, mountConfig{})
				must(t, os.MkdirAll(m.path("d"), 0o755))
				changed := false
				s.on(func(ctx context.Context, msg *sunrpc.Message, pass func() error) error {
					cookie := dirCookie(msg)
					switch {
					case !changed && cookie == 0:
						setDirResult(msg, false, list(1, "a", "b", "c")...)
					case !changed:
						changed = true
						for _, d := range m.fs.handles.dirs { // this call holds the mutex of the only one
							d.returned.partial = partial
						}
						return status(nfs.ErrBadCookie)(ctx, msg, pass)
					default:
						at := 0
						for cookie != 0 && tt.after[at].cookie != cookie {
							at++
						}
						if cookie != 0 {
							at++
						}
						setDirResult(msg, true, tt.after[at:]...)
					}
					return nil
				}, dirProcs...)
				got, err := readNames(t, m.path("d"), buffer)
				known := !partial || slices.ContainsFunc(tt.after, func(e scriptedEntry) bool { return e.name <= "c" })
				if (err == nil) != known {
					t.Fatalf("readdir: got %v, want success %v", err, known)
				}
				got = slices.DeleteFunc(got, func(name string) bool { return name == "0" }) // new: may be listed
				if slices.Sort(got); err == nil && !slices.Equal(got, tt.want) {
					t.Errorf("names: got %q, want %q", got, tt.want)
				}
			})
		}
	}
}

// readNames lists a directory with getdents(2) and a buffer of some bytes.
func readNames(t *testing.T, path string, buffer int) (names []string, err error) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	b := make([]byte, buffer)
	for {
		n, err := unix.Getdents(fd, b)
		if n <= 0 || err != nil {
			return names, err
		}
		_, _, names = unix.ParseDirent(b[:n], -1, names)
	}
}

// TestReturnedNamesAreBounded adds names to directories until there is no room. Each then knows its
// last names.
func TestReturnedNamesAreBounded(t *testing.T) {
	var all atomic.Int64
	all.Store(maxReturnedAll - 2*returnedStep)
	first, second := returnedNames{all: &all}, returnedNames{all: &all}
	for i := range 3 * returnedStep {
		first.add(fmt.Sprint(i))
		second.add(fmt.Sprint(i))
	}
	for _, n := range []*returnedNames{&first, &second} {
		known := n.sorted()
		for i := range returnedStep / 2 {
			if name := fmt.Sprint(3*returnedStep - 1 - i); !known.contains(name) {
				t.Fatalf("name %s is not known", name)
			}
		}
		if len(n.hashes) > returnedStep+n.room || !n.partial {
			t.Errorf("got %d names with room for %d, partial %v; want partial", len(n.hashes), returnedStep+n.room,
				n.partial)
		}
	}
	first.free()
	if second.add("next"); first.room != 0 || second.room != 2*returnedStep {
		t.Errorf("room after the end of the other directory: got %d, want %d", second.room, 2*returnedStep)
	}
	second.free()
	if n := all.Load(); n != maxReturnedAll-2*returnedStep {
		t.Errorf("room in use at the end: got %d, want %d", n, maxReturnedAll-2*returnedStep)
	}
}
