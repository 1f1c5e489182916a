package fusefs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

var dirProcs = []nfs3.Proc{nfs3.ProcReadDir, nfs3.ProcReadDirPlus}

// TestDirectoryCircles lists directories of servers whose cookies lead nowhere. Each ends with an
// error after few calls.
func TestDirectoryCircles(t *testing.T) {
	const most = 40 // calls
	e := startExport(t)
	for _, c := range []struct {
		name string
		a    answer
	}{
		{"same reply again and again", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putDir(m, false, scriptedEntry{"a", 1}, scriptedEntry{"b", 2})
			return nil
		}},
		{"two replies in turns", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			next := map[uint64]uint64{0: 1, 1: 2, 2: 1}[dirCookie(m)]
			putDir(m, false, scriptedEntry{fmt.Sprint("f", next), next})
			return nil
		}},
		{"one cookie for all", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putDir(m, true, scriptedEntry{"a", 7}, scriptedEntry{"b", 7})
			return nil
		}},
		{"back to the start", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putDir(m, false, scriptedEntry{"a", 1}, scriptedEntry{"b", 0})
			return nil
		}},
		{"nothing, and no end", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putDir(m, false)
			return nil
		}},
		{"every cookie is bad", func(ctx context.Context, m *sunrpc.Message, pass func() error) error {
			if dirCookie(m) != 0 {
				return status(nfs3.ErrBadCookie)(ctx, m, pass)
			}
			putDir(m, false, scriptedEntry{"a", 1})
			return nil
		}},
		{"even the start is bad", status(nfs3.ErrBadCookie)},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			must(t, os.MkdirAll(m.path("d"), 0o755))
			s.on(c.a, dirProcs...)
			if _, err := os.ReadDir(m.path("d")); err == nil {
				t.Error("the listing ended well")
			}
			if n := s.count(nfs3.ProcReadDir) + s.count(nfs3.ProcReadDirPlus); n == 0 || n > most {
				t.Errorf("%d calls", n)
			}
			s.on(nil, dirProcs...)
			if list, err := os.ReadDir(m.path("d")); err != nil || len(list) != 0 {
				t.Errorf("afterwards: %v, %v", list, err)
			}
		})
	}
}

// plantNames makes empty files on the server, and returns their names in order.
func plantNames(t *testing.T, dir string, n int) []string {
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
		t.Errorf("%d names, want %d", len(got), len(want))
	}
}

// TestBadCookie lists a directory whose server forgets its cookies now and then (RFC 1813 §3.3.16):
// no name is missing, none comes twice.
func TestBadCookie(t *testing.T) {
	e := startExport(t)
	want := plantNames(t, filepath.Join(e.dir, "d"), 1500)
	m, s := e.mountScripted(t, mountConfig{opts: Options{DirCount: 8 << 10}})
	calls := 0
	// the second while the reader's place is looked for
	forgets := map[int]bool{6: true, 9: true, 40: true}
	s.on(func(ctx context.Context, msg *sunrpc.Message, pass func() error) error {
		if calls++; dirCookie(msg) != 0 && forgets[calls] {
			return status(nfs3.ErrBadCookie)(ctx, msg, pass)
		}
		return pass()
	}, dirProcs...)
	wantNames(t, m.path("d"), want)
	if m.fs.Counters.ReadDirRestarts.Load() == 0 {
		t.Error("the directory was never begun again: the test tests nothing")
	}
}

// TestWithoutReadDirPlus lists on servers that do not have READDIRPLUS, and asks them for it once.
func TestWithoutReadDirPlus(t *testing.T) {
	e := startExport(t)
	want := plantNames(t, filepath.Join(e.dir, "d"), 300)
	for name, a := range map[string]answer{
		"NFS3ERR_NOTSUPP": status(nfs3.ErrNotSupp),
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
				t.Errorf("%d READDIRPLUS calls, want 1", n)
			}
		})
	}
}

// TestDirectoryErrors sees the server's error at the reader, and nothing else.
func TestDirectoryErrors(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	must(t, os.Mkdir(m.path("d"), 0o755))
	for st, want := range map[nfs3.Status]syscall.Errno{nfs3.ErrIO: syscall.EIO, nfs3.ErrAcces: syscall.EACCES,
		nfs3.ErrStale: syscall.ESTALE, nfs3.Status(4711): syscall.EIO} {
		s.on(status(st), dirProcs...)
		if _, err := os.ReadDir(m.path("d")); !errors.Is(err, want) {
			t.Errorf("%v: %v, want %v", st, err, want)
		}
	}
}
