package xprt

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestModel runs the transport through every order of the events of two calls: completion, reply,
// interrupt, loss of the connection, flush, and reconnect. The test provides the device and the
// server. The search continues only once from each state, also if several orders lead to it.
//
// After each event it checks that the server cannot reach the memory of a call that has returned,
// and that the counters of credits and of the send queue are right. Where no event is left that
// must happen, it checks that both calls have returned. After each state it closes the transport
// and checks that nothing is left.
func TestModel(t *testing.T) {
	// One goroutine at a time makes nearly all runs repeatable.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	each := [2]shape{{read: true}, {write: true}}
	both := [2]shape{{read: true, write: true}, {}}
	models := []model{
		{name: "one MR each", calls: each, credits: 2},
		{name: "one MR each, posts yield", calls: each, credits: 2, yield: true},
		{name: "one MR each, Send With Invalidate", calls: each, credits: 2, remoteInv: true},
		{name: "two MRs and none", calls: both, credits: 2},
		{name: "two MRs and none, Send With Invalidate", calls: both, credits: 2, remoteInv: true},
		{name: "one MR each, unsent calls are withdrawn", calls: each, credits: 2, withdraw: true},
		{name: "one credit", calls: each, credits: 1},
		{name: "one credit, posts yield", calls: each, credits: 1, yield: true},
		{name: "device of two MRs", calls: [2]shape{{read: true, write: true}, {read: true}}, credits: 2, maxMR: 2},
	}
	forge := model{name: "one MR and none, forged replies", calls: [2]shape{{read: true}, {}}, credits: 2, forge: true}
	// The search with forged replies takes longest. "make test" runs it, and "make check" runs the
	// others, without the race detector.
	switch {
	case kit.Race:
		models = []model{forge}
	case !testing.Short():
		models = append(models, forge)
	}
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			if m.maxMR == 0 {
				m.maxMR = 100
			}
			m.seen, m.variants, m.outcomes = make(map[string]bool), make(map[string]bool), make(map[string]int)
			m.search(t)
			if t.Failed() {
				return
			}
			t.Logf("%d states, %d runs, %d of them to the end, longest run %d events, %d paths were not repeated",
				len(m.seen), m.runs, m.ends, m.longest, m.rare)
			if m.ends == 0 || m.outcomes["nil nil"] == 0 || m.outcomes["interrupted interrupted"] == 0 {
				t.Errorf("outcomes of the calls: %v; want that both succeed, and that both are interrupted", m.outcomes)
			}
		})
	}
}

// A shape says which data a call moves by RDMA. Each needs one MR.
type shape struct{ read, write bool }

// A model is one search.
type model struct {
	name      string
	calls     [2]shape
	credits   uint32 // that each reply grants
	remoteInv bool
	withdraw  bool // the device takes back calls that are not executed
	yield     bool // each post first lets the other goroutines run
	forge     bool // the server once sends a reply that answers no call
	maxMR     int

	todo             [][]step
	variants         map[string]bool // states that were reached by a repeated path with another outcome
	seen             map[string]bool // states
	outcomes         map[string]int
	runs, ends, rare int
	longest          int
}

// An event is one step of the device or of a caller.
type event struct {
	kind string // see modelRun.enabled
	n    int    // number of the call
}

func (e event) String() string { return fmt.Sprintf("%s%d", e.kind, e.n) }

// A step is an event and the state after it. The state is empty before the first run.
type step struct {
	event
	state string
}

// search explores all states. An event may wake both callers, and the scheduler then decides their
// order. If it decides otherwise than before, the run adds another path, and search repeats the
// first path up to 20 times. search ends a path that no repetition follows.
func (m *model) search(t *testing.T) {
	m.todo = [][]step{nil}
	for len(m.todo) > 0 && !t.Failed() {
		path := m.todo[len(m.todo)-1]
		m.todo = m.todo[:len(m.todo)-1]
		n := 0
		for !m.run(t, path) && n < 20 && !t.Failed() {
			n++
		}
		if n == 20 {
			m.rare++
		}
	}
}

// run runs the events of path and adds the paths that follow. It reports false if an event led to
// another state than before.
func (m *model) run(t *testing.T, path []step) (same bool) {
	m.runs++
	m.longest = max(m.longest, len(path))
	synctest.Test(t, func(t *testing.T) {
		r := m.start(t)
		defer r.close()
		for i := range path {
			r.do(path[i].event)
			r.check()
			state := r.state()
			if t.Failed() {
				t.Logf("events: %v", path[:i+1])
				return
			}
			if path[i].state == "" {
				path[i].state = state
			}
			if path[i].state != state {
				if !m.variants[state] {
					m.variants[state] = true
					m.todo = append(m.todo, append(slices.Clip(path[:i]), step{path[i].event, state}))
				}
				return
			}
		}
		same = true
		state := r.state()
		if m.seen[state] {
			return
		}
		m.seen[state] = true
		next := r.enabled()
		if !slices.ContainsFunc(next, event.mustHappen) {
			r.checkEnd()
		}
		for _, e := range next {
			m.todo = append(m.todo, append(slices.Clip(path), step{event: e}))
		}
		if t.Failed() {
			t.Logf("events: %v", path)
		}
	})
	return same
}

// A modelRun is one run of a model.
type modelRun struct {
	*model
	t       *testing.T
	tr      *Transport
	dev     *stepDevice
	callers [2]*modelCall
	lost    bool // the connection was lost, which happens once
	forged  bool // the server sent a reply that answers no call, which happens once
}

type modelCall struct {
	msg         sunrpc.Message
	cancel      context.CancelFunc
	interrupted bool
	returned    bool
	err         error
	slot        *slot
}

func (m *model) start(t *testing.T) *modelRun {
	r := &modelRun{model: m, t: t, dev: &stepDevice{remoteInv: m.remoteInv, maxMR: m.maxMR, yield: m.yield,
		withdraw: m.withdraw,
		granted:  make(chan struct{}, 1), mrs: make(map[uint32]*stepMR)}}
	// The short ReconnectMin makes the pause before a reconnect 0: time stands still in a run.
	tr, err := New(Config{Provider: r.dev, Addr: netip.MustParseAddrPort("192.0.2.1:20049"), Slots: MinSlots,
		KeepAlive: -1, IdleTimeout: -1, Timeout: 24 * time.Hour, ReconnectMin: 1})
	if err != nil {
		t.Fatal(err)
	}
	r.tr = tr
	r.dev.granted <- struct{}{}
	if err := tr.Connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The reply to a first call grants the credits.
	first := &modelCall{msg: sunrpc.Message{Prog: echoProg, Vers: 1, Cred: sunrpc.AppendAuthNone(nil)}}
	r.launch(first)
	r.reply(first)
	synctest.Wait()
	for r.qp().complete() {
		synctest.Wait()
	}
	if !first.returned || first.err != nil {
		t.Fatalf("first call: returned %v, error %v", first.returned, first.err)
	}
	for i, s := range m.calls {
		c := &modelCall{msg: sunrpc.Message{Prog: echoProg, Vers: 1, Proc: uint32(i), Cred: sunrpc.AppendAuthNone(nil)}}
		if s.read {
			c.msg.ResultData = make([]byte, 8192)
		}
		if s.write {
			c.msg.ArgData = bytes.Repeat([]byte{byte(i)}, 8192)
		}
		r.callers[i] = c
		r.launch(c)
	}
	return r
}

// launch starts a call on a goroutine and waits until it blocks.
func (r *modelRun) launch(c *modelCall) {
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	go func() {
		c.err = r.tr.Call(ctx, &c.msg)
		c.returned = true
	}()
	synctest.Wait()
	for _, s := range r.tr.slots {
		if s.msg == &c.msg {
			c.slot = s
		}
	}
	if c.slot == nil {
		r.t.Fatal("the call has no slot")
	}
}

// qp returns the newest queue pair.
func (r *modelRun) qp() *stepQP { return r.dev.qps[len(r.dev.qps)-1] }

// Kinds of events.
const (
	evComplete  = "complete"       // the next completion of the send queue
	evReply     = "reply"          // the server answers call n
	evAgain     = "reply-again"    // the server answers call n early, or a second time
	evOldReply  = "old-reply"      // the server answers an earlier call in the slot of call n
	evInterrupt = "interrupt"      // the caller of call n gives up
	evFail      = "fail"           // the connection is lost; requests that were not executed are flushed
	evFailLate  = "fail-executed"  // the same, after all requests were executed
	evFlushRecv = "flush-receives" // the Receives are flushed
	evReport    = "report"         // the provider reports the loss
	evConnect   = "connect"        // the connection is made again
	evWait      = "wait"           // the pause of a call that found no memory passes
)

// mustHappen reports whether the event happens in the end, unless another event prevents it.
func (e event) mustHappen() bool {
	return e.kind != evInterrupt && e.kind != evFail && e.kind != evFailLate
}

// enabled returns the events that can happen now.
func (r *modelRun) enabled() (all []event) {
	q := r.qp()
	add := func(ok bool, kind string, n int) {
		if ok {
			all = append(all, event{kind, n})
		}
	}
	add(q.completes(), evComplete, 0)
	for i, c := range r.callers {
		add(r.canReply(c), evReply, i)
		add(r.forge && !r.forged && !r.awaits(c) && len(q.rq) > 0, evAgain, i)
		add(r.forge && !r.forged && len(q.rq) > 0, evOldReply, i)
		add(!c.returned && !c.interrupted, evInterrupt, i)
	}
	add(!r.lost, evFail, 0)
	add(!r.lost && q.executed < len(q.sq), evFailLate, 0)
	add(q.err && !q.flushed, evFlushRecv, 0)
	add(q.err && !q.reported, evReport, 0)
	add(r.dev.dialing, evConnect, 0)
	add(r.pauses() && !slices.ContainsFunc(all, event.mustHappen), evWait, 0)
	return all
}

// pauses reports whether a call waits for memory.
func (r *modelRun) pauses() bool {
	for _, c := range r.callers {
		c.slot.mu.Lock()
		noRoom := c.slot.stalled != 0
		c.slot.mu.Unlock()
		if noRoom && !c.returned {
			return true
		}
	}
	return false
}

func (r *modelRun) do(e event) {
	q, c := r.qp(), r.callers[e.n]
	switch e.kind {
	case evComplete:
		q.complete()
	case evReply:
		r.reply(c)
	case evAgain:
		r.forged = true
		q.receive(r.answer(&rpcrdma.Header{XID: c.msg.XID}), 0)
	case evOldReply:
		r.forged = true
		q.receive(r.answer(&rpcrdma.Header{XID: c.msg.XID - r.tr.xidStep}), 0)
	case evInterrupt:
		c.interrupted = true
		c.cancel()
	case evFail, evFailLate:
		r.lost = true
		q.fail(e.kind == evFailLate)
	case evFlushRecv:
		q.flushReceives()
	case evReport:
		q.report()
	case evConnect:
		r.dev.granted <- struct{}{}
	case evWait:
		time.Sleep(marshalRetryMax)
	}
	synctest.Wait()
}

// canReply reports whether the server can answer c: it has the call, or can receive it.
func (r *modelRun) canReply(c *modelCall) bool {
	q := r.qp()
	if len(q.rq) == 0 {
		return false
	}
	if q.sent[c.msg.XID] != nil {
		return true
	}
	return !q.err && r.sendOf(c) >= q.executed
}

// awaits reports whether the transport waits for a reply to c on the current connection.
func (r *modelRun) awaits(c *modelCall) bool {
	c.slot.mu.Lock()
	defer c.slot.mu.Unlock()
	return c.slot.state == slotSent && c.slot.conn == r.tr.conn.Load() ||
		c.slot.state == slotAbandoned && !c.slot.lateDone
}

// sendOf returns the position in the send queue of the Send of c, or -1.
func (r *modelRun) sendOf(c *modelCall) int {
	return slices.IndexFunc(r.qp().sq, func(wr stepRequest) bool {
		return wr.Opcode == verbs.OpSend && !wr.withdrawn && binary.BigEndian.Uint32(wr.SGList[0].Buf) == c.msg.XID
	})
}

// reply makes the server execute c: it writes its data, and answers.
func (r *modelRun) reply(c *modelCall) {
	q := r.qp()
	if q.sent[c.msg.XID] == nil {
		q.execute(r.sendOf(c) + 1)
	}
	call := q.sent[c.msg.XID]
	if call == nil {
		r.t.Errorf("the Send of RPC %#x changed before it completed", c.msg.XID)
		return
	}
	delete(q.sent, c.msg.XID)
	inv := r.dev.write(call)
	q.receive(r.answer(call), inv)
}

// answer returns an accepted reply to call, without results (RFC 5531 §9).
func (r *modelRun) answer(call *rpcrdma.Header) []byte {
	h := rpcrdma.Header{XID: call.XID, Vers: rpcrdma.Version, Credits: r.credits, Proc: rpcrdma.ProcMsg,
		Writes: call.Writes}
	msg := h.Append(nil)
	for _, word := range []uint32{call.XID, sunrpc.MsgReply, 0, 0, 0, 0} {
		msg = binary.BigEndian.AppendUint32(msg, word)
	}
	return msg
}

// check checks what must hold in every state.
func (r *modelRun) check() {
	for _, f := range r.dev.faults {
		r.t.Error(f)
	}
	for i, c := range r.callers {
		if !c.returned {
			continue
		}
		for _, mr := range r.dev.mrs {
			for _, buf := range [][]byte{c.msg.ArgData, c.msg.ResultData} {
				if len(buf) > 0 && mr.reaches(buf) {
					r.t.Errorf("call %d has returned, and the server can reach its memory", i)
				}
			}
		}
		var interrupted *InterruptedError
		switch {
		case c.err == nil:
			if len(c.msg.ResultData) > 0 && (c.msg.ResultDataLen != len(c.msg.ResultData) ||
				!bytes.Equal(c.msg.ResultData, bytes.Repeat(binary.BigEndian.AppendUint32(nil, c.msg.XID),
					len(c.msg.ResultData)/4))) {
				r.t.Errorf("call %d: the data is not that of the server", i)
			}
		case !errors.As(c.err, &interrupted) || !c.interrupted:
			r.t.Errorf("call %d: interrupted %v, got error %v", i, c.interrupted, c.err)
		}
	}
	r.checkCounters()
}

func (r *modelRun) checkCounters() {
	w := &r.tr.window
	w.mu.Lock()
	defer w.mu.Unlock()
	held := 0
	for _, s := range r.tr.slots {
		if s.credit.held && s.credit.gen == w.gen {
			held++
		}
	}
	if held != w.inFlight {
		r.t.Errorf("%d slots hold a credit, the window counts %d", held, w.inFlight)
	}
	if cn := r.tr.conn.Load(); cn != nil {
		q := r.qp()
		used, n := cn.sq.taken.Load()-cn.sq.retired.Load(), int64(len(q.sq))
		if used < n || used > int64(q.attr.MaxSendWR) {
			r.t.Errorf("%d requests in a send queue of %d, %d places taken", n, q.attr.MaxSendWR, used)
		}
	}
}

// checkEnd checks a state in which nothing is left that must happen.
func (r *modelRun) checkEnd() {
	r.ends++
	var outcome []string
	for i, c := range r.callers {
		if !c.returned {
			r.t.Errorf("call %d never returns; it is in state %d; the device has %v", i, c.slot.state, r.qp())
		}
		if c.err == nil {
			outcome = append(outcome, "nil")
		} else {
			outcome = append(outcome, "interrupted")
		}
	}
	r.outcomes[strings.Join(outcome, " ")]++
	if cn := r.tr.conn.Load(); cn != nil {
		// Only unsignaled Sends may be in the queue.
		taken, posted, retired := cn.sq.taken.Load(), cn.sq.posted.Load(), cn.sq.retired.Load()
		if n := int64(len(r.qp().sq)); taken != posted || posted-retired != n {
			r.t.Errorf("%d requests in the send queue; %d places taken, %d requests posted, %d retired", n, taken,
				posted, retired)
		}
	}
	if free, n := len(r.tr.free.idle), len(r.tr.slots)-1; free != n {
		r.t.Errorf("%d of %d slots are free", free, n)
	}
	for _, mr := range r.dev.mrs {
		if mr.valid {
			r.t.Errorf("the key of MR %d is valid", mr.index)
		}
	}
	if err := r.tr.adapter.pool.Check(); err != nil {
		r.t.Error(err)
	}
}

// close closes the transport in its current state, and checks that nothing is left.
func (r *modelRun) close() {
	r.tr.Close()
	synctest.Wait()
	for i, c := range r.callers {
		if c.cancel(); !c.returned {
			r.t.Errorf("call %d does not return after Close", i)
		}
	}
	if n := len(r.dev.mrs); n > 0 {
		r.t.Errorf("%d MRs are left after Close", n)
	}
	for _, f := range r.dev.faults {
		r.t.Error(f)
	}
}

// state returns all that decides what can happen next.
func (r *modelRun) state() string {
	var b strings.Builder
	fmt.Fprint(&b, len(r.dev.qps), r.lost, r.forged, r.dev.dialing, r.qp())
	for _, c := range r.callers {
		s := c.slot
		s.mu.Lock()
		fmt.Fprint(&b, "|", c.interrupted, c.returned, c.err == nil, r.sendOf(c), r.qp().sent[c.msg.XID] != nil)
		fmt.Fprint(&b, s.state, s.sqTaken, s.err != nil, s.stalled, s.sendBusy, s.fenced, s.callerReturned, s.withdrawn,
			s.lateDone, s.conn != nil && s.conn == r.tr.conn.Load(), s.longLen, s.sends, s.xid == c.msg.XID)
		s.mu.Unlock()
		r.tr.window.mu.Lock()
		fmt.Fprint(&b, s.credit.held && s.credit.gen == r.tr.window.gen, s.credit.queued)
		r.tr.window.mu.Unlock()
		for _, mr := range s.mrs.Registered() {
			fmt.Fprint(&b, mr.State())
		}
		for _, buf := range [][]byte{c.msg.ArgData, c.msg.ResultData} {
			reached := false
			for _, mr := range r.dev.mrs {
				reached = reached || len(buf) > 0 && mr.reaches(buf)
			}
			fmt.Fprint(&b, reached)
		}
	}
	w := &r.tr.window
	w.mu.Lock()
	fmt.Fprint(&b, "|", w.limit, w.inFlight, w.queue.Len(), w.queue.First() == &r.callers[0].slot.credit.turn)
	w.mu.Unlock()
	if cn := r.tr.conn.Load(); cn != nil {
		fmt.Fprint(&b, "|", cn.sq.taken.Load()-cn.sq.posted.Load(), cn.sq.posted.Load()-cn.sq.retired.Load(),
			cn.sq.unsignaled.Load(), isClosed(cn.ended))
	}
	fmt.Fprint(&b, "|", len(r.dev.mrs))
	return b.String()
}
