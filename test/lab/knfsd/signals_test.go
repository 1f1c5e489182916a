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
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("signals", "a signal during a large read and a large write", testSignals)

const (
	signalSize = 16 << 20
	// slowLine is a rate at which a call of 1 MiB takes more than a second.
	slowLine = 6000 // kbit/s
	// exitTimeout bounds the exit of a process after a fatal signal, on a busy machine.
	exitTimeout = 20 * time.Second
)

// These Perl scripts use no page cache and install no signal handler, unlike cat and dd.
const (
	readAll  = `sysopen(F, $ARGV[0], 0x4000) || die $!; 1 while sysread(F, $b, 1 << 20)`
	writeAll = `sysopen(F, $ARGV[0], 0x4000 | 1 | 64) || die $!; syswrite(F, "x" x (1 << 20)) || die $! for 1 .. 64`
)

// testSignals kills processes during a call that the server is answering.
func testSignals(t *testing.T, b bench) {
	b = b.serverForCuts()
	// The server drops a resent call while it executes the first copy. The client then waits for
	// Timeout.
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
		// The server was still writing into the memory of this call.
		if s := m.tr.Stats(); s.Interrupted == before.Interrupted || s.LocalInvNeeded == before.LocalInvNeeded {
			t.Errorf("%v: got %d interrupted calls and %d local invalidations, want at least one of each", sig,
				s.Interrupted-before.Interrupted, s.LocalInvNeeded-before.LocalInvNeeded)
		}
		before = m.tr.Stats()
		endInCall(t, m, sig, writeAll, written, func() bool { return m.tr.Stats().ReadChunks > before.ReadChunks })
	}
	if err := b.SlowNetwork(lab.Impairment{}); err != nil {
		t.Fatal(err)
	}
	// The mount and the server must still work.
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read the first file: got %d bytes, error %v", len(got), err)
	}
	if got, err := os.ReadFile(written); err != nil || len(bytes.Trim(got, "x")) != 0 {
		t.Errorf("read the second file: got %d bytes, error %v", len(got), err)
	}
	for _, name := range []string{file, written} {
		if err := os.Remove(name); err != nil {
			t.Error(err)
		}
	}
	kit.Eventually(t, "all calls to end", func() bool { return len(m.tr.Calls()) == 0 })
	s := m.tr.Stats()
	var states uint64
	for _, n := range s.MRStates {
		states += n
	}
	if states != s.MRsTotal || s.MRStates[memreg.Valid.String()] != 0 || s.MRsFailed != s.MRsRecovered+s.MRsRecycled+
		s.MRsOrphaned {
		t.Errorf("got MR states %v of %d MRs; %d failed, %d recovered, %d recycled, %d orphaned", s.MRStates,
			s.MRsTotal,
			s.MRsFailed, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
	}
	t.Logf("%d calls interrupted, %d local invalidations, %d remote access errors, %d connects; MRs %v", s.Interrupted,
		s.LocalInvNeeded, s.RemoteAccessErrors, s.Connects, s.MRStates)
	if _, _, err := connectOnce(b, t); err != nil {
		t.Errorf("connect after the signals: %v", err)
	}
}

// endInCall runs a Perl script on a file, sends a signal when its call is in flight, and waits for
// its exit.
func endInCall(t *testing.T, m *mount, sig syscall.Signal, script, file string, inFlight func() bool) {
	t.Helper()
	cmd := exec.Command("perl", "-e", script, file)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	kit.Eventually(t, "the call to be in flight", inFlight)
	time.Sleep(100 * time.Millisecond) // let the transfer begin
	begin := time.Now()
	cmd.Process.Signal(sig)
	select {
	case err := <-ended:
		if err == nil {
			t.Errorf("%v: got exit code 0, want a process that the signal killed", sig)
		}
		t.Logf("%v: process exited after %v", sig, time.Since(begin).Round(time.Millisecond))
	case <-time.After(exitTimeout):
		t.Fatalf("%v: process did not exit within the timeout: %+v", sig, m.tr.Calls())
	}
}
