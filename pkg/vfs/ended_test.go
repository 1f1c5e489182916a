package vfs

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// TestEndedHasThePhasesOfTheRequest delays each reply of the server by replyDelay.
func TestEndedHasThePhasesOfTheRequest(t *testing.T) {
	const replyDelay = 20 * time.Millisecond
	plan, err := faults.Parse("seed=1,delay-reply=1:20ms")
	must(t, err)
	e := startOwnExport(t)
	addr := netip.MustParseAddrPort(e.rdmaAddr)
	e.dial = func(ctx context.Context) (transport, error) {
		tr, err := xprt.New(xprt.Config{Provider: faults.New(softiwarp.New(softiwarp.Config{}), plan, nil), Addr: addr,
			Observe: func(ctx context.Context, c xprt.Ended) { AddCall(ctx, &c.Times) }})
		if err != nil {
			return nil, err
		}
		return tr, tr.Connect(ctx)
	}
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	var mu sync.Mutex
	var all []Ended
	m := e.mount(t, mountConfig{opts: Options{Ended: func(e Ended) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, e)
	}}})
	wantContent(t, m.path("file"), []byte("x"))
	must(t, os.WriteFile(m.path("new"), []byte("y"), 0o644))
	if _, err := os.Stat(m.path("missing")); !os.IsNotExist(err) {
		t.Errorf("stat of a missing file: got %v", err)
	}
	m.unmount(t) // ends all requests

	mu.Lock()
	defer mu.Unlock()
	seen := make(map[kernel.Op]uint64)
	missing := false
	for _, e := range all {
		seen[e.Op]++
		missing = missing || e.Op == kernel.OpLookup && e.Status == fuse.ENOENT
		var sum time.Duration
		for p := range ledger.NumPhases {
			sum += max(e.Times.Spent(p), 0)
		}
		if total := e.Times.Total(); sum != total || e.Times.Spent(ledger.PhaseQueue) <= 0 ||
			e.Times.Spent(ledger.PhaseLocal) <= 0 || e.Times.Spent(ledger.PhaseReply) <= 0 {
			t.Errorf("%v: got %+v with the sum %v, want the total, %v, and time in queue, local and reply", e.Op,
				e.Times, sum, total)
		}
		if got, want := e.Times.Spent(ledger.PhaseServer), time.Duration(e.Calls)*replyDelay; got < want {
			t.Errorf("%v with %d calls: got %v at the server, want at least %v", e.Op, e.Calls, got, want)
		}
		if e.Calls == 0 && e.Times.Spent(ledger.PhaseSend) != 0 {
			t.Errorf("%v without calls: got %+v, want no time in a phase of calls", e.Op, e.Times)
		}
		if e.Owner.UID != uint32(os.Getuid()) || e.Op == kernel.OpLookup && e.Owner.PID == 0 {
			t.Errorf("%v: got owner %+v, want this user and a thread", e.Op, e.Owner)
		}
	}
	for _, op := range []kernel.Op{kernel.OpLookup, kernel.OpOpen, kernel.OpRead, kernel.OpCreate} {
		if seen[op] == 0 || seen[op] != m.fs.Counters.Ops[op].Load() {
			t.Errorf("%v: got %d, want %d", op, seen[op], m.fs.Counters.Ops[op].Load())
		}
	}
	if !missing {
		t.Error("got no lookup with ENOENT")
	}
}

// TestTagFollowsTheRequest checks the tags of requests that reuse the same memory.
func TestTagFollowsTheRequest(t *testing.T) {
	var next, ended any
	var bytes int
	fs := &FS{creds: newCredentials(new(Counters), nil), opts: Options{Tag: func() any { return next },
		Ended: func(e Ended) { ended, bytes = e.Tag, e.Bytes }}}
	defer fs.interrupts.stop()
	var h fuse.InHeader
	for i, tag := range []any{"a", nil, "b", nil} {
		next = tag
		h.Unique += 2
		r := fs.begin(&kernel.Request{Op: kernel.OpRead, Header: &h})
		ctx, cancel := context.WithCancel(r)
		if got, ok := TagOf(ctx); got != tag || !ok {
			t.Errorf("tag of an RPC: got %v, %v, want %v", got, ok, tag)
		}
		cancel()
		if r.moved != 0 {
			t.Errorf("bytes of a new request: got %d, want 0", r.moved)
		}
		r.moved = i
		fs.end(r, nil)
		fs.Replied(h.Unique, ledger.Now())
		if ended != tag || bytes != i {
			t.Errorf("ended request: got tag %v and %d bytes, want %v and %d", ended, bytes, tag, i)
		}
	}
	if tag, ok := TagOf(background{fs}); tag != nil || ok {
		t.Errorf("tag of background work: got %v, %v, want none", tag, ok)
	}
}

// TestEndedDoesNotAllocate checks that the measurement of a request allocates nothing, and that
// requests without Replied do not pile up.
func TestEndedDoesNotAllocate(t *testing.T) {
	var ended, observed int
	fs := &FS{creds: newCredentials(new(Counters), nil), opts: Options{Ended: func(Ended) { ended++ },
		Observe: func(Sample) { observed++ }, Tag: func() any { return nil }}}
	defer fs.interrupts.stop()
	var h fuse.InHeader // pid 0, so that no groups are read from /proc
	var rpc ledger.Times
	if n := testing.AllocsPerRun(1000, func() {
		h.Unique += 2
		r := fs.begin(&kernel.Request{Op: kernel.OpRead, Header: &h})
		rpc.Begin(ledger.Now())
		rpc.Mark(ledger.PhaseServer, ledger.Now())
		AddCall(r, &rpc)
		if tag, ok := TagOf(r); tag != nil || !ok {
			t.Errorf("tag: got %v, %v, want nil of a request", tag, ok)
		}
		fs.end(r, nil)
		fs.Replied(h.Unique, ledger.Now())
	}); n != 0 {
		t.Errorf("allocations per request: got %v, want 0", n)
	}
	if observed != 1001 {
		t.Errorf("calls of Observe: got %d, want 1001", observed)
	}
	if ended != 1001 || len(fs.interrupts.ended) != 0 {
		t.Errorf("got %d calls of Ended and %d requests left, want 1001 and 0", ended, len(fs.interrupts.ended))
	}
	for range 2 * maxEnded {
		fs.end(fs.begin(&kernel.Request{Op: kernel.OpRead, Header: &h}), nil)
	}
	if n := len(fs.interrupts.ended); n != maxEnded {
		t.Errorf("requests without Replied that are kept: got %d, want %d", n, maxEnded)
	}
}
