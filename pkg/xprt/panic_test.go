package xprt

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A panicQP panics at one call of PostSend.
type panicQP struct {
	verbs.QP
	left atomic.Int64 // calls up to the panic
}

func (q *panicQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	if q.left.Add(-1) == 0 {
		panic("test")
	}
	return q.QP.PostSend(first)
}

// TestPanicEndsConnection has a call that panics while it holds locks of the transport. The
// connection must end before the caller sees the panic, because the server could reach the memory
// of the call. The next call uses another connection, and Close returns.
func TestPanicEndsConnection(t *testing.T) {
	for _, tt := range []struct {
		name   string
		post   int64 // the PostSend that panics
		cancel bool  // cancel the call before its reply
	}{{"post of a call", 1, false}, {"post of LOCAL_INVs of a canceled call", 2, true}} {
		t.Run(tt.name, func(t *testing.T) {
			srv := &service{}
			tr := dial(t, serve(t, svcrdma.Config{Handler: srv}), nil)
			var cn *conn
			kit.Eventually(t, "connection", func() bool { cn = tr.conn.Load(); return cn != nil })
			tr.send.Lock()
			qp := &panicQP{QP: cn.qp}
			qp.left.Store(tt.post)
			cn.qp = qp
			tr.send.Unlock()
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			if tt.cancel {
				srv.delay.Store(int64(time.Hour))
				go func() {
					for srv.calls.Load() == 0 && ctx.Err() == nil {
						time.Sleep(time.Millisecond)
					}
					cancel()
				}()
			}
			c, buf := nfs3.NewClient(tr, nfs3.Options{}), make([]byte, 64<<10)
			var res nfs3.ReadResult
			func() {
				defer func() {
					if v := recover(); v != "test" {
						t.Errorf("panic of the call: got %v, want that of PostSend", v)
					}
				}()
				_ = c.Read(ctx, noCred, testFH(t), 0, buf, &res)
			}()
			if tr.conn.Load() == cn || !isClosed(cn.ended) {
				t.Error("the connection of the call continues after the panic")
			}
			srv.delay.Store(0)
			if err := c.Read(testContext(t), noCred, testFH(t), 0, buf, &res); err != nil ||
				!bytes.Equal(buf, fill(0, len(buf))) {
				t.Errorf("READ after the panic: got %v, or other data", err)
			}
			if connOf(t, tr).adapter == cn.adapter {
				t.Error("the next connection uses the MRs of the call that panicked")
			}
			if n := len(tr.Calls()); n > 0 {
				t.Errorf("pending calls: got %d, want 0", n)
			}
			closed := make(chan struct{})
			go func() { defer close(closed); tr.Close() }()
			kit.Eventually(t, "end of Close", func() bool { return isClosed(closed) })
		})
	}
}
