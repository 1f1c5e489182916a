package fdstore

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// ofSystemd opens the store of systemd as a Store.
func ofSystemd(cfg Config) (Store, error) {
	s, err := openSystemd(cfg)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func TestSystemdWithoutStore(t *testing.T) {
	for _, c := range []struct {
		what string
		set  func(t *testing.T, m *manager)
	}{
		{"no notification socket", func(t *testing.T, _ *manager) { setenv(t, "NOTIFY_SOCKET", "") }},
		{"FileDescriptorStoreMax=0", func(_ *testing.T, m *manager) { m.max = 0 }},
		{"not the main process", func(_ *testing.T, m *manager) { m.mainPID = 1 }},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := startManager(t, 8)
			m.mu.Lock()
			c.set(t, m)
			m.mu.Unlock()
			cfg := testConfig(t)
			if s, err := ofSystemd(cfg); !errors.Is(err, ErrNoStore) {
				t.Errorf("Systemd: got %v, %v; want %v", s, err, ErrNoStore)
			}
			if s := open(t, Open, cfg); s.String() != "holder "+cfg.Socket {
				t.Errorf("Open: got %v, want a holder", s)
			}
		})
	}
}

func TestSystemdWithoutListener(t *testing.T) {
	m := startManager(t, 8)
	m.conn.Close()
	if s, err := Open(testConfig(t)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("closed socket: got %v, %v; want %v", s, err, unix.ECONNREFUSED)
	}
	setenv(t, "NOTIFY_SOCKET", "vsock:2:1")
	if s, err := Open(testConfig(t)); err == nil || errors.Is(err, ErrNoStore) {
		t.Errorf("NOTIFY_SOCKET=vsock:2:1: got %v, %v; want an error", s, err)
	}
}

func TestSystemdAbstractSocket(t *testing.T) {
	m := startManagerAt(t, fmt.Sprintf("@nfsrdmad-test-%d", os.Getpid()), 8)
	put(t, open(t, Open, testConfig(t)), "a", "1")
	if got := fmt.Sprint(m.labels()); got != "[a@1]" {
		t.Errorf("descriptors in systemd: got %s, want [a@1]", got)
	}
}

// systemd does not report that its store is full.
func TestSystemdFull(t *testing.T) {
	for _, fdstore := range []string{"", "4"} {
		t.Run("FDSTORE="+fdstore, func(t *testing.T) {
			m := startManager(t, 4+len(fdstore)) // with FDSTORE, Put must not depend on systemd
			setenv(t, "FDSTORE", fdstore)
			s := open(t, ofSystemd, testConfig(t))
			for _, name := range []string{"a", "b", "c"} {
				put(t, s, name, "1")
			}
			f := memfd("2")
			defer f.Close()
			for _, name := range []string{"d", "a"} { // a new entry, and a replacement
				if err := s.Put(name, f); !errors.Is(err, ErrFull) {
					t.Errorf("put %s: got %v, want %v", name, err, ErrFull)
				}
			}
			if got := fmt.Sprint(m.labels()); got != "[a@1 b@1 c@1]" {
				t.Errorf("descriptors in systemd: got %s, want [a@1 b@1 c@1]", got)
			}
			kit.Must(t, s.Remove("b"))
			if err := s.Put("a", f); err != nil {
				t.Errorf("put with a free place: %v", err)
			}
			if got := fmt.Sprint(m.labels()); got != "[a@2 c@1]" {
				t.Errorf("descriptors in systemd: got %s, want [a@2 c@1]", got)
			}
		})
	}
}

// systemd is busy for longer than the timeout. It executes the messages later.
func TestSystemdTimeout(t *testing.T) {
	m := startManager(t, 8)
	s := open(t, ofSystemd, testConfig(t))
	s.(*systemdStore).timeout = 50 * time.Millisecond
	f, g := memfd("1"), memfd("2")
	defer f.Close()
	defer g.Close()

	m.mu.Lock()
	errs := []error{s.Put("a", f), s.Put("a", g), s.Put("a", f)}
	m.mu.Unlock()
	for _, err := range errs {
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("put: got %v, want %v", err, os.ErrDeadlineExceeded)
		}
	}
	s.(*systemdStore).timeout = kit.Timeout
	kit.Must(t, s.Put("a", f))
	if labels := m.labels(); len(labels) != 1 {
		t.Fatalf("descriptors in systemd: got %v, want one", labels)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := withFD(f, func(fd int) error {
		same, err := isSame(fd, m.kept[0].fd)
		if !same {
			t.Error("the descriptor in systemd is another one than that of the last Put")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// A daemon was killed during the replacement of an entry and during a probe. There is also a
// descriptor that another program stored, and one for which systemd has no name.
func TestSystemdRemovesReplacedEntries(t *testing.T) {
	m := startManager(t, 64)
	for _, label := range []string{"a@9", "a@10", "b@4294967295", "c", "c@x", "@1", "d@01", "stored", probeName} {
		f := memfd(label)
		m.keep(label, f)
		f.Close()
	}
	d := m.start(testConfig(t).Socket)
	want := map[string]string{"a": "a@10", "b": "b@4294967295", "c": "c", "c@x": "c@x", "@1": "@1", "d@01": "d@01",
		"stored": "stored"}
	if !maps.Equal(d.kept, want) {
		t.Errorf("entries: got %v, want %v", d.kept, want)
	}
	labels := []string{"@1", "a@10", "b@4294967295", "c", "c@x", "d@01", "stored"}
	if got := m.labels(); !slices.Equal(got, labels) {
		t.Errorf("descriptors in systemd: got %v, want %v", got, labels)
	}
	d.do("put c new", "remove @1", "remove stored", "remove a")
	labels = []string{"b@4294967295", "c@1", "c@x", "d@01"}
	if got := m.labels(); !slices.Equal(got, labels) {
		t.Errorf("descriptors in systemd after changes: got %v, want %v", got, labels)
	}
}

// A descriptor of /dev/fuse that is not mounted yet, or not any more, has EPOLLERR.
func TestSystemdKeepsFUSEDescriptorWithError(t *testing.T) {
	kit.NeedsFUSE(t)
	m := startManager(t, 8)
	s := open(t, ofSystemd, testConfig(t))
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	kit.Must(t, err)
	f := os.NewFile(uintptr(fd), "/dev/fuse")
	defer f.Close()
	p := []unix.PollFd{{Fd: int32(fd)}}
	if _, err := unix.Poll(p, 0); err != nil || p[0].Revents&unix.POLLERR == 0 {
		t.Fatalf("poll: got events %#x, %v; want POLLERR, for this test to have a meaning", p[0].Revents, err)
	}
	kit.Must(t, s.Put("fuse", f))
	if got := fmt.Sprint(m.labels()); got != "[fuse@1]" {
		t.Errorf("descriptors in systemd: got %s, want [fuse@1]", got)
	}
}

// The descriptors of the environment are for another process.
func TestSystemdIgnoresDescriptorsOfOtherProcess(t *testing.T) {
	startManager(t, 8)
	for name, value := range map[string]string{"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a@1"} {
		setenv(t, name, value)
	}
	s := open(t, ofSystemd, testConfig(t))
	if len(s.Kept()) != 0 {
		t.Errorf("entries: got %v, want none", s.Kept())
	}
	if v, ok := os.LookupEnv("LISTEN_FDS"); ok {
		t.Errorf("LISTEN_FDS: got %q, want no variable", v)
	}
}

func TestSystemdInvalidEnvironment(t *testing.T) {
	startManager(t, 8)
	for _, v := range [][2]string{{"2", "a@1"}, {"x", "a"}, {"-1", ""}, {"100000", "a"}} {
		setenv(t, "LISTEN_PID", fmt.Sprint(os.Getpid()))
		setenv(t, "LISTEN_FDS", v[0])
		setenv(t, "LISTEN_FDNAMES", v[1])
		if s, err := ofSystemd(testConfig(t)); err == nil {
			t.Errorf("LISTEN_FDS=%s LISTEN_FDNAMES=%s: got %v, want an error", v[0], v[1], s)
		}
	}
}
