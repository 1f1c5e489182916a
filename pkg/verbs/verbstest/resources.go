package verbstest

import (
	"errors"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var resourceTests = []conformanceTest{
	{"Attrs", 0, testAttrs},
	{"BusyResources", 0, testBusyResources},
	{"CQDepth", 0, testCQDepth},
	{"QPErrors", 0, testQPErrors},
	{"STags", verbs.CapFastReg, testSTags},
}

func testAttrs(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	a := p.active.Dev.Attrs()
	if a.Name == "" || a.PageSize <= 0 || a.MaxQPWR <= 0 || a.MaxCQE <= 0 || a.MaxSendSGE <= 0 || a.MaxRecvSGE <= 0 ||
		a.MaxSGERd <= 0 {
		t.Errorf("attributes: limits are missing: %+v", a)
	}
	if a.Caps.Has(verbs.CapFastReg) && (a.MaxFastRegPageListLen <= 0 || a.MaxMR <= 0) {
		t.Errorf("attributes: limits of fast registration are missing: %+v", a)
	}
}

func testBusyResources(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	failsWith(t, "deallocate a PD with a QP", p.active.PD.Dealloc(), verbs.ErrBusy)
	failsWith(t, "close a CQ with a QP", p.active.CQ.Close(), verbs.ErrBusy)
	pd := mustPD(t, p.active.Dev)
	m, err := pd.RegMR(make([]byte, 8))
	if p.active.Dev.Attrs().Caps.Has(verbs.CapRegisterAny) {
		kit.Must(t, err)
		failsWith(t, "deallocate a PD with an MR", pd.Dealloc(), verbs.ErrBusy)
		kit.Must(t, m.Dereg())
	}
}

// testCQDepth checks that CreateQP refuses a CQ that could overflow.
func testCQDepth(t *testing.T, s *suite) {
	id := s.unconnected(t)
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 10)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 6, MaxRecvWR: 5}
	if _, err := id.CreateQP(pd, attr); !errors.Is(err, verbs.ErrNoResources) {
		t.Fatalf("QP with 11 requests on a CQ of 10: got %v, want ErrNoResources", err)
	}
	attr.MaxRecvWR = 4
	if _, err := id.CreateQP(pd, attr); err != nil { // the failed call must not hold entries
		t.Fatal(err)
	}
	id.Close()
	succeeds(t, "close the CQ after its QP", cq.Close())
}

func testQPErrors(t *testing.T, s *suite) {
	id := s.unconnected(t)
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 100)
	maxWR := id.Device().Attrs().MaxQPWR
	for name, attr := range map[string]verbs.QPInitAttr{
		"no CQ":                {MaxSendWR: 1, MaxRecvWR: 1},
		"no send queue":        {SendCQ: cq, RecvCQ: cq, MaxRecvWR: 1},
		"no receive queue":     {SendCQ: cq, RecvCQ: cq, MaxSendWR: 1},
		"send queue too large": {SendCQ: cq, RecvCQ: cq, MaxSendWR: maxWR + 1, MaxRecvWR: 1},
		"too many SGEs":        {SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1 << 20},
	} {
		if _, err := id.CreateQP(pd, attr); !errors.Is(err, verbs.ErrInvalid) {
			t.Errorf("create QP with %s: got %v, want ErrInvalid", name, err)
		}
	}
	_, err := id.Device().CreateCQ(0)
	fails(t, "CreateCQ with depth 0", err)
}

// testSTags checks that STag indices are unique and not 0. On iWARP, where a peer could guess them,
// they must not be sequential.
func testSTags(t *testing.T, s *suite) {
	const n = 500
	p := s.pair(t, options{noConnect: true})
	a := p.active.Dev.Attrs()
	if a.Caps.Has(verbs.CapPerIOReg) {
		t.Skip("the device has a key per registration, not per MR")
	}
	seen := make(map[verbs.RKey]bool)
	inSequence := 0
	var last verbs.RKey
	for range n {
		m := p.active.MR(1)
		index := m.RKey() >> 8
		if index == 0 || seen[index] {
			t.Fatalf("STag index %#x is 0 or was used before", index)
		}
		seen[index] = true
		if index-last == 1 {
			inSequence++
		}
		last = index
	}
	if a.Transport == verbs.TransportIWARP && inSequence > n/50 {
		t.Errorf("sequential STag indices: got %d of %d, want at most 2%%", inSequence, n)
	}
}
