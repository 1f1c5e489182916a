package xprt

import (
	"bytes"
	"context"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

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
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			var calls atomic.Int64
			svc := svcrdma.HandlerFunc(func(ctx context.Context, a netip.AddrPort, call, reply []byte) ([]byte, error) {
				if calls.Add(1) == 1 && tt.cancel {
					cancel()
					<-ctx.Done()
				}
				return (&service{}).ServeRPC(ctx, a, call, reply)
			})
			var posts atomic.Int64
			tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) {
				c.Provider = hooked(&hookedProvider{open: func() qpHooks {
					return qpHooks{post: func(*verbs.WorkRequest, int) (int, error) {
						if posts.Add(1) == tt.post {
							panic("test")
						}
						return 0, nil
					}}
				}})
			})
			cn := connOf(t, tr)
			c, buf := nfs3.NewClient(tr), make([]byte, 64<<10)
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
			tr.Close()
		})
	}
}
