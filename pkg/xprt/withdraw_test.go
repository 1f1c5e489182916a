package xprt

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A slowLink forwards TCP between a client and a server. It can stop to read from the client.
type slowLink struct {
	*kit.Relay
	t *testing.T

	mu      sync.Mutex
	left    int           // bytes that still pass to the server; -1 for all
	stopped chan struct{} // closed when none are left
	resumed chan struct{} // closed to let all pass again
}

func newSlowLink(t *testing.T, to netip.AddrPort) *slowLink {
	t.Helper()
	l := &slowLink{t: t, left: -1}
	l.Relay = kit.StartRelay(t, to.String(), kit.RelayOptions{ToServer: l.pass, ClientBuffer: 16 << 10})
	return l
}

// pass waits until n bytes may pass.
func (l *slowLink) pass(n int) {
	l.mu.Lock()
	if l.left < 0 || l.left > n {
		l.left = max(l.left-n, -1)
		l.mu.Unlock()
		return
	}
	if l.left > 0 {
		close(l.stopped)
	}
	l.left = 0
	resumed := l.resumed
	l.mu.Unlock()
	<-resumed
}

// stopAfter stops the link after n bytes from the client. It returns a channel that is closed when
// the link has stopped, and a function that starts the link again.
func (l *slowLink) stopAfter(n int) (stopped chan struct{}, resume func()) {
	stopped, resumed := make(chan struct{}), make(chan struct{})
	l.mu.Lock()
	l.left, l.stopped, l.resumed = n, stopped, resumed
	l.mu.Unlock()
	resume = sync.OnceFunc(func() {
		l.mu.Lock()
		l.left = -1
		l.mu.Unlock()
		close(resumed)
	})
	l.t.Cleanup(resume) // before the relay stops
	return stopped, resume
}

// A busyLink is a transport whose link has stopped in the middle of the data of a WRITE. The
// following calls wait in the send queue.
type busyLink struct {
	t      *testing.T
	tr     *Transport
	svc    *service
	c      *nfs3.Client
	resume func()
	write  chan error // result of the WRITE
	ended  observed
}

func newBusyLink(t *testing.T) *busyLink {
	t.Helper()
	b := &busyLink{t: t, svc: &service{}, write: make(chan error, 1)}
	link := newSlowLink(t, serve(t, svcrdma.Config{Handler: b.svc, InlineBytes: 65536}))
	b.tr = dial(t, link.Addr(), func(c *Config) {
		c.Provider = softiwarp.New(softiwarp.Config{SocketBuffer: 16 << 10})
		c.InlineBytes, c.Observe = 65536, b.ended.observe
	})
	if err := b.tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // its reply grants the credits
		t.Fatal(err)
	}
	b.svc.calls.Store(0)
	stopped, resume := link.stopAfter(100 << 10)
	b.resume = resume
	b.c = nfs3.NewClient(b.tr)
	go func() {
		var r nfs3.WriteResult
		b.write <- b.c.Write(testContext(t), noCred, testFH(t), 0, fill(0, 1<<20), nfs3.FileSync, &r)
	}()
	<-stopped
	return b
}

// posted waits until n calls wait for their replies.
func (b *busyLink) posted(n int) {
	b.t.Helper()
	kit.Eventually(b.t, "calls in the send queue", func() bool {
		waiting := 0
		for _, c := range b.tr.Calls() {
			if c.Waits == WaitReply {
				waiting++
			}
		}
		return waiting == n
	})
}

// TestInterruptWithdrawsUnsentCall interrupts calls that wait in the send queue behind the data of
// a WRITE, on a link that conveys nothing. They must return, and the server must not receive them.
// The connection must stay up (docs/features.md S21).
func TestInterruptWithdrawsUnsentCall(t *testing.T) {
	mem := make([]byte, 300000)
	var read nfs3.ReadResult
	var wrote nfs3.WriteResult
	for _, c := range []struct {
		name string
		call func(ctx context.Context, b *busyLink) error
	}{
		{"no MR", func(ctx context.Context, b *busyLink) error {
			return b.tr.Call(ctx, echo(1, []byte("1234"), 4))
		}},
		{"READ", func(ctx context.Context, b *busyLink) error {
			return b.c.Read(ctx, noCred, testFH(b.t), 0, mem, &read)
		}},
		{"WRITE with a read chunk", func(ctx context.Context, b *busyLink) error {
			return b.c.Write(ctx, noCred, testFH(b.t), 0, mem, nfs3.FileSync, &wrote)
		}},
		{"WRITE with a Send from the memory of the caller", func(ctx context.Context, b *busyLink) error {
			return b.c.Write(ctx, noCred, testFH(b.t), 0, mem[:30000], nfs3.FileSync, &wrote)
		}},
		{"reply chunk", func(ctx context.Context, b *busyLink) error {
			return b.tr.Call(ctx, echo(2, sunrpc.AppendUint32(nil, 200000), 200000))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBusyLink(t)
			ahead := make(chan error, 1)
			go func() { ahead <- b.tr.Call(testContext(t), echo(1, nil, 0)) }()
			const calls = 2 // with the WRITE
			b.posted(calls)
			ctx, cancel := context.WithCancel(testContext(t))
			interrupted := make(chan error, 1)
			go func() { interrupted <- c.call(ctx, b) }()
			b.posted(calls + 1)
			cancel()
			if err := <-interrupted; !errors.Is(err, syscall.EINTR) {
				t.Fatalf("got %v, want EINTR", err)
			}
			for i := range mem {
				mem[i] = 0xee // belongs to the caller again
			}
			if s := b.tr.Stats(); int(s.InFlight) != calls {
				t.Errorf("credits in use after the interrupt: got %d, want %d", s.InFlight, calls)
			}
			b.resume()
			if err := <-ahead; err != nil {
				t.Errorf("call in front of it: %v", err)
			}
			if err := <-b.write; err != nil {
				t.Errorf("WRITE: %v", err)
			}
			if err := b.tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Errorf("next call: %v", err)
			}
			kit.Eventually(t, "free slots and credits", func() bool {
				s := b.tr.Stats()
				return s.InFlight == 0 && s.SlotsInUse == 0
			})
			if got := b.svc.calls.Load(); got != int64(calls+1) {
				t.Errorf("calls at the server: got %d, want %d", got, calls+1)
			}
			if s := b.tr.Stats(); s.Connects != 1 || s.LastError != "" {
				t.Errorf("got %d connects, last error %q; want 1, none", s.Connects, s.LastError)
			}
			for i := range mem {
				if mem[i] != 0xee {
					t.Fatalf("byte %d was written after the call had returned", i)
				}
			}
		})
	}
}
