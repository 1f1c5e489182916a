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

	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// These cases take the server away in the middle of two copies at once, one in and one out, and
// give it back: both go on by themselves.
var (
	_ = register("power pulled", "power pulled under a copy in and a copy out", func(t *testing.T, b bench) {
		testOutage(t, b, true, func(t *testing.T, o *outage) {
			b.PowerOff()
			o.goOn(t)
			o.lost(t)
			if err := b.Boot(); err != nil {
				t.Fatal(err)
			}
		})
	})
	_ = register("power pulled in silence", "falling silent, and back after a reset, under a copy in and a copy out",
		func(t *testing.T, b bench) {
			testOutage(t, b, true, func(t *testing.T, o *outage) {
				if err := b.Freeze(); err != nil {
					t.Fatal(err)
				}
				o.goOn(t)
				o.lost(t)
				if err := b.Reset(); err != nil {
					t.Fatal(err)
				}
			})
		})
	_ = register("network cut", "network cut for longer than the RPC timeout under a copy in and a copy out",
		func(t *testing.T, b bench) {
			testOutage(t, b, false, func(t *testing.T, o *outage) {
				if err := b.CutNetwork(); err != nil {
					t.Fatal(err)
				}
				defer b.RestoreNetwork()
				o.goOn(t)
				o.lost(t)
				// Whoever takes connections in the server's place hands this one on when the network is
				// back.
				waitFor(t, "a connect to be given up", func() bool { return o.m.tr.Stats().ConnectFailures > 0 })
			})
		})
)

const (
	// outageTimeout is how long a call waits for its reply, outageAlive how long the server may be
	// silent before it is asked.
	outageTimeout = 5 * time.Second
	outageAlive   = 2 * time.Second
	// outageSize is copied each way, outageBefore of it before the server goes away: fewer extents
	// than are committed in the background.
	outageSize   = 24 << 20
	outageBefore = 8 << 20
	// patience is for what must happen, on a machine however busy.
	patience = 4 * time.Minute
)

// shortWaits makes a transport notice in seconds that its server is gone, and that it is back.
func shortWaits(c *xprt.Config) {
	c.Timeout, c.KeepAlive, c.ReconnectMin, c.ReconnectMax = outageTimeout, outageAlive, time.Second, 2*time.Second
}

// An outage is two copies that have come to their middle.
type outage struct {
	m *mount

	in, out         *exec.Cmd
	src             io.WriteCloser // what is still to be copied in
	rest            []byte
	dst             io.Reader // what is still to be copied out
	got             bytes.Buffer
	inEnd, outEnd   chan error
	inDone, outDone chan struct{} // closed after the ends
}

// goOn lets the copies run into the outage.
func (o *outage) goOn(t *testing.T) {
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

// lost waits until the transport has given its connection up, and sees that the copies wait.
func (o *outage) lost(t *testing.T) {
	t.Helper()
	waitFor(t, "the loss of the connection to be noticed",
		func() bool { return o.m.tr.Stats().State != xprt.StateConnected })
	for name, done := range map[string]chan struct{}{"in": o.inDone, "out": o.outDone} {
		select {
		case <-done:
			t.Errorf("the copy %s ended while there was no server", name)
		default:
		}
	}
}

// waitFor waits for what must happen.
func waitFor(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !happened(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

// testOutage begins two copies, lets strike take the server away and bring it back, and holds both
// to their last octet. restarted says whether the server forgot what it had not written to its
// disk.
func testOutage(t *testing.T, b bench, restarted bool, strike func(*testing.T, *outage)) {
	b.MustRun(fmt.Sprintf("dd if=/dev/urandom of=/export/out bs=1M count=%d 2>/dev/null; sync", outageSize>>20))
	wantOut := b.serverSum(t, "out")
	data := randomBytes(outageSize)
	wantIn := sha256.Sum256(data)
	m := b.mount(t, shortWaits)
	o := &outage{m: m, inEnd: make(chan error, 1), outEnd: make(chan error, 1), inDone: make(chan struct{}),
		outDone: make(chan struct{})}
	o.in = exec.Command("dd", "of="+filepath.Join(m.dir, "in"), "bs=1M", "iflag=fullblock", "conv=fsync", "status=none")
	o.out = exec.Command("cat", filepath.Join(m.dir, "out"))
	var said bytes.Buffer
	o.in.Stderr, o.out.Stderr = &said, &said
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
	// The server has this, and nobody has asked it to keep it.
	waitFor(t, "the first half to arrive", func() bool { return m.fs.Counters.SentBytes.Load() >= outageBefore })
	if n := m.fs.Counters.Commits.Load(); n != 0 {
		t.Errorf("%d COMMITs before the outage", n)
	}
	before := m.tr.Stats()
	strike(t, o)
	back := time.Now()
	for name, end := range map[string]chan error{"in": o.inEnd, "out": o.outEnd} {
		select {
		case err := <-end:
			if err != nil {
				t.Errorf("the copy %s: %v: %s", name, err, said.String())
			}
		case <-time.After(patience):
			t.Fatalf("the copy %s does not go on: %+v", name, m.tr.Stats())
		}
	}
	t.Logf("both copies ended %v after the server was back", time.Since(back).Round(time.Millisecond))
	if got := sha256.Sum256(o.got.Bytes()); hex.EncodeToString(got[:]) != wantOut {
		t.Errorf("copied out were %d octets with sum %x, the server had %d with %s", o.got.Len(), got, outageSize,
			wantOut)
	}
	if got := b.serverSum(t, "in"); got != hex.EncodeToString(wantIn[:]) {
		t.Errorf("the server has a file with sum %s, copied in was one with %x", got, wantIn)
	}
	st, c := m.tr.Stats(), &m.fs.Counters
	t.Logf("%d connects, %d failed, %d resends, %d timeouts; %d replays of %d octets", st.Connects,
		st.ConnectFailures, st.Resends, st.Timeouts, c.Replays.Load(), c.ReplayedBytes.Load())
	if st.Connects == before.Connects {
		t.Error("the connection was never lost")
	}
	if restarted && (c.Replays.Load() == 0 || c.ReplayedBytes.Load() < outageBefore) {
		t.Error("what the server had not written to its disk was not sent again")
	}
	if !restarted && c.Replays.Load() != 0 {
		t.Error("data was sent again although the server had not restarted")
	}
	if c.WriteErrors.Load() != 0 {
		t.Errorf("%d extents were given up", c.WriteErrors.Load())
	}
	for _, name := range []string{"in", "out"} {
		if err := os.Remove(filepath.Join(m.dir, name)); err != nil {
			t.Error(err)
		}
	}
}
