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
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// TestRequestHasThePhasesOfItsCalls delays each reply of the server by replyDelay.
func TestRequestHasThePhasesOfItsCalls(t *testing.T) {
	const replyDelay = 20 * time.Millisecond
	plan, err := faults.Parse("seed=1,delay-reply=1:20ms")
	must(t, err)
	e := startOwnExport(t)
	addr := netip.MustParseAddrPort(e.rdmaAddr)
	e.dial = func(ctx context.Context) (transport, error) {
		tr, err := xprt.New(xprt.Config{Provider: faults.New(softiwarp.New(softiwarp.Config{}), plan, nil), Addr: addr,
			Observe: func(ctx context.Context, c xprt.Ended) {
				if r := kernel.RequestOf(ctx); r != nil {
					r.AddCall(&c.Times)
				}
			}})
		if err != nil {
			return nil, err
		}
		return tr, tr.Connect(ctx)
	}
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	var mu sync.Mutex
	var all []*kernel.Request
	m := e.mount(t, mountConfig{opts: Options{Observe: func(r *kernel.Request) {
		h := *r.Header
		mu.Lock()
		defer mu.Unlock()
		all = append(all, &kernel.Request{Header: &h, Op: r.Op, Status: r.Status, Calls: r.Calls, Times: r.Times})
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
		if e.Header.Uid != uint32(os.Getuid()) || e.Op == kernel.OpLookup && e.Header.Pid == 0 {
			t.Errorf("%v: got %+v, want this user and a thread", e.Op, e.Header)
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
