package faults_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
)

// localInvs returns a chain of n LocalInvs of an MR that is already invalid. Each of them succeeds.
func (s *side) localInvs(n int) []*verbs.WorkRequest {
	key := s.MR(4).RKey()
	var wrs []*verbs.WorkRequest
	for i := range n {
		wrs = append(wrs, s.wr(fmt.Sprint(i), &verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: key}))
	}
	return wrs
}

// wantInjected checks that err is the error of the fault's event and wraps like.
func wantInjected(t testing.TB, err error, fault string, event uint64, like error) {
	t.Helper()
	var e *faults.Error
	if !errors.As(err, &e) || e.Fault != fault || e.Event != event || !errors.Is(err, like) {
		t.Errorf("error: got %v, want %s at event %d wrapping %v", err, fault, event, like)
	}
}

// wantBothDisconnected checks that a fault of c ended the connection at both ends.
func wantBothDisconnected(t testing.TB, c, s *side, fault string, event uint64, like error) {
	t.Helper()
	wantInjected(t, c.WaitDisconnect(), fault, event, like)
	s.WaitDisconnect()
	if _, err := c.QP.PostSend(c.write("late")); err != verbs.ErrQPState {
		t.Errorf("post after disconnect: got %v, want %v", err, verbs.ErrQPState)
	}
	if st := c.QP.Stats(); st.SendCompletions > st.PostedSendWRs || st.RecvCompletions != st.PostedRecvWRs {
		t.Errorf("stats: completions do not match posts: %+v", st)
	}
	c.log.wantEmpty()
}

func TestDisconnectBeforeDuringAndAfterPost(t *testing.T) {
	const requests = 4
	moments := map[string]int{}
	for seed := range 16 {
		p := withFaults(t, fmt.Sprintf("seed=%d,disconnect-every=2", seed))
		c, s := connectClient(t, p) // event 1
		wrs := c.localInvs(requests)
		bad, err := c.QP.PostSend(verbstest.Chain(wrs...))
		if err != nil {
			if err != verbs.ErrQPState || bad != wrs[0] {
				t.Fatalf("seed %d: post: got %v, want ErrQPState at the first request", seed, err)
			}
			moments["before"]++
		} else {
			done := 0
			for i := range requests {
				e := c.log.next()
				if e.name != fmt.Sprint(i) || e.wc.Opcode != verbs.OpLocalInv {
					t.Fatalf("seed %d: completion: got %s, want %d", seed, e.name, i)
				}
				switch {
				case e.wc.Status == verbs.StatusSuccess && done == i:
					done++
				case e.wc.Status != verbs.StatusWRFlushErr:
					t.Fatalf("seed %d: request %d: got status %v, want success or flush", seed, i, e.wc.Status)
				}
			}
			if done == requests {
				moments["after"]++
			} else {
				moments["middle"]++
			}
		}
		wantBothDisconnected(t, c, s, "disconnect-every", 2, syscall.ECONNRESET)
		wantCounts(t, p, faults.Count{Name: "disconnect-every", Injected: 1})
	}
	if len(moments) != 3 {
		t.Errorf("times of disconnects: got %v, want before, middle and after", moments)
	}
}

func TestPostFailPostsPrefix(t *testing.T) {
	p := withFaults(t, "seed=1,post-fail=2:2")
	c, _ := connectClient(t, p) // its chain is too short for an event
	for round := range 6 {
		wrs := c.localInvs(4)
		bad, err := c.QP.PostSend(verbstest.Chain(wrs...))
		posted := 4
		if round%2 == 1 {
			posted = 2
			wantInjected(t, err, "post-fail", uint64(round+1), syscall.ENOMEM)
			if bad != wrs[2] || !errors.Is(err, verbs.ErrNoResources) {
				t.Errorf("round %d: post: got %v, want ErrNoResources at the third request", round, err)
			}
		} else if err != nil {
			t.Fatalf("round %d: post: %v", round, err)
		}
		for i := range posted {
			c.log.want(fmt.Sprint(i), verbs.StatusSuccess)
		}
		c.post(c.write("between")) // too short for an event; the connection still works
		c.log.want("between", verbs.StatusSuccess)
	}
	wantCounts(t, p, faults.Count{Name: "post-fail", Injected: 3})
}

// TestPostKeepsCallerChain checks that PostSend does not change the caller's chain, with or without
// a fault.
func TestPostKeepsCallerChain(t *testing.T) {
	p := withFaults(t, "seed=1,post-fail=2:1")
	c, _ := connectClient(t, p)
	for range 2 {
		wrs := c.localInvs(3)
		wrs[0].MR = c.MR(4)
		first := verbstest.Chain(wrs...)
		mr := wrs[0].MR
		c.QP.PostSend(first)
		if wrs[0].Next != wrs[1] || wrs[1].Next != wrs[2] || wrs[2].Next != nil || wrs[0].MR != mr {
			t.Error("PostSend changed the caller's chain")
		}
	}
}

// registrationChain returns a chain of two FastRegs and a Send.
func (s *side) registrationChain() []*verbs.WorkRequest {
	var wrs []*verbs.WorkRequest
	for i := range 2 {
		wrs = append(wrs, s.wr(fmt.Sprint("reg", i), &verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: s.MR(4), NewKey: 3,
			Access: verbs.AccessRemoteRead, Segs: [][]byte{s.Buffer(64).Buf}}))
	}
	return append(wrs, s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend}))
}

func TestFlushRegFlushesRest(t *testing.T) {
	var at [2]int
	for seed := range 8 {
		p := withFaults(t, fmt.Sprintf("seed=%d,flush-reg=1", seed))
		c, s := connectClient(t, p)
		s.recv("message", s.Buffer(64))
		c.post(c.registrationChain()...)
		e := c.log.next()
		if e.wc.Status == verbs.StatusSuccess && e.name == "reg0" {
			at[1]++
			e = c.log.next()
		} else {
			at[0]++
			if e.name != "reg0" || e.wc.Status != verbs.StatusWRFlushErr {
				t.Fatalf("seed %d: completion: got %s %v, want reg0 flushed", seed, e.name, e.wc.Status)
			}
			e = c.log.next()
		}
		if e.name != "reg1" || e.wc.Status != verbs.StatusWRFlushErr || e.wc.Opcode != verbs.OpFastReg {
			t.Fatalf("seed %d: completion: got %s %v, want reg1 flushed", seed, e.name, e.wc.Status)
		}
		c.log.want("send", verbs.StatusWRFlushErr)
		wantBothDisconnected(t, c, s, "flush-reg", 1, syscall.ECONNRESET)
		s.log.want("message", verbs.StatusWRFlushErr)
		wantCounts(t, p, faults.Count{Name: "flush-reg", Injected: 1})
	}
	if at[0] == 0 || at[1] == 0 {
		t.Errorf("first flushed FastReg: got the first one %d times and the second one %d times, want both", at[0],
			at[1])
	}
}

func TestRegErrorFlushesRest(t *testing.T) {
	statuses := map[verbs.Status]int{}
	for seed := range 8 {
		p := withFaults(t, fmt.Sprintf("seed=%d,reg-error=2", seed))
		c, s := connectClient(t, p)
		c.post(c.registrationChain()...)
		c.log.want("reg0", verbs.StatusSuccess)
		e := c.log.next()
		if e.name != "reg1" {
			t.Fatalf("completion: got %s, want reg1", e.name)
		}
		statuses[e.wc.Status]++
		c.log.want("send", verbs.StatusWRFlushErr)
		wantBothDisconnected(t, c, s, "reg-error", 2, syscall.EIO)
		wantCounts(t, p, faults.Count{Name: "reg-error", Injected: 1})
	}
	if len(statuses) != 2 || statuses[verbs.StatusMWBindErr] == 0 || statuses[verbs.StatusLocProtErr] == 0 {
		t.Errorf("statuses: got %v, want memory bind and local protection errors", statuses)
	}
}

func TestLocalInvErrorFlushesRest(t *testing.T) {
	p := withFaults(t, "seed=5,linv-error=6")
	c, s := connectClient(t, p)
	c.post(c.localInvs(3)...)
	for i := range 3 {
		c.log.want(fmt.Sprint(i), verbs.StatusSuccess)
	}
	c.post(c.localInvs(4)...)
	c.log.want("0", verbs.StatusSuccess)
	c.log.want("1", verbs.StatusSuccess)
	e := c.log.next()
	if e.name != "2" || !slices.Contains([]verbs.Status{verbs.StatusLocProtErr, verbs.StatusLocQPOpErr,
		verbs.StatusMWBindErr}, e.wc.Status) {
		t.Errorf("completion: got %s %v, want 2 with an error", e.name, e.wc.Status)
	}
	c.log.want("3", verbs.StatusWRFlushErr)
	wantBothDisconnected(t, c, s, "linv-error", 6, syscall.EIO)
	wantCounts(t, p, faults.Count{Name: "linv-error", Injected: 1})
}

// TestOneFaultPerChain checks that a chain with one fault does not count as an event of the other
// faults.
func TestOneFaultPerChain(t *testing.T) {
	p := withFaults(t, "seed=1,post-fail=1:1,reg-error=1")
	c, _ := connectClient(t, p)
	wrs := c.registrationChain()
	if bad, err := c.QP.PostSend(verbstest.Chain(wrs...)); err == nil || bad != wrs[1] {
		t.Errorf("post: got %v, want an error at the second request", err)
	}
	c.log.want("reg0", verbs.StatusSuccess)
	wantCounts(t, p, faults.Count{Name: "post-fail", Injected: 1}, faults.Count{Name: "reg-error", Injected: 0})
}

// TestDrainWaitsForUnpostedRequests checks that the handlers of unposted requests have returned
// when Drain returns.
func TestDrainWaitsForUnpostedRequests(t *testing.T) {
	p := withFaults(t, "seed=1,flush-reg=1")
	c, _ := connectClient(t, p)
	wrs := c.registrationChain()
	var returned atomic.Bool
	wrs[2].Done = func(*verbs.WorkCompletion) {
		for range 100 {
			runtime.Gosched()
		}
		returned.Store(true)
	}
	c.post(wrs...)
	c.QP.Drain()
	if !returned.Load() {
		t.Error("Drain returned before a handler")
	}
	wantInjected(t, c.WaitDisconnect(), "flush-reg", 1, syscall.ECONNRESET)
}

// TestFaultsTakeNoChainBack checks that a decorated queue pair is no verbs.WithdrawingQP. It posts
// copies of the requests, so the inner queue pair would not find them.
func TestFaultsTakeNoChainBack(t *testing.T) {
	c, s := connectClient(t, withFaults(t, ""))
	if _, ok := s.QP.(verbs.WithdrawingQP); !ok {
		t.Fatal("softiwarp takes no chain back")
	}
	if _, ok := c.QP.(verbs.WithdrawingQP); ok {
		t.Error("a queue pair with faults takes chains back")
	}
}
