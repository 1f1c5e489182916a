package knfsd

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// These cases stop the server during two concurrent copies, one in each direction, and restart it.
// Both copies must resume.
var (
	_ = register("power failure", "power failure during a copy in and a copy out", func(t *testing.T, b bench) {
		b = b.serverForCuts()
		testOutage(t, b, true, func(t *testing.T, o *outage) {
			b.PowerOff()
			o.resume(t)
			o.awaitDisconnect(t)
			if err := b.Boot(); err != nil {
				t.Fatal(err)
			}
		})
	})
	_ = register("frozen server", "server frozen, then reset, during a copy in and a copy out",
		func(t *testing.T, b bench) {
			b = b.serverForCuts()
			testOutage(t, b, true, func(t *testing.T, o *outage) {
				if err := b.Freeze(); err != nil {
					t.Fatal(err)
				}
				o.resume(t)
				o.awaitDisconnect(t)
				if err := b.Reset(); err != nil {
					t.Fatal(err)
				}
			})
		})
	_ = register("network cut", "network cut for longer than the RPC timeout during a copy in and a copy out",
		func(t *testing.T, b bench) {
			b = b.serverForCuts()
			testOutage(t, b, false, func(t *testing.T, o *outage) {
				if err := b.CutNetwork(); err != nil {
					t.Fatal(err)
				}
				defer b.RestoreNetwork()
				o.resume(t)
				o.awaitDisconnect(t)
				// The forwarder holds this connect until the network is restored.
				kit.Eventually(t, "a connect to time out", func() bool { return o.m.tr.Stats().ConnectFailures > 0 })
			})
		})
)

const (
	// outageTimeout is the RPC timeout, outageKeepalive the idle time before a keepalive call.
	outageTimeout   = 5 * time.Second
	outageKeepalive = 2 * time.Second
	// outageSize is the number of bytes in each copy, and outageBefore the number before the
	// outage: too few for a COMMIT in the background.
	outageSize   = 24 << 20
	outageBefore = 8 << 20
	// waitTimeout bounds every wait for an event, on a busy machine.
	waitTimeout = 4 * time.Minute
)

// shortWaits makes a transport detect the loss and the return of its server within seconds.
func shortWaits(c *xprt.Config) {
	c.Timeout, c.KeepAlive, c.ReconnectMin, c.ReconnectMax = outageTimeout, outageKeepalive, time.Second, 2*time.Second
}

// An outage is two copies that have started.
type outage struct {
	m *mount

	in, out         *exec.Cmd
	src             io.WriteCloser // input of the copy in
	rest            []byte
	dst             io.Reader // output of the copy out
	got             bytes.Buffer
	inEnd, outEnd   chan error
	inDone, outDone chan struct{} // closed after inEnd and outEnd have a result
}

// resume runs the rest of the copies.
func (o *outage) resume(t *testing.T) {
	go func() {
		_, err := o.src.Write(o.rest)
		if e := o.src.Close(); err == nil {
			err = e
		}
		if e := o.in.Wait(); err == nil {
			err = e
		}
		o.inEnd <- err
		close(o.inDone)
	}()
	go func() {
		_, err := o.got.ReadFrom(o.dst)
		if e := o.out.Wait(); err == nil {
			err = e
		}
		o.outEnd <- err
		close(o.outDone)
	}()
}

// awaitDisconnect waits until the transport has lost its connection, and checks that the copies
// still run.
func (o *outage) awaitDisconnect(t *testing.T) {
	t.Helper()
	kit.Eventually(t, "the transport to disconnect",
		func() bool { return o.m.tr.Stats().State != xprt.StateConnected })
	for name, done := range map[string]chan struct{}{"in": o.inDone, "out": o.outDone} {
		select {
		case <-done:
			t.Errorf("copy %s ended during the outage", name)
		default:
		}
	}
}

// testOutage starts two copies, calls strike to stop and restart the server, and compares all
// copied bytes. restarted reports whether the server lost data that was not on its disk.
func testOutage(t *testing.T, b bench, restarted bool, strike func(*testing.T, *outage)) {
	b.MustRun(fmt.Sprintf("dd if=/dev/urandom of=/export/out bs=1M count=%d 2>/dev/null; sync", outageSize>>20))
	wantOut := b.serverSum(t, "out")
	data := randomBytes(outageSize)
	wantIn := sha256.Sum256(data)
	// No data becomes stable because of its age, also on a slow machine.
	m := b.mountWith(t, shortWaits, func(o *vfs.Options) { o.DirtyExpire = 0 })
	o := &outage{m: m, inEnd: make(chan error, 1), outEnd: make(chan error, 1), inDone: make(chan struct{}),
		outDone: make(chan struct{})}
	o.in = exec.Command("dd", "of="+filepath.Join(m.dir, "in"), "bs=1M", "iflag=fullblock", "conv=fsync", "status=none")
	o.out = exec.Command("cat", filepath.Join(m.dir, "out"))
	var stderr bytes.Buffer
	o.in.Stderr, o.out.Stderr = &stderr, &stderr
	var err error
	if o.src, err = o.in.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if o.dst, err = o.out.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range []*exec.Cmd{o.in, o.out} {
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() })
	}
	if _, err := o.src.Write(data[:outageBefore]); err != nil {
		t.Fatal(err)
	}
	o.rest = data[outageBefore:]
	if _, err := io.CopyN(&o.got, o.dst, outageBefore); err != nil {
		t.Fatal(err)
	}
	// The server has received this data, and no COMMIT has requested it on disk.
	kit.Eventually(t, "the first half to arrive", func() bool { return m.fs.Counters.SentBytes.Load() >= outageBefore })
	if n := m.fs.Counters.Commits.Load(); n != 0 {
		t.Errorf("got %d COMMITs before the outage, want none", n)
	}
	before := m.tr.Stats()
	strike(t, o)
	back := time.Now()
	for name, end := range map[string]chan error{"in": o.inEnd, "out": o.outEnd} {
		select {
		case err := <-end:
			if err != nil {
				t.Errorf("copy %s: %v: %s", name, err, stderr.String())
			}
		case <-time.After(waitTimeout):
			t.Fatalf("copy %s does not resume: %+v", name, m.tr.Stats())
		}
	}
	t.Logf("both copies ended %v after the server returned", time.Since(back).Round(time.Millisecond))
	if got := sha256.Sum256(o.got.Bytes()); hex.EncodeToString(got[:]) != wantOut {
		t.Errorf("copy out: got %d bytes with sum %x, want %d with sum %s", o.got.Len(), got, outageSize,
			wantOut)
	}
	if got := b.serverSum(t, "in"); got != hex.EncodeToString(wantIn[:]) {
		t.Errorf("copy in: got a file with sum %s on the server, want %x", got, wantIn)
	}
	st, c := m.tr.Stats(), &m.fs.Counters
	t.Logf("%d connects, %d failed, %d resends, %d timeouts; %d replays of %d bytes", st.Connects,
		st.ConnectFailures, st.Resends, st.Timeouts, c.Replays.Load(), c.ReplayedBytes.Load())
	if st.Connects == before.Connects {
		t.Error("got no reconnect, want at least one")
	}
	if restarted && (c.Replays.Load() == 0 || c.ReplayedBytes.Load() < outageBefore) {
		t.Error("got no replay of uncommitted data, want a replay")
	}
	if !restarted && c.Replays.Load() != 0 {
		t.Error("got a replay although the server did not restart")
	}
	if c.WriteErrors.Load() != 0 {
		t.Errorf("got %d lost extents, want none", c.WriteErrors.Load())
	}
	for _, name := range []string{"in", "out"} {
		if err := os.Remove(filepath.Join(m.dir, name)); err != nil {
			t.Error(err)
		}
	}
}
