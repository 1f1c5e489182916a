package xprt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var errPost = errors.New("post failed")

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
	inBubble(t, func(cfg *Config, _ *stepServer) { cfg.Provider.(*stepDevice).attrs = withDepth(17) },
		func(t *testing.T, b *bubble) {
			failed := 0
			b.dev.refuse = func(first *verbs.WorkRequest, n int) (int, error) {
				if first.Opcode == c.op && c.at < n && failed == 0 {
					failed = n
					return c.at, errPost
				}
				return 0, nil
			}
			b.handleWith(func(call *stepCall) outcome {
				if c.interrupt {
					return dropped
				}
				if c.inv >= 0 {
					call.inv = verbs.RKey(call.Writes[0][c.inv].Handle)
				}
				return answered
			})
			p := b.start(readOf((failedPostMRs*17 - 1) * 4096)) // may start within a page
			if c.interrupt {
				p.interrupt()
			}
			sleep(firstPause)
			if c.interrupt && !errors.Is(p.err, syscall.EINTR) || !c.interrupt && p.err != nil || !p.done {
				t.Fatalf("READ: got returned %v, %v", p.done, p.err)
			}
			want := bytes.Repeat(binary.BigEndian.AppendUint32(nil, p.XID), len(p.ResultData)/4)
			if !c.interrupt && !bytes.Equal(p.ResultData, want) {
				t.Error("READ: the data is not that of the server")
			}
			if failed != c.requests {
				t.Errorf("requests in the failed chain: got %d, want %d", failed, c.requests)
			}
			c.checkStats(t, b.tr.Stats())
			b.tr.Close()
			checkMRs(t, b.tr.Stats())
		})
}

func (c *failedPost) checkStats(t *testing.T, s Stats) {
	t.Helper()
	if s.Timeouts != 0 || s.Connects != 2 || !strings.Contains(s.LastError, errPost.Error()) {
		t.Errorf("got %d timeouts, %d connects, last error %q; want 0, 2, %v", s.Timeouts, s.Connects, s.LastError,
			errPost)
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
		s.LocalInvNeeded != localInvs || s.RemoteInvalidations != remote || s.Sends != 2 {
		t.Errorf("got %d recycled MRs, %d recovered, %d LOCAL_INVs, %d remote invalidations, %d Sends; "+
			"want %d, %d, %d, %d, 2 with the first", s.MRsRecycled, s.MRsRecovered, s.LocalInvNeeded,
			s.RemoteInvalidations, s.Sends, recycled, recovered, localInvs, remote)
	}
}

// TestFailedCompletionEndsConnection has a request complete with an error, and a device that stays
// in the ready state. The connection must end at once, because the memory of the call is not fenced
// (docs/features.md S25). TestModel has flushed requests.
func TestFailedCompletionEndsConnection(t *testing.T) {
	for _, op := range []verbs.Opcode{verbs.OpLocalInv, verbs.OpSend} {
		var failed atomic.Bool
		hooks := func() qpHooks {
			return qpHooks{done: func(wr *verbs.WorkRequest, _ int, wc *verbs.WorkCompletion,
				next func(*verbs.WorkCompletion)) {
				if wr.Opcode == op && failed.CompareAndSwap(false, true) {
					wc.Status = verbs.StatusLocProtErr
				}
				next(wc)
			}}
		}
		tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, InlineBytes: 65536}), func(c *Config) {
			c.Provider, c.InlineBytes = hooked(&hookedProvider{open: hooks}), 65536
		})
		c := nfs3.NewClient(tr)
		var w nfs3.WriteResult // its Send is signaled
		kit.Must(t, c.Write(testContext(t), noCred, testFH(t), 0, fill(0, 30000), nfs3.FileSync, &w))
		var r nfs3.ReadResult
		kit.Must(t, c.Read(testContext(t), noCred, testFH(t), 0, make([]byte, 100000), &r))
		kit.Eventually(t, "second connection", func() bool { return tr.Stats().Connects == 2 })
		s := tr.Stats()
		if want := verbs.StatusLocProtErr.String(); s.Timeouts != 0 || !strings.Contains(s.LastError, want) {
			t.Errorf("%v: got %d timeouts, last error %q; want 0, %v", op, s.Timeouts, s.LastError, want)
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
		ended <- nfs3.NewClient(tr).Read(testContext(t), noCred, testFH(t), 3, buf, &r)
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
