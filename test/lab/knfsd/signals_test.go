package knfsd

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("signals", "a signal in the middle of a big read and of a big write", testSignals)

const (
	signalSize = 16 << 20
	// slowLine makes a call of 1 MiB take longer than a second.
	slowLine = 6000 // kbit/s
	// leaves is within which a process goes that was hit by a deadly signal: at once, on a machine
	// however busy.
	leaves = 20 * time.Second
)

// Perl does what cat and dd do not: no page cache stands between it and its calls, and it handles
// no signal.
const (
	readAll  = `sysopen(F, $ARGV[0], 0x4000) || die $!; 1 while sysread(F, $b, 1 << 20)`
	writeAll = `sysopen(F, $ARGV[0], 0x4000 | 1 | 64) || die $!; syswrite(F, "x" x (1 << 20)) || die $! for 1 .. 64`
)

// testSignals ends real processes in the middle of a call that the server is answering.
func testSignals(t *testing.T, b bench) {
	// A call that comes again while the server still works on it is dropped there, and waits for as
	// long as this.
	m := b.mount(t, func(c *xprt.Config) { c.Timeout = 15 * time.Second })
	file, written := filepath.Join(m.dir, "big"), filepath.Join(m.dir, "written")
	want := randomBytes(signalSize)
	if err := os.WriteFile(file, want, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := b.SlowNetwork(lab.Impairment{KbitSec: slowLine}); err != nil {
		t.Fatal(err)
	}
	defer b.SlowNetwork(lab.Impairment{})
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		before := m.tr.Stats()
		endInCall(t, m, sig, readAll, file, func() bool { return m.tr.Stats().WriteChunks > before.WriteChunks })
		// The server was still writing into this memory.
		if s := m.tr.Stats(); s.Interrupted == before.Interrupted || s.LocalInvNeeded == before.LocalInvNeeded {
			t.Errorf("%v: %d calls interrupted, %d keys killed, want at least one of each", sig,
				s.Interrupted-before.Interrupted, s.LocalInvNeeded-before.LocalInvNeeded)
		}
		before = m.tr.Stats()
		endInCall(t, m, sig, writeAll, written, func() bool { return m.tr.Stats().ReadChunks > before.ReadChunks })
	}
	if err := b.SlowNetwork(lab.Impairment{}); err != nil {
		t.Fatal(err)
	}
	// The mount goes on, and the server does.
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file that was being read: %d octets, %v", len(got), err)
	}
	if got, err := os.ReadFile(written); err != nil || len(bytes.Trim(got, "x")) != 0 {
		t.Errorf("the file that was being written: %d octets, %v", len(got), err)
	}
	for _, name := range []string{file, written} {
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	}
	waitFor(t, "all calls to end", func() bool { return len(m.tr.Calls()) == 0 })
	s := m.tr.Stats()
	var states int64
	for _, n := range s.MRStates {
		states += n
	}
	if states != s.MRsTotal || s.MRStates[memreg.Valid.String()] != 0 || s.MRsFailed != s.MRsRecovered+s.MRsRecycled+
		s.MRsOrphaned {
		t.Errorf("MRs: %v of %d; %d hurt, %d recovered, %d recycled, %d orphaned", s.MRStates, s.MRsTotal,
			s.MRsFailed, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
	}
	t.Logf("%d calls interrupted, %d keys killed by us; %d late accesses refused, %d connects; MRs %v", s.Interrupted,
		s.LocalInvNeeded, s.RemoteAccessErrors, s.Connects, s.MRStates)
	if _, _, err := connectOnce(b, t); err != nil {
		t.Errorf("the server afterwards: %v", err)
	}
}

// endInCall runs a perl script on a file, sends it a signal when its call is under way, and wants
// it gone.
func endInCall(t *testing.T, m *mount, sig syscall.Signal, script, file string, underWay func() bool) {
	t.Helper()
	cmd := exec.Command("perl", "-e", script, file)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	waitFor(t, "the call to be under way", underWay)
	time.Sleep(100 * time.Millisecond) // into its middle
	begin := time.Now()
	cmd.Process.Signal(sig)
	select {
	case err := <-ended:
		if err == nil {
			t.Errorf("%v: the process ended by itself", sig)
		}
		t.Logf("%v: gone after %v", sig, time.Since(begin).Round(time.Millisecond))
	case <-time.After(leaves):
		t.Fatalf("%v: the process does not end: %+v", sig, m.tr.Calls())
	}
}
