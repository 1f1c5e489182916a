package xprt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var errPost = errors.New("post failed")

// failOnce returns hooks that make the first chain fail whose first request is op, at position at.
func failOnce(op verbs.Opcode, at int, failed *atomic.Int64) func() qpHooks {
	return func() qpHooks {
		return qpHooks{post: func(first *verbs.WorkRequest, n int) (int, error) {
			if first.Opcode == op && at < n && failed.CompareAndSwap(0, int64(n)) {
				return at, errPost
			}
			return 0, nil
		}}
	}
}

// A failedPost is a case of TestFailedPostEndsConnection.
type failedPost struct {
	op        verbs.Opcode // of the first request of the chain that fails
	at        int          // position at which the chain fails
	requests  int          // requests of the chain
	interrupt bool         // the call is interrupted before the reply
	inv       int          // number of the MR that the server invalidates, -1 for none
}

// failedPostMRs is the number of MRs of the call.
const failedPostMRs = 3

// TestFailedPostEndsConnection makes the chain of an RPC or of its LOCAL_INVs fail at each
// position. The RPC has several MRs, and the server invalidates none or one of them. The connection
// must end at once, not after a timeout, and the data of the RPC must be right (docs/features.md
// S14, S15).
func TestFailedPostEndsConnection(t *testing.T) {
	var cases []failedPost
	for at := range failedPostMRs + 1 {
		cases = append(cases, failedPost{verbs.OpFastReg, at, failedPostMRs + 1, false, -1})
	}
	for at := range failedPostMRs {
		cases = append(cases, failedPost{verbs.OpLocalInv, at, failedPostMRs, false, -1},
			failedPost{verbs.OpLocalInv, at, failedPostMRs, true, -1})
	}
	for at := range failedPostMRs - 1 {
		for inv := range failedPostMRs {
			cases = append(cases, failedPost{verbs.OpLocalInv, at, failedPostMRs - 1, false, inv})
		}
	}
	for _, c := range cases {
		name := fmt.Sprintf("%v chain, position %d, interrupt %v, remote invalidation %d", c.op, c.at, c.interrupt,
			c.inv)
		t.Run(name, func(t *testing.T) { c.run(t) })
	}
}

func (c *failedPost) run(t *testing.T) {
	var failed atomic.Int64
	svc := &service{}
	server := softiwarp.New(softiwarp.Config{})
	if c.inv >= 0 {
		server = &invalidatingProvider{server, c.inv}
	}
	tr := dial(t, serveOn(t, server, svcrdma.Config{Handler: svc}), func(cfg *Config) {
		cfg.Provider = hooked(&hookedProvider{attrs: withDepth(17), open: failOnce(c.op, c.at, &failed)})
		cfg.Timeout = 5 * time.Second
	})
	if c.interrupt {
		svc.delay.Store(int64(time.Hour))
	}
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	buf := make([]byte, (failedPostMRs*17-1)*4096) // may start within a page
	ended := make(chan error, 1)
	go func() {
		var r nfs3.ReadResult
		ended <- nfs3.NewClient(tr, nfs3.Options{}).Read(ctx, noCred, testFH(t), 3, buf, &r)
	}()
	if c.interrupt {
		kit.Eventually(t, "call at the server", func() bool { return svc.calls.Load() == 1 })
		cancel()
		if err := <-ended; !errors.Is(err, syscall.EINTR) {
			t.Errorf("READ: got %v, want EINTR", err)
		}
	} else if err := <-ended; err != nil || !bytes.Equal(buf, fill(3, len(buf))) {
		t.Errorf("READ: got %v, or wrong data", err)
	}
	kit.Eventually(t, "second connection", func() bool { return tr.Stats().Connects == 2 })
	c.checkStats(t, tr.Stats())
	if got := failed.Load(); got != int64(c.requests) {
		t.Errorf("requests in the failed chain: got %d, want %d", got, c.requests)
	}
	tr.Close()
	checkMRs(t, tr.Stats())
}

func (c *failedPost) checkStats(t *testing.T, s Stats) {
	t.Helper()
	if s.Timeouts != 0 || !strings.Contains(s.LastError, errPost.Error()) {
		t.Errorf("got %d timeouts, last error %q; want 0, %v", s.Timeouts, s.LastError, errPost)
	}
	remote := uint64(0)
	if c.inv >= 0 {
		remote = 1
	}
	// MRs whose LOCAL_INV was not posted are recycled. Those of an RPC that was not sent are
	// recovered, and the RPC is sent on the next connection.
	recycled, recovered, localInvs := uint64(c.requests-c.at), uint64(0), uint64(c.at)
	if c.op == verbs.OpFastReg {
		recycled, recovered, localInvs = 0, failedPostMRs, failedPostMRs
	}
	if s.MRsRecycled != recycled || c.op == verbs.OpFastReg && s.MRsRecovered != recovered ||
		s.LocalInvNeeded != localInvs || s.RemoteInvalidations != remote || s.Sends != 1 {
		t.Errorf("got %d recycled MRs, %d recovered, %d LOCAL_INVs, %d remote invalidations, %d Sends; "+
			"want %d, %d, %d, %d, 1", s.MRsRecycled, s.MRsRecovered, s.LocalInvNeeded, s.RemoteInvalidations, s.Sends,
			recycled, recovered, localInvs, remote)
	}
}

// TestFailedCompletionEndsConnection has a request complete with an error, and a device that stays
// in the ready state. The connection must end at once, because the memory of the call is not fenced
// (docs/features.md S25).
func TestFailedCompletionEndsConnection(t *testing.T) {
	for _, op := range []verbs.Opcode{verbs.OpLocalInv, verbs.OpSend} {
		for _, status := range []verbs.Status{verbs.StatusLocProtErr, verbs.StatusWRFlushErr} {
			t.Run(fmt.Sprint(op, ", ", status), func(t *testing.T) {
				var failed atomic.Bool
				hooks := func() qpHooks {
					return qpHooks{done: func(wr *verbs.WorkRequest, _ int, wc *verbs.WorkCompletion,
						next func(*verbs.WorkCompletion)) {
						if wr.Opcode == op && failed.CompareAndSwap(false, true) {
							wc.Status = status
						}
						next(wc)
					}}
				}
				tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, InlineBytes: 65536}), func(c *Config) {
					c.Provider, c.InlineBytes = hooked(&hookedProvider{open: hooks}), 65536
					c.Timeout = 5 * time.Second
				})
				c := nfs3.NewClient(tr, nfs3.Options{})
				var w nfs3.WriteResult // its Send is signaled
				if err := c.Write(testContext(t), noCred, testFH(t), 0, fill(0, 30000), nfs3.FileSync, &w); err != nil {
					t.Error(err)
				}
				var r nfs3.ReadResult
				if err := c.Read(testContext(t), noCred, testFH(t), 0, make([]byte, 100000), &r); err != nil {
					t.Error(err)
				}
				kit.Eventually(t, "second connection", func() bool { return tr.Stats().Connects == 2 })
				if s := tr.Stats(); s.Timeouts != 0 || !strings.Contains(s.LastError, status.String()) {
					t.Errorf("got %d timeouts, last error %q; want 0, %v", s.Timeouts, s.LastError, status)
				}
			})
		}
	}
}

// TestUnusableDomainIsReplaced ends a connection whose MR cannot be destroyed. The server may still
// reach the memory through the protection domain, so the next connection must have another one
// (S13).
func TestUnusableDomainIsReplaced(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(c *Config) { c.Provider = faulty(t, "dereg-fail=1") })
	svc.delay.Store(int64(time.Hour))
	buf := make([]byte, 100000)
	ended := make(chan error, 1)
	go func() {
		var r nfs3.ReadResult
		ended <- nfs3.NewClient(tr, nfs3.Options{}).Read(testContext(t), noCred, testFH(t), 3, buf, &r)
	}()
	kit.Eventually(t, "call at the server", func() bool { return svc.calls.Load() == 1 })
	first := connOf(t, tr)
	svc.delay.Store(0)
	first.fail(io.EOF)
	if err := <-ended; err != nil || !bytes.Equal(buf, fill(3, len(buf))) {
		t.Errorf("READ: got %v, or wrong data", err)
	}
	if connOf(t, tr).adapter == first.adapter || tr.Stats().MRsOrphaned == 0 {
		t.Errorf("got the same protection domain %v, %d orphaned MRs; want another, some",
			connOf(t, tr).adapter == first.adapter, tr.Stats().MRsOrphaned)
	}
}
