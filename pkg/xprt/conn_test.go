package xprt

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A recordingProvider is a hookedProvider that records how a connection is made.
type recordingProvider struct {
	*hookedProvider
	qp    verbs.QPInitAttr
	param verbs.ConnParam
}

type recordingID struct {
	verbs.ActiveID
	p *recordingProvider
}

func (p *recordingProvider) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.hookedProvider.Resolve(ctx, a)
	if err != nil {
		return nil, err
	}
	return &recordingID{id, p}, nil
}

func (i *recordingID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	i.p.qp = attr
	return i.ActiveID.CreateQP(pd, attr)
}

func (i *recordingID) Connect(ctx context.Context, p verbs.ConnParam) error {
	i.p.param = p
	return i.ActiveID.Connect(ctx, p)
}

// TestReadDepthIsPowerOfTwo checks the number of RDMA Reads that the server may have in flight, on
// devices with different limits.
func TestReadDepthIsPowerOfTwo(t *testing.T) {
	addr := serve(t, svcrdma.Config{Handler: &service{}})
	for limit, want := range map[int]uint16{0: 1, 1: 1, 2: 2, 3: 2, 16: 16, 100: 64, 127: 64, 128: 128, 1000: 128} {
		p := &recordingProvider{hookedProvider: hooked(&hookedProvider{
			attrs: func(a *verbs.DeviceAttrs) { a.MaxQPRdAtom = limit }})}
		tr := dial(t, addr, func(c *Config) { c.Provider, c.Slots = p, 8 })
		if got := p.param.ResponderResources; got != want {
			t.Errorf("device with %d RDMA Reads: got %d, want %d", limit, got, want)
		}
		tr.Close()
	}
}

// TestQueuesFollowParams checks the sizes of the queues of a connection, and its Receives.
func TestQueuesFollowParams(t *testing.T) {
	addr := serve(t, svcrdma.Config{Handler: &service{}, InlineBytes: 65536})
	for _, inline := range []int{4096, 65536} {
		var receives atomic.Int64
		p := &recordingProvider{hookedProvider: hooked(&hookedProvider{open: func() qpHooks {
			return qpHooks{recv: func() error { receives.Add(1); return nil }}
		}})}
		tr := dial(t, addr, func(c *Config) { c.Provider, c.Slots, c.InlineBytes = p, 16, inline })
		a := tr.adapter
		if p.qp.MaxSendWR != a.params.SendWRs || p.qp.MaxRecvWR != a.params.RecvWRs ||
			p.qp.MaxSendSGE != a.params.SendSGEs {
			t.Errorf("queue pair: got %+v, want the sizes of %+v", p.qp, a.params)
		}
		// One place is for Drain.
		if n := receives.Load(); n != int64(a.params.RecvWRs-1) || len(a.recvArena) < int(n)*a.recvSize {
			t.Errorf("Receives: got %d in %d bytes, want %d of %d bytes", n, len(a.recvArena), a.params.RecvWRs-1,
				a.recvSize)
		}
		if want := max(2*inline, recvSlack); a.recvSize != want {
			t.Errorf("Receive buffer with %d inline bytes: got %d bytes, want %d", inline, a.recvSize, want)
		}
		if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Fatal(err)
		}
		if q := &connOf(t, tr).sq; q.size != int64(a.params.SendWRs) || q.signalAfter != int64(a.params.Slots/8) {
			t.Errorf("send queue: got size %d, signals after %d; want %d, %d", q.size, q.signalAfter, a.params.SendWRs,
				a.params.Slots/8)
		}
		tr.Close()
	}
}

// A nudgedQP counts the requests, which must be empty RDMA Writes.
type nudgedQP struct {
	verbs.QP
	t    *testing.T
	n    atomic.Int64
	fail error
}

func (q *nudgedQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	if first.Opcode != verbs.OpRDMAWrite || len(first.SGList) > 0 || first.Next != nil {
		q.t.Errorf("nudge: got %+v, want one empty RDMA Write", first)
	}
	q.n.Add(1)
	return nil, q.fail
}

// TestNudgesSlowDown checks the pauses between the nudges of a connection without a reply: they
// double up to maxNudgePause. The reply, the end of the connection, and a full send queue end them.
func TestNudgesSlowDown(t *testing.T) {
	const first = 150 * time.Millisecond
	start := func(t *testing.T, places int, fail error) (*Transport, *conn, *nudgedQP) {
		tr := &Transport{cfg: Config{NudgeAfter: first}, log: hclog.NewNullLogger()}
		qp := &nudgedQP{t: t, fail: fail}
		cn := &conn{adapter: &adapter{t: tr}, qp: qp, ended: make(chan struct{})}
		cn.sq.init(places, 1)
		tr.conn.Store(cn)
		cn.scheduleNudge(first)
		return tr, cn, qp
	}
	stop := func(cn *conn) {
		cn.nudge.Lock()
		defer cn.nudge.Unlock()
		cn.nudge.timer.Stop()
	}
	after := func(t *testing.T, qp *nudgedQP, pause time.Duration, want int64) {
		t.Helper()
		time.Sleep(pause)
		synctest.Wait()
		if n := qp.n.Load(); n != want {
			t.Errorf("got %d nudges, want %d", n, want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		tr, cn, qp := start(t, 100, nil)
		after(t, qp, first-1, 0)
		after(t, qp, 1, 1)
		after(t, qp, 2*first-1, 1)
		after(t, qp, 1, 2)
		after(t, qp, 4*first, 3)
		after(t, qp, maxNudgePause-1, 3)
		after(t, qp, 1, 4)
		after(t, qp, maxNudgePause, 5)
		if n := cn.sq.posted.Load(); n != 5 || cn.sq.taken.Load() != 5 || tr.stats.nudges.Load() != 5 {
			t.Errorf("got %d requests, %d places, %d nudges; want 5", n, cn.sq.taken.Load(), tr.stats.nudges.Load())
		}
		cn.answered.Store(true)
		after(t, qp, time.Minute, 5)
	})
	synctest.Test(t, func(t *testing.T) {
		_, cn, qp := start(t, 100, nil)
		after(t, qp, first, 1)
		cn.fail(errIdle)
		after(t, qp, 2*first, 2) // was scheduled before
		after(t, qp, time.Minute, 2)
	})
	synctest.Test(t, func(t *testing.T) {
		_, _, qp := start(t, 1, nil)
		after(t, qp, first, 1)
		after(t, qp, time.Minute, 1)
	})
	synctest.Test(t, func(t *testing.T) {
		tr, _, qp := start(t, 100, nil)
		tr.conn.Store(nil)
		after(t, qp, time.Minute, 0)
	})
	synctest.Test(t, func(t *testing.T) {
		_, cn, qp := start(t, 100, verbs.ErrQueueFull)
		after(t, qp, time.Minute, 1)
		if !isClosed(cn.ended) || !errors.Is(cn.err, verbs.ErrQueueFull) {
			t.Errorf("failed post of a nudge: got connection error %v, want %v", cn.err, verbs.ErrQueueFull)
		}
		stop(cn)
	})
}

// TestCauseOfLossIsAwaited checks for which errors the worker waits for the cause from the
// provider, and for how long.
func TestCauseOfLossIsAwaited(t *testing.T) {
	flush := &completionFailure{"send", verbs.StatusWRFlushErr}
	cause := errors.New("cable pulled")
	for _, c := range []struct {
		name    string
		err     error
		after   time.Duration // until the cause
		closing bool
		waits   time.Duration
		want    error
	}{
		{"cause is known", flush, 0, false, 0, cause},
		{"cause is late", flush, causeWait - 1, false, causeWait - 1, cause},
		{"cause is too late", flush, time.Hour, false, causeWait, flush},
		{"error is the cause", errIdle, time.Second, false, 0, errIdle},
		{"transport is closed", flush, time.Hour, true, 0, flush},
	} {
		synctest.Test(t, func(t *testing.T) {
			cn := &conn{ended: make(chan struct{}), causeSet: make(chan struct{})}
			closing := make(chan struct{})
			if c.closing {
				close(closing)
			}
			cn.fail(c.err)
			if c.after == 0 {
				cn.disconnected(cause)
			} else {
				timer := time.AfterFunc(c.after, func() { cn.disconnected(cause) })
				defer timer.Stop()
			}
			began := time.Now()
			cn.waitCause(closing)
			if took := time.Since(began); took != c.waits || cn.err != c.want {
				t.Errorf("%s: got %v after %v, want %v after %v", c.name, cn.err, took, c.want, c.waits)
			}
		})
	}
}

// TestFailedConnectIsCounted connects to a port that refuses connections.
func TestFailedConnectIsCounted(t *testing.T) {
	tr := unconnected(t, func(c *Config) {
		c.Addr, c.Provider = netip.MustParseAddrPort("127.0.0.1:1"), softiwarp.New(softiwarp.Config{})
	})
	if err := tr.Connect(testContext(t)); err == nil {
		t.Fatal("Connect: got nil, want an error")
	}
	s := tr.Stats()
	if s.ConnectFailures != 1 || s.Connects != 0 || s.State != StateDisconnected || s.LastError == "" ||
		s.ConnectTime <= 0 || tr.adapter != nil {
		t.Errorf("got %+v, want one failure and no device", s)
	}
}

// TestKeepAliveCallsAreQuiet answers keepalive calls. Nothing may be logged about them.
func TestKeepAliveCallsAreQuiet(t *testing.T) {
	const calls = 3
	var log bytes.Buffer
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Debug})
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // wait for the connection
		t.Fatal(err)
	}
	cn := connOf(t, tr)
	for i := range calls {
		tr.startPing(cn)
		kit.Eventually(t, "reply to a keepalive call", func() bool {
			return tr.Stats().Recvs == uint64(i+2) && cn.pingsInFlight.Load() == 0
		})
	}
	tr.Close()
	if n := strings.Count(log.String(), "keepalive call failed"); n > 0 || tr.Stats().KeepAlives != calls {
		t.Errorf("got %d keepalive calls, %d failed; want %d, 0", tr.Stats().KeepAlives, n, calls)
	}
}
