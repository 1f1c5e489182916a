package memreg

import (
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A recordingQP keeps the chains that are posted. From request failAt on, a post fails.
type recordingQP struct {
	doneQP
	failAt int // -1: never
	posted []*verbs.WorkRequest
}

func (q *recordingQP) PostSend(wr *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	for ; wr != nil; wr = wr.Next {
		if len(q.posted) == q.failAt {
			return wr, syscall.ENOMEM
		}
		q.posted = append(q.posted, wr)
	}
	return nil, nil
}

// threeMRs returns a list with three registered MRs.
func threeMRs(t *testing.T, stats *Counters, hooks Hooks) (*List, *Pool) {
	t.Helper()
	pool := NewPool(&fakePD{}, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, stats, hooks)
	l := &List{}
	l.Use(pool)
	if n, err := l.Map([][]byte{pages(t, 3)}, true, 7); n != 3 || err != nil {
		t.Fatalf("Map: got %d MRs, %v; want 3", n, err)
	}
	return l, pool
}

// TestChainOfRPC checks the requests of an RPC: unsignaled FastRegs in the order of Map, and then
// the Send (S7, S8).
func TestChainOfRPC(t *testing.T) {
	var stats Counters
	l, pool := threeMRs(t, &stats, Hooks{})
	defer pool.Destroy()
	send := verbs.WorkRequest{Opcode: verbs.OpSend}
	head, n := l.Chain(&send)
	if n != 3 {
		t.Errorf("requests before the Send: got %d, want 3", n)
	}
	wr := head
	for i, m := range l.Registered() {
		if wr == nil || wr.Opcode != verbs.OpFastReg || wr.MR != m.vmr || wr.Signaled ||
			m.vmr.RKey().WithKey(wr.NewKey) != m.handle || wr.IOVA != m.Offset() || len(wr.Segs) != 1 {
			t.Fatalf("request %d: got %+v, want an unsignaled FastReg of MR %d", i, wr, m.id)
		}
		wr = wr.Next
	}
	if wr != &send || wr.Next != nil {
		t.Errorf("end of the chain: got %+v, want the Send", wr)
	}
}

// TestChainOfLocalInvs checks the LOCAL_INVs of an RPC: one chain with all MRs whose last request
// is signaled (S9, S10). The counter has only those that were posted.
func TestChainOfLocalInvs(t *testing.T) {
	for failAt := -1; failAt < 3; failAt++ {
		var stats Counters
		l, pool := threeMRs(t, &stats, Hooks{})
		l.Chain(&verbs.WorkRequest{})
		mrs := slices.Clone(l.Registered())
		qp := &recordingQP{failAt: failAt}
		calls := 0
		err := l.Invalidate(qp, func(bool) { calls++ })
		want := 3
		if failAt >= 0 {
			want = failAt
		}
		if errors.Is(err, syscall.ENOMEM) != (failAt >= 0) || calls != 0 || len(qp.posted) != want ||
			stats.LocalInvNeeded.Load() != uint64(want) || len(l.Registered()) != want ||
			stats.InState(Valid) != int64(want) || stats.MRsRecycled.Load() != uint64(3-want) {
			t.Errorf("failure at %d: got %v, %d fenced, %d posted, %d counted, %d registered, %d VALID, %d recycled; "+
				"want %d posted", failAt, err, calls, len(qp.posted), stats.LocalInvNeeded.Load(), len(l.Registered()),
				stats.InState(Valid), stats.MRsRecycled.Load(), want)
		}
		for i, wr := range qp.posted {
			if wr.Opcode != verbs.OpLocalInv || wr.InvalidateRKey != mrs[i].handle || wr.Signaled != (i == 2) {
				t.Errorf("request %d: got %+v, want a LOCAL_INV of MR %d, signaled only if it is the last", i, wr,
					mrs[i].id)
			}
		}
		if failAt < 0 {
			qp.posted[2].Done(&verbs.WorkCompletion{})
			l.Fenced()
			if calls != 1 || stats.Free() != 3 {
				t.Errorf("after the completion: got %d fenced, %d free; want 1, 3", calls, stats.Free())
			}
		}
		pool.Destroy()
	}
}

// TestRemoteInvalidationCounts checks the counters of both kinds of invalidation (S11, S23).
func TestRemoteInvalidationCounts(t *testing.T) {
	var stats Counters
	l, pool := threeMRs(t, &stats, Hooks{})
	defer pool.Destroy()
	l.Chain(&verbs.WorkRequest{})
	if !l.RemoteInvalidated(l.Registered()[1].handle) {
		t.Error("RemoteInvalidated: got false for a key of the RPC")
	}
	qp := &recordingQP{failAt: -1}
	if err := l.Invalidate(qp, func(bool) {}); err != nil {
		t.Error(err)
	}
	if len(qp.posted) != 2 || stats.RemoteInvalidations.Load() != 1 || stats.LocalInvNeeded.Load() != 2 ||
		stats.Free() != 1 {
		t.Errorf("got %d LOCAL_INVs, counters %d remote and %d local, %d free; want 2, 1, 2, 1", len(qp.posted),
			stats.RemoteInvalidations.Load(), stats.LocalInvNeeded.Load(), stats.Free())
	}
}

// TestFailedCompletionsAreReported checks that the owner of the pool gets every failed completion,
// flushes included, and no other (S25).
func TestFailedCompletionsAreReported(t *testing.T) {
	var stats Counters
	var got []string
	l, pool := threeMRs(t, &stats, Hooks{Failed: func(what string, wc *verbs.WorkCompletion) {
		got = append(got, what+": "+wc.Status.String())
	}})
	defer pool.Destroy()
	m := l.Registered()
	m[0].regDone(&verbs.WorkCompletion{})
	m[0].regDone(&verbs.WorkCompletion{Status: verbs.StatusWRFlushErr})
	m[1].regDone(&verbs.WorkCompletion{Status: verbs.StatusMWBindErr})
	m[2].invDone(&verbs.WorkCompletion{})
	m[2].invDone(&verbs.WorkCompletion{Status: verbs.StatusWRFlushErr})
	m[2].invDone(&verbs.WorkCompletion{Status: verbs.StatusLocQPOpErr})
	want := []string{"fastreg: work request flushed", "fastreg: memory bind operation error",
		"localinv: work request flushed", "localinv: local QP operation error"}
	if !slices.Equal(got, want) {
		t.Errorf("reports:\n got %q\nwant %q", got, want)
	}
	if stats.InState(FlushedFR) != 2 || stats.InState(Recycling) != 1 {
		t.Errorf("got %d FLUSHED_FR, %d RECYCLING; want 2, 1", stats.InState(FlushedFR), stats.InState(Recycling))
	}
}

// TestAccessIsLeast checks the rights of both directions, in the request and in the registration of
// a device that registers memory for each use (S6).
func TestAccessIsLeast(t *testing.T) {
	mem := pages(t, 1)
	for _, writing := range []bool{false, true} {
		want := verbs.AccessRemoteRead
		if writing {
			want = verbs.AccessRemoteWrite | verbs.AccessLocalWrite
		}
		var stats Counters
		perIO := &perIOPD{}
		for _, pool := range []*Pool{
			NewPool(&fakePD{}, Params{Depth: 1, PageSize: 4096, MaxSegs: 1}, &stats, Hooks{}),
			NewPool(perIO, perIOParams, &stats, Hooks{}),
		} {
			var l List
			l.Use(pool)
			if _, err := l.Map([][]byte{mem}, writing, 1); err != nil {
				t.Fatal(err)
			}
			if got := l.Registered()[0].reg.Access; got != want {
				t.Errorf("writing %v: access of the FastReg: got %b, want %b", writing, got, want)
			}
			if err := l.Unmap(); err != nil {
				t.Error(err)
			}
			pool.Destroy()
		}
		if perIO.access != want {
			t.Errorf("writing %v: access of the registration: got %b, want %b", writing, perIO.access, want)
		}
	}
}

// TestXIDAddress checks that no range crosses into the addresses of the next XID (S5).
func TestXIDAddress(t *testing.T) {
	const xid = 0xdeadbeef
	for _, c := range []struct {
		addr, want uint64
		length     uint32
	}{
		{0x7f0012345678, 0xdeadbeef_12345678, 1 << 20},
		{0x7f00ffff_f000, 0xdeadbeef_ffff_f000, 4096}, // ends at the end
		{0x7f00ffff_f000, 0xdeadbeef_0000_f000, 4097}, // one byte too long
		{0x7f00ffff_0123, 0xdeadbeef_0000_0123, 1 << 20},
		{0x7f0000000000, 0xdeadbeef_00000000, 1 << 20},
	} {
		got := xidAddress(xid, c.addr, c.length)
		if got != c.want || (got+uint64(c.length)-1)>>32 != xid {
			t.Errorf("address of %d bytes at %#x: got %#x, want %#x", c.length, c.addr, got, c.want)
		}
	}
}
