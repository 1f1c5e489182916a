package fdstore

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A platform starts daemons that use one kind of store.
type platform struct {
	name  string
	setUp func(t *testing.T, socket string) (start func() *daemon, afterKill func(discard bool))
	open  func(t testing.TB) Store // in this process
}

var platforms = []platform{
	{
		name: "systemd",
		setUp: func(t *testing.T, socket string) (func() *daemon, func(bool)) {
			m := startManager(t, 64)
			return func() *daemon { return m.start(socket) }, m.sync
		},
		open: func(t testing.TB) Store {
			startManager(t, 64)
			return open(t, ofSystemd, testConfig(t))
		},
	},
	{
		name: "holder",
		setUp: func(t *testing.T, socket string) (func() *daemon, func(bool)) {
			setenv(t, "NOTIFY_SOCKET", "")
			return func() *daemon { return startPlain(t, socket) }, func(bool) {}
		},
		open: func(t testing.TB) Store { return open(t, Holder, testConfig(t)) },
	},
}

// startPlain starts a daemon without a manager.
func startPlain(t testing.TB, socket string) *daemon {
	t.Helper()
	d := startDaemon(t, socket, func(*exec.Cmd) {}, func(int) {})
	if want := "holder " + socket; d.store != want {
		t.Fatalf("store of the daemon: got %q, want %q", d.store, want)
	}
	runningHolder(t, socket)
	return d
}

// open opens a store and closes it after the test.
func open(t testing.TB, open func(Config) (Store, error), cfg Config) Store {
	t.Helper()
	s, err := open(cfg)
	kit.Must(t, err)
	t.Cleanup(func() {
		for _, e := range s.Kept() {
			e.File.Close()
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if pid := holderPID(t, cfg.Socket); pid != 0 {
			killHolder(t, cfg.Socket, pid)
		}
	})
	return s
}

func put(t testing.TB, s Store, name, content string) {
	t.Helper()
	f := memfd(content)
	defer f.Close()
	kit.Must(t, s.Put(name, f))
}

func onPlatforms(t *testing.T, test func(t *testing.T, p platform)) {
	for _, p := range platforms {
		t.Run(p.name, func(t *testing.T) { test(t, p) })
	}
}

func TestKilledDaemonLeavesEntries(t *testing.T) {
	onPlatforms(t, func(t *testing.T, p platform) {
		start, afterKill := p.setUp(t, testConfig(t).Socket)
		long := strings.Repeat("n", MaxName)
		d := start()
		if len(d.kept) != 0 {
			t.Errorf("entries of the first daemon: got %v, want none", d.kept)
		}
		d.do("put a 1", "put b@7 2", "put c 3", "put a 4", "put "+long+" 5", "remove c", "remove never")
		d.kill()
		afterKill(true)
		want := map[string]string{"a": "4", "b@7": "2", long: "5"}
		d = start()
		if !maps.Equal(d.kept, want) {
			t.Fatalf("entries of the second daemon: got %v, want %v", d.kept, want)
		}
		d.do("put a 6", "remove "+long)
		d.kill()
		afterKill(false)
		want = map[string]string{"a": "6", "b@7": "2"}
		if d = start(); !maps.Equal(d.kept, want) {
			t.Errorf("entries of the third daemon: got %v, want %v", d.kept, want)
		}
		d.do("remove a", "remove b@7")
	})
}

func TestPut(t *testing.T) {
	onPlatforms(t, func(t *testing.T, p platform) {
		s := p.open(t)
		f := memfd("x")
		defer f.Close()
		g, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd())) // another open file of the same inode
		kit.Must(t, err)
		defer g.Close()
		steps := []struct {
			what string
			do   func() error
			want error
		}{
			{"put", func() error { return s.Put("a", f) }, nil},
			{"put the same file again", func() error { return s.Put("a", f) }, nil},
			{"put the same file under another name", func() error { return s.Put("b", f) }, ErrDuplicate},
			{"put another open file of the inode", func() error { return s.Put("b", g) }, nil},
			{"replace", func() error { return s.Put("c", f) }, ErrDuplicate},
			{"remove", func() error { return s.Remove("a") }, nil},
			{"remove again", func() error { return s.Remove("a") }, nil},
			{"put removed file under another name", func() error { return s.Put("c", f) }, nil},
			{"replace file by a file of another name", func() error { return s.Put("c", g) }, ErrDuplicate},
			{"empty name", func() error { return s.Put("", f) }, ErrName},
			{"long name", func() error { return s.Put(strings.Repeat("n", MaxName+1), f) }, ErrName},
			{"colon", func() error { return s.Put("a:b", f) }, ErrName},
			{"newline", func() error { return s.Put("a\nFDNAME=b", f) }, ErrName},
			{"not ASCII", func() error { return s.Remove("ä") }, ErrName},
			{"no file", func() error { return s.Put("d", nil) }, os.ErrInvalid},
			{"remove all", func() error { return errors.Join(s.Remove("b"), s.Remove("c")) }, nil},
			{"close", s.Close, nil},
			{"close again", s.Close, nil},
			{"put after close", func() error { return s.Put("a", f) }, os.ErrClosed},
			{"remove after close", func() error { return s.Remove("a") }, os.ErrClosed},
		}
		for _, step := range steps {
			if err := step.do(); !errors.Is(err, step.want) {
				t.Fatalf("%s: got %v, want %v", step.what, err, step.want)
			}
		}
	})
}

// An application may wait for a blocking read of a descriptor. Put must not change its flags.
func TestPutKeepsNonblockingMode(t *testing.T) {
	onPlatforms(t, func(t *testing.T, p platform) {
		s := p.open(t)
		r, w, err := os.Pipe()
		kit.Must(t, err)
		defer r.Close()
		defer w.Close()
		kit.Must(t, s.Put("pipe", r))
		kit.Must(t, r.SetReadDeadline(time.Now().Add(time.Millisecond)))
		if _, err := r.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read after put: got %v, want %v", err, os.ErrDeadlineExceeded)
		}
		kit.Must(t, s.Remove("pipe"))
	})
}

// A daemon that was started by hand leaves entries in a holder. The unit of systemd takes them.
func TestOpenMovesEntriesOfHolderToSystemd(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "holder.sock")
	setenv(t, "NOTIFY_SOCKET", "")
	d := startPlain(t, socket)
	d.do("put a 1", "put b 2")
	d.kill()
	pid := holderPID(t, socket)

	m := startManager(t, 64)
	newer := memfd("3")
	m.keep("a@1", newer) // by a daemon that was killed in this move
	newer.Close()
	d = m.start(socket)
	if want := map[string]string{"a": "3", "b": "2"}; d.store != "systemd" || !maps.Equal(d.kept, want) {
		t.Errorf("got %v in store %s, want %v in systemd", d.kept, d.store, want)
	}
	kit.Eventually(t, "end of the holder", func() bool { return holderPID(t, socket) != pid })
	if got, want := fmt.Sprint(m.labels()), "[a@1 b@1]"; got != want {
		t.Errorf("descriptors in systemd: got %s, want %s", got, want)
	}
}
