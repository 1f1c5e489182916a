package faults_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// An attackTest has a client with registered memory inside a larger buffer, and a server with
// faults.
type attackTest struct {
	c, s *side
	p    *faults.Provider
	mem  []byte // the whole buffer
	key  verbs.RKey
}

const (
	memSize = 3 * 4096
	regFrom = 4096
	regLen  = 4096
	regIOVA = 0x70000
)

func newAttackTest(t *testing.T, spec string, access verbs.Access) *attackTest {
	t.Helper()
	a := &attackTest{p: withFaults(t, spec)}
	a.c, a.s = connect(t, softiwarp.New(softiwarp.Config{}), a.p)
	a.mem = a.c.Buffer(memSize).Buf
	mr := a.c.MR(4)
	a.key = mr.RKey().WithKey(0x40)
	a.s.recv("call", a.s.Buffer(16))
	a.c.recv("reply", a.c.Buffer(16))
	a.c.post(
		a.c.wr("reg", &verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: mr, NewKey: 0x40, Access: access, IOVA: regIOVA,
			Segs: [][]byte{a.mem[regFrom:][:regLen]}}),
		a.c.wr("call", &verbs.WorkRequest{Opcode: verbs.OpSend}))
	a.c.log.want("reg", verbs.StatusSuccess)
	a.c.log.want("call", verbs.StatusSuccess)
	a.s.log.want("call", verbs.StatusSuccess)
	return a
}

// reply posts two Writes of data and a Send, which invalidates the key if fenced is true.
func (a *attackTest) reply(data string, fenced bool) {
	b := a.s.Buffer(64)
	n := copy(b.Buf, data)
	half := n / 2
	send := &verbs.WorkRequest{Opcode: verbs.OpSend}
	if fenced {
		send = &verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: a.key}
	}
	a.s.post(
		a.s.wr("write", &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: a.key, RemoteAddr: regIOVA,
			SGList: []verbs.SGE{{Buf: b.Buf[:half], LKey: b.LKey}}}),
		a.s.wr("write", &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: a.key, RemoteAddr: regIOVA + uint64(half),
			SGList: []verbs.SGE{{Buf: b.Buf[half:n], LKey: b.LKey}}}),
		a.s.wr("send", send))
}

// wantRefused checks that the client refused one access and ended the connection. All of its memory
// except data must be zero.
func (a *attackTest) wantRefused(t *testing.T, data string) {
	t.Helper()
	cause := a.c.WaitDisconnect()
	var te *verbs.TerminateError
	if !errors.As(cause, &te) || !te.Local {
		t.Errorf("disconnect cause: got %v, want a Terminate by the client", cause)
	}
	a.s.WaitDisconnect()
	if got := a.c.QP.Stats().RemoteAccessErrors; got != 1 {
		t.Errorf("refused accesses: got %d, want 1", got)
	}
	want := make([]byte, memSize)
	copy(want[regFrom:], data)
	if !bytes.Equal(a.mem, want) {
		t.Error("memory outside of the reply was written")
	}
	a.s.QP.Drain()
	if st := a.s.QP.Stats(); st.SendCompletions > st.PostedSendWRs {
		t.Errorf("stats: got more completions than posts: %+v", st)
	}
}

func TestLateWriteIsRefused(t *testing.T) {
	const data = "sixteen bytes..."
	a := newAttackTest(t, "seed=1,late-write=1:1ms", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply(data, true)
	a.c.log.want("reply", verbs.StatusSuccess)
	a.wantRefused(t, data)
	if st := a.s.QP.Stats(); st.PostedSendWRs != 3 || st.PostedChains != 1 || st.SendCompletions != 3 {
		t.Errorf("stats contain the attack: %+v", st)
	}
	wantCounts(t, a.p, faults.Count{Name: "late-write", Injected: 1})
}

func TestLateReadIsRefused(t *testing.T) {
	a := newAttackTest(t, "seed=1,late-read=1:1ms", verbs.AccessRemoteRead)
	b := a.s.Buffer(8)
	a.s.post(a.s.wr("read", &verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: a.key, RemoteAddr: regIOVA,
		SGList: []verbs.SGE{{Buf: b.Buf[:8], LKey: b.LKey}}}))
	a.s.log.want("read", verbs.StatusSuccess)
	a.s.post(a.s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: a.key}))
	a.c.log.want("reply", verbs.StatusSuccess)
	a.wantRefused(t, "")
	wantCounts(t, a.p, faults.Count{Name: "late-read", Injected: 1})
}

// TestLateReadNeedsEarlierRead checks that neither late-read nor late-write fires without an RDMA
// Read or Write.
func TestLateReadNeedsEarlierRead(t *testing.T) {
	a := newAttackTest(t, "seed=1,late-read=1:1ms,late-write=1:1ms", verbs.AccessRemoteRead)
	a.s.post(a.s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend}))
	a.c.log.want("reply", verbs.StatusSuccess)
	a.s.QP.Drain()
	wantCounts(t, a.p, faults.Count{Name: "late-write", Injected: 0}, faults.Count{Name: "late-read", Injected: 0})
}

func TestStaleKeyIsRefused(t *testing.T) {
	const data = "sixteen bytes..."
	a := newAttackTest(t, "seed=1,stale-key=1", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply(data, false)
	a.c.log.want("reply", verbs.StatusSuccess)
	a.wantRefused(t, data)
	wantCounts(t, a.p, faults.Count{Name: "stale-key", Injected: 1})
}

func TestWildWriteIsRefused(t *testing.T) {
	const data = "sixteen bytes..."
	for seed := range 6 {
		a := newAttackTest(t, fmt.Sprintf("seed=%d,wild-write=1", seed), verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
		a.reply(data, false)
		a.c.log.want("reply", verbs.StatusSuccess)
		a.wantRefused(t, data)
		wantCounts(t, a.p, faults.Count{Name: "wild-write", Injected: 1})
	}
}

// TestDrainCancelsAttacks checks that Drain does not wait for an attack with a delay of one hour.
// The attack is not counted.
func TestDrainCancelsAttacks(t *testing.T) {
	a := newAttackTest(t, "seed=1,late-write=1:1h", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply("sixteen bytes...", false)
	a.c.log.want("reply", verbs.StatusSuccess)
	a.s.QP.Drain()
	wantCounts(t, a.p, faults.Count{Name: "late-write", Injected: 0})
}
