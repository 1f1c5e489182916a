package mount

import (
	"context"
	"net/netip"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// serveNull replies to every call without results.
func serveNull(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, _, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
}

var noCred = sunrpc.AppendAuthNone(nil)

// TestPendingCallHasNoNegativeTime reads the pending calls while other goroutines make calls. Many
// of the calls begin or are sent at the moment of a read.
func TestPendingCallHasNoNegativeTime(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	provider := softiwarp.New(softiwarp.Config{})
	l, err := provider.Listen(ctx, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var server, callers sync.WaitGroup
	defer server.Wait()
	defer cancel()
	server.Go(func() {
		if err := svcrdma.Serve(ctx, l, svcrdma.Config{Handler: svcrdma.HandlerFunc(serveNull)}); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	tr, err := xprt.New(xprt.Config{Provider: provider, Addr: l.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if err := tr.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	defer callers.Wait()
	defer close(stop)
	s := &mountStack{}
	s.transports.add(tr)
	for range 4 {
		callers.Go(func() {
			c := nfs3.NewClient(tr, nfs3.Options{})
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := c.Null(ctx, noCred); err != nil {
					t.Errorf("NULL: %v", err)
					return
				}
			}
		})
	}
	for seen := 0; seen < 5_000; {
		for _, c := range s.pendingCalls() {
			seen++
			if c.Age < 0 || c.SinceSent < 0 && c.SinceSent != -1 {
				t.Fatalf("got %+v, want no negative time", c)
			}
		}
	}
}
