package memreg

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A tracedCall is one call on a pool that records trace events.
type tracedCall struct {
	t    *testing.T
	pd   *fakePD
	pool *Pool
	list List
	ring *trace.Ring
	qp   failingQP
}

// A failingQP fails at the request with number failAt of a chain, and executes those before.
type failingQP struct {
	doneQP
	failAt int // -1: never
	status verbs.Status
}

func (q *failingQP) PostSend(wr *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	for n := 0; wr != nil; wr, n = wr.Next, n+1 {
		if n == q.failAt {
			return wr, syscall.ENOMEM
		}
		if wr.Signaled || q.status != verbs.StatusSuccess {
			wr.Done(&verbs.WorkCompletion{Status: q.status})
		}
	}
	return nil, nil
}

func (c *tracedCall) mapPages(n int) {
	c.t.Helper()
	if _, err := c.list.Map([][]byte{pages(c.t, n)}, true, 7); err != nil {
		c.t.Fatal(err)
	}
}

func (c *tracedCall) send() {
	c.t.Helper()
	c.list.Chain(&verbs.WorkRequest{Done: func(*verbs.WorkCompletion) {}})
}

func (c *tracedCall) invalidate() {
	err := c.list.Invalidate(&c.qp, func(ok bool) {
		if ok {
			c.list.Fenced()
		}
	})
	if (err != nil) != (c.qp.failAt >= 0) {
		c.t.Errorf("Invalidate: got %v", err)
	}
}

// failLocalInv makes a call whose LOCAL_INV fails, and recovers its MR.
func (c *tracedCall) failLocalInv(status verbs.Status) {
	c.mapPages(1)
	c.send()
	c.qp.status = status
	c.invalidate()
	c.pool.Recover()
}

// TestTraceEvents checks the events of each way in which an MR is used. The kernel has the same
// events, and one unmap for each map (S24).
func TestTraceEvents(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*tracedCall)
		want string // events, with the number of the MR or of requests where they have one
	}{
		{"failed marshal", func(c *tracedCall) { c.mapPages(2); c.list.Unmap() },
			"alloc.1 map.1 alloc.2 map.2 unmap.1 unmap.2"},
		{"reply", func(c *tracedCall) { c.mapPages(2); c.send(); c.invalidate() },
			"alloc.1 map.1 alloc.2 map.2 fastreg.2 fastreg.1 localinv.2 localinv.1 " +
				"wc_li_done.2 unmap.1 unmap.2 post_linv/2"},
		{"remote invalidation", func(c *tracedCall) {
			c.mapPages(1)
			c.send()
			c.list.RemoteInvalidated(c.list.Registered()[0].handle)
			c.invalidate()
		}, "alloc.1 map.1 fastreg.1 reminv.1 unmap.1"},
		{"interrupt", func(c *tracedCall) { c.mapPages(1); c.send(); c.list.Abandon(); c.invalidate() },
			"alloc.1 map.1 fastreg.1 localinv.1 wc_li_wake.1 unmap.1 post_linv/1"},
		{"call after an interrupt", func(c *tracedCall) {
			c.mapPages(1)
			c.list.Abandon()
			c.list.Unmap()
			c.mapPages(1)
			c.send()
			c.invalidate()
		}, "alloc.1 map.1 unmap.1 map.1 fastreg.1 localinv.1 wc_li_done.1 unmap.1 post_linv/1"},
		{"flushed FastReg", func(c *tracedCall) {
			c.mapPages(1)
			c.send()
			c.list.Registered()[0].regDone(&verbs.WorkCompletion{Status: verbs.StatusWRFlushErr})
			c.pool.Recover()
		}, "alloc.1 map.1 fastreg.1 wc_fastreg.1 unmap.1 recover.1"},
		{"flushed LOCAL_INV", func(c *tracedCall) { c.failLocalInv(verbs.StatusWRFlushErr) },
			"alloc.1 map.1 fastreg.1 localinv.1 wc_li.1 post_linv/1 unmap.1 recover.1"},
		{"failed LOCAL_INV", func(c *tracedCall) { c.failLocalInv(verbs.StatusMWBindErr) },
			"alloc.1 map.1 fastreg.1 localinv.1 wc_li.1 post_linv/1 recycle.1 unmap.1 dereg.1"},
		{"LOCAL_INV not posted", func(c *tracedCall) { c.mapPages(2); c.send(); c.qp.failAt = 1; c.invalidate() },
			"alloc.1 map.1 alloc.2 map.2 fastreg.2 fastreg.1 localinv.2 localinv.1 post_linv_err/1 " +
				"recycle.2 unmap.2 dereg.2"},
		{"recovery without memory", func(c *tracedCall) {
			c.mapPages(1)
			c.pd.allocErr = syscall.ENOMEM
			c.pool.Recover()
		}, "alloc.1 map.1 unmap.1 orphan.1"},
		{"MR is not destroyed", func(c *tracedCall) {
			c.mapPages(1)
			c.pd.deregErr = syscall.EBUSY
			c.pool.Recover()
		}, "alloc.1 map.1 unmap.1 orphan.1"},
		{"end of the pool", func(c *tracedCall) { c.mapPages(1); c.pool.Destroy() }, "alloc.1 map.1 unmap.1 dereg.1"},
		{"scattered memory", func(c *tracedCall) {
			if _, err := c.list.Map([][]byte{pages(c.t, 3)}, true, 7); !errors.Is(err, ErrTooManySegments) {
				c.t.Errorf("Map: got %v, want ErrTooManySegments", err)
			}
		}, "alloc.1 map.1 alloc.2 map.2 unmap.1 unmap.2 sgerr/1"},
		{"no MR", func(c *tracedCall) {
			c.pd.allocErr = syscall.ENOMEM
			if _, err := c.list.Map([][]byte{pages(c.t, 1)}, true, 7); !errors.Is(err, syscall.ENOMEM) {
				c.t.Errorf("Map: got %v, want ENOMEM", err)
			}
		}, "maperr/1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stats Counters
			call := &tracedCall{t: t, pd: &fakePD{}, ring: trace.NewRing(64, nil), qp: failingQP{failAt: -1}}
			call.pool = NewPool(call.pd, Params{Depth: 1, PageSize: 4096, MaxSegs: 2}, &stats, Hooks{Trace: call.ring})
			call.list.Use(call.pool)
			c.run(call)
			var got []string
			for _, e := range call.ring.Last(64) {
				s := e.Kind.String()
				switch {
				case e.MR != 0:
					s += fmt.Sprintf(".%d", e.MR)
				case e.XID == 7:
					s += fmt.Sprintf("/%d", e.N)
				}
				if e.XID != 7 && e.Kind != trace.Alloc {
					t.Errorf("XID of event %s: got %d, want 7", s, e.XID)
				}
				got = append(got, s)
			}
			if want := strings.Fields(c.want); !slices.Equal(got, want) {
				t.Errorf("events:\n got %v\nwant %v", got, want)
			}
			call.pool.hooks.Trace = nil
			call.pool.Destroy()
		})
	}
}
