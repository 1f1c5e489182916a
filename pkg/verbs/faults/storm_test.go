package faults_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A requestLog counts the completions of each request.
type requestLog struct {
	mu   sync.Mutex
	left map[int]int // expected completions
	next int
}

func (l *requestLog) open() (id int, done func(*verbs.WorkCompletion)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	id = l.next
	l.next++
	l.left[id] = 1
	return id, func(*verbs.WorkCompletion) { l.complete(id) }
}

func (l *requestLog) complete(id int) {
	l.mu.Lock()
	l.left[id]--
	l.mu.Unlock()
}

func (l *requestLog) posted() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

func (l *requestLog) check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.left {
		if n != 0 {
			t.Fatalf("request %d of %d: got %d completions, want 1", id, l.next, 1-n)
		}
	}
}

// TestEachRequestCompletesOnce posts from several goroutines at both ends under all faults of
// posts, messages and memory. Each accepted request completes exactly once before Drain returns.
// OnDisconnect is called once, and no resource leaks.
func TestEachRequestCompletesOnce(t *testing.T) {
	const spec = "seed=%d,disconnect-every=~150,post-fail=~20:*,flush-reg=~80,reg-error=~100,linv-error=~100," +
		"delay-reply=~5:2ms,lose-reply=~10,alloc-fail=~10,dereg-fail=~5"
	names := []string{"disconnect-every", "post-fail", "flush-reg", "reg-error", "linv-error", "delay-reply",
		"lose-reply", "alloc-fail", "dereg-fail"}
	total := map[string]uint64{}
	missing := func(name string) bool { return total[name] == 0 }
	// The scheduler decides how many events of each kind come before the end of a connection.
	for seed := 0; seed < 12 || seed < 1000 && slices.ContainsFunc(names, missing); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			client, server := withFaults(t, fmt.Sprintf(spec, seed)), withFaults(t, fmt.Sprintf(spec, seed+1000))
			storm(t, client, server, seed)
			for _, p := range []*faults.Provider{client, server} {
				for _, c := range p.Counts() {
					total[c.Name] += c.Injected
				}
			}
		})
	}
	t.Log(total)
	if slices.ContainsFunc(names, missing) {
		t.Errorf("injected faults: got %v, want each of %v", total, names)
	}
}

func storm(t *testing.T, client, server verbs.Provider, seed int) {
	c, s := connect(t, client, server)
	var wg sync.WaitGroup
	logs := map[*side]*requestLog{c: {left: map[int]int{}}, s: {left: map[int]int{}}}
	for e, log := range logs {
		in, out := e.Buffer(64), e.Buffer(64)
		wg.Add(1)
		go func() {
			defer wg.Done()
			receiver(e, log, in)
		}()
		for i := range 2 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				poster(t, e, log, out, i)
			}()
		}
	}
	// The faults end the connection at some time. Sometimes one side closes it earlier.
	if seed%3 == 0 {
		kit.Eventually(t, "requests", func() bool { return logs[c].posted() > 100 || len(c.Disconnects) > 0 })
		c.ID.Close()
	}
	wg.Wait()
	var both sync.WaitGroup
	for e := range logs {
		both.Go(e.QP.Drain)
		both.Go(func() { e.ID.Close() })
	}
	both.Wait()
	for e, log := range logs {
		log.check(t)
		if st := e.QP.Stats(); st.SendCompletions > st.PostedSendWRs || st.RecvCompletions != st.PostedRecvWRs {
			t.Errorf("stats: completions do not match posts: %+v", st)
		}
	}
}

func receiver(e *side, log *requestLog, in verbs.SGE) {
	for {
		id, done := log.open()
		_, err := e.QP.PostRecv(&verbs.RecvRequest{SGE: in, Done: done})
		if err != nil {
			log.complete(id)
			if errors.Is(err, verbs.ErrQPState) {
				return
			}
			runtime.Gosched()
		}
	}
}

// poster posts chains until the queue pair has ended.
func poster(t *testing.T, e *side, log *requestLog, out verbs.SGE, n int) {
	mem := [][]byte{out.Buf[32*n : 32*n+8]}
	for round := 0; ; round++ {
		m, err := e.PD.AllocMR(1)
		if err != nil {
			continue
		}
		key := m.RKey().WithKey(1)
		data := []verbs.SGE{{Buf: mem[0], LKey: out.LKey}}
		wrs := []*verbs.WorkRequest{
			{Opcode: verbs.OpFastReg, MR: m, NewKey: 1, Access: verbs.AccessRemoteRead, Segs: mem},
			{Opcode: verbs.OpRDMAWrite},
			{Opcode: verbs.OpLocalInv, InvalidateRKey: key},
		}
		if round%8 == 0 { // rare enough for the Receives of the peer
			wrs[1] = &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: data}
		}
		fenced := make(chan struct{}, 1)
		var ids []int
		for _, wr := range wrs {
			id, done := log.open()
			wr.Signaled, wr.Done = true, done
			ids = append(ids, id)
		}
		last := wrs[2].Done
		wrs[2].Done = func(wc *verbs.WorkCompletion) { last(wc); fenced <- struct{}{} }
		bad, err := e.QP.PostSend(verbstest.Chain(wrs...))
		accepted := err == nil
		if !accepted {
			taken := true
			for i, wr := range wrs {
				if taken = taken && wr != bad; !taken {
					log.complete(ids[i])
				}
			}
		}
		if accepted {
			<-fenced
		}
		var injected *faults.Error
		if err := m.Dereg(); err != nil && !errors.As(err, &injected) {
			t.Error(err)
		}
		if errors.Is(err, verbs.ErrQPState) {
			return
		}
		runtime.Gosched()
	}
}
