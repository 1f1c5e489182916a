package faults_test

import (
	"errors"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestAllocFailReturnsENOMEM(t *testing.T) {
	p := withFaults(t, "seed=1,alloc-fail=2")
	c, _ := connectClient(t, p)
	for i := range 6 {
		m, err := c.PD.AllocMR(1)
		if i%2 == 1 {
			wantInjected(t, err, "alloc-fail", uint64(i+1), syscall.ENOMEM)
			if m != nil || !errors.Is(err, verbs.ErrNoResources) {
				t.Errorf("AllocMR: got %v, %v, want nil and ErrNoResources", m, err)
			}
			continue
		}
		kit.Must(t, err)
		if err := m.Dereg(); err != nil {
			t.Error(err)
		}
	}
	wantCounts(t, p, faults.Count{Name: "alloc-fail", Injected: 3})
}

// TestDeregFailKeepsMR checks that an MR stays usable by the peer after its Dereg failed, and that
// Dereg can be retried. TestEachRequestCompletesOnce leaves such MRs to their domain.
func TestDeregFailKeepsMR(t *testing.T) {
	p := withFaults(t, "seed=1,dereg-fail=2")
	c, s := connectClient(t, p)
	mem, src := c.Buffer(8), s.Buffer(8)
	copy(src.Buf, "overdue!")
	m1, err1 := c.PD.AllocMR(1)
	m2, err2 := c.PD.AllocMR(1)
	kit.Must(t, errors.Join(err1, err2))
	c.post(c.wr("reg", &verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: m2, NewKey: 9,
		Access: verbs.AccessLocalWrite | verbs.AccessRemoteWrite,
		Segs:   [][]byte{mem.Buf[:8]}}))
	c.log.want("reg", verbs.StatusSuccess)
	if err := m1.Dereg(); err != nil {
		t.Error(err)
	}
	alive := selfcheck.Count(selfcheck.MR)
	wantInjected(t, m2.Dereg(), "dereg-fail", 2, syscall.EBUSY)
	if n := selfcheck.Count(selfcheck.MR); n != alive {
		t.Errorf("MRs after the failed Dereg: got %d, want %d", n, alive)
	}
	c.recv("in", c.Buffer(8))
	s.post(s.wr("write", &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: m2.RKey().WithKey(9),
		SGList: []verbs.SGE{{Buf: src.Buf[:8], LKey: src.LKey}}}),
		s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend}))
	c.log.want("in", verbs.StatusSuccess)
	if string(mem.Buf[:8]) != "overdue!" {
		t.Errorf("memory of the MR: got %q, want the peer's Write", mem.Buf[:8])
	}
	if err := m2.Dereg(); err != nil { // the domain does not deregister it again
		t.Errorf("second Dereg: %v", err)
	}
	wantCounts(t, p, faults.Count{Name: "dereg-fail", Injected: 1})
}

func TestConnectFailIsUnreachable(t *testing.T) {
	p := withFaults(t, "seed=1,connect-fail=2")
	connectClient(t, p)
	l, err := softiwarp.New(softiwarp.Config{}).Listen(verbstest.Context(t), loopback)
	kit.Must(t, err)
	defer l.Close()
	id, err := p.Resolve(verbstest.Context(t), l.Addr())
	kit.Must(t, err)
	verbstest.NewEndpoint(t, id)
	err = id.Connect(verbstest.Context(t), verbs.ConnParam{})
	var ce *verbs.ConnError
	if !errors.As(err, &ce) || ce.Kind != verbs.ConnUnreachable || ce.Addr != l.Addr().String() || ce.Phase == "" {
		t.Errorf("Connect: got %v, want unreachable", err)
	}
	wantInjected(t, err, "connect-fail", 2, syscall.ECONNREFUSED)
	if err := id.Connect(verbstest.Context(t), verbs.ConnParam{}); !errors.As(err, &ce) || ce.Kind != verbs.ConnLocal {
		t.Errorf("second Connect: got %v, want a local error", err)
	}
	connectClient(t, p)
	wantCounts(t, p, faults.Count{Name: "connect-fail", Injected: 1})
}
