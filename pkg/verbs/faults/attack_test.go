package faults_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// attacked is a client with registered memory in the middle of other memory, and a server with
// faults.
type attacked struct {
	c, s *side
	p    *faults.Provider
	mem  []byte // all of it
	key  verbs.RKey
}

const (
	memSize = 3 * 4096
	regFrom = 4096
	regLen  = 4096
	regIOVA = 0x70000
)

func attack(t *testing.T, spec string, access verbs.Access) *attacked {
	t.Helper()
	a := &attacked{p: broken(t, spec)}
	a.c, a.s = connect(t, softiwarp.New(softiwarp.Config{}), a.p)
	a.mem = a.c.buffer(memSize).Buf
	mr := a.c.mr()
	a.key = mr.RKey().WithKey(0x40)
	a.s.recv("call", a.s.buffer(16))
	a.c.recv("reply", a.c.buffer(16))
	a.c.post(a.c.wr("reg", &verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: mr, NewKey: 0x40, Access: access,
		IOVA: regIOVA,
		Segs: [][]byte{a.mem[regFrom:][:regLen]}}), a.c.wr("call", &verbs.WorkRequest{Opcode: verbs.OpSend}))
	a.c.log.want("reg", verbs.StatusSuccess)
	a.c.log.want("call", verbs.StatusSuccess)
	a.s.log.want("call", verbs.StatusSuccess)
	return a
}

// reply writes data in two Writes and sends, with an invalidation if fenced.
func (a *attacked) reply(data string, fenced bool) {
	b := a.s.buffer(64)
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

// refused asserts that the client ended the connection over one access, and that all of its memory
// but data is clean.
func (a *attacked) refused(t *testing.T, data string) {
	t.Helper()
	cause := a.c.wantGone()
	var te *verbs.TerminateError
	if !errors.As(cause, &te) || !te.Local {
		t.Errorf("cause %v, want a Terminate of the client's", cause)
	}
	a.s.wantGone()
	if got := a.c.qp.Stats().RemoteAccessErrors; got != 1 {
		t.Errorf("%d accesses were refused, want 1", got)
	}
	want := make([]byte, memSize)
	copy(want[regFrom:], data)
	if !bytes.Equal(a.mem, want) {
		t.Error("memory was written that must not be")
	}
	a.s.qp.Drain()
	if st := a.s.qp.Stats(); st.SendCompletions > st.PostedSendWRs {
		t.Errorf("stats do not add up: %+v", st)
	}
}

func TestLateWrite(t *testing.T) {
	const data = "sixteen octets.."
	a := attack(t, "seed=1,late-write=1:1ms", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply(data, true)
	a.c.log.want("reply", verbs.StatusSuccess)
	a.refused(t, data)
	if st := a.s.qp.Stats(); st.PostedSendWRs != 3 || st.PostedChains != 1 || st.SendCompletions != 3 {
		t.Errorf("the consumer's counters have the attack in them: %+v", st)
	}
	wantCounts(t, a.p, faults.Count{Name: "late-write", Injected: 1})
}

// TestLateWriteRepeats: a client that does not fence gets the same octets once more, at the same
// place.
func TestLateWriteRepeats(t *testing.T) {
	const data = "sixteen octets.."
	a := attack(t, "seed=1,late-write=2:1s", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply("----------------", false) // event 1 is not struck
	a.c.log.want("reply", verbs.StatusSuccess)
	a.c.recv("reply", a.c.buffer(16))
	a.reply(data, false)
	a.c.log.want("reply", verbs.StatusSuccess)
	clear(a.mem)
	for {
		if a.p.Counts()[0].Injected == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	a.c.recv("last", a.c.buffer(16))
	a.s.post(a.s.wr("last", &verbs.WorkRequest{Opcode: verbs.OpSend}))
	a.c.log.want("last", verbs.StatusSuccess)
	want := make([]byte, memSize)
	copy(want[regFrom+8:], data[8:])
	if !bytes.Equal(a.mem, want) {
		t.Errorf("memory is %q, want the second Write once more", a.mem[regFrom:][:16])
	}
	if len(a.c.gone) != 0 {
		t.Error("the connection ended")
	}
}

func TestLateRead(t *testing.T) {
	a := attack(t, "seed=1,late-read=1:1ms", verbs.AccessRemoteRead)
	b := a.s.buffer(8)
	a.s.post(a.s.wr("read", &verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: a.key, RemoteAddr: regIOVA,
		SGList: []verbs.SGE{{Buf: b.Buf[:8], LKey: b.LKey}}}))
	a.s.log.want("read", verbs.StatusSuccess)
	a.s.post(a.s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: a.key}))
	a.c.log.want("reply", verbs.StatusSuccess)
	a.refused(t, "")
	wantCounts(t, a.p, faults.Count{Name: "late-read", Injected: 1})
}

// TestLateReadOnce: a Read is repeated once, and nothing is without one.
func TestLateReadOnce(t *testing.T) {
	a := attack(t, "seed=1,late-read=1:1ms,late-write=1:1ms", verbs.AccessRemoteRead)
	a.s.post(a.s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend}))
	a.c.log.want("reply", verbs.StatusSuccess)
	a.s.qp.Drain()
	wantCounts(t, a.p, faults.Count{Name: "late-write", Injected: 0}, faults.Count{Name: "late-read", Injected: 0})
}

func TestStaleKey(t *testing.T) {
	const data = "sixteen octets.."
	a := attack(t, "seed=1,stale-key=1", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply(data, false)
	a.c.log.want("reply", verbs.StatusSuccess)
	a.refused(t, data)
	wantCounts(t, a.p, faults.Count{Name: "stale-key", Injected: 1})
}

func TestWildWrite(t *testing.T) {
	const data = "sixteen octets.."
	for seed := range 6 {
		a := attack(t, fmt.Sprintf("seed=%d,wild-write=1", seed), verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
		a.reply(data, false)
		a.c.log.want("reply", verbs.StatusSuccess)
		a.refused(t, data)
		wantCounts(t, a.p, faults.Count{Name: "wild-write", Injected: 1})
	}
}

// TestDrainDropsAttacks: an attack that is due in an hour keeps nobody waiting, and is not counted.
func TestDrainDropsAttacks(t *testing.T) {
	a := attack(t, "seed=1,late-write=1:1h", verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	a.reply("sixteen octets..", false)
	a.c.log.want("reply", verbs.StatusSuccess)
	a.s.qp.Drain()
	wantCounts(t, a.p, faults.Count{Name: "late-write", Injected: 0})
}
