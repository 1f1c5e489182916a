package softiwarp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// newMR returns an MR and a QP of its domain.
func newMR(t *testing.T) (*mr, *qp) {
	t.Helper()
	pd := &protectionDomain{dev: New(defaultConfig).(*provider).dev}
	m, err := pd.AllocMR(1)
	kit.Must(t, err)
	return m.(*mr), &qp{dev: pd.dev, pd: pd}
}

// TestMRStates checks which requests change the state of an MR.
func TestMRStates(t *testing.T) {
	m, q := newMR(t)
	sibling := &qp{dev: q.dev, pd: q.pd}
	foreign := &qp{dev: q.dev, pd: &protectionDomain{dev: q.dev}}
	const stag = 0x12345678
	register := func(q *qp, stag uint32) bool {
		return m.register(q, stag, verbs.AccessRemoteWrite, winIOVA, [][]byte{make([]byte, 8)})
	}
	for i, step := range []struct {
		name    string
		request func(q *qp, stag uint32) bool
		q       *qp
		stag    uint32
		want    bool
	}{
		{"LocalInv of a new MR", m.invalidateLocal, q, stag, true},
		{"remote invalidation of a new MR", m.invalidateRemote, q, stag, false},
		{"FastReg", register, q, stag, true},
		{"second FastReg", register, sibling, stag + 1, false},
		{"LocalInv on another stream", m.invalidateLocal, sibling, stag, false},
		{"LocalInv in another PD", m.invalidateLocal, foreign, stag, false},
		{"LocalInv of another key", m.invalidateLocal, q, stag + 1, false},
		{"LocalInv", m.invalidateLocal, q, stag, true},
		{"second LocalInv", m.invalidateLocal, q, stag, true},
		{"FastReg after LocalInv", register, q, stag, true},
		{"remote invalidation on another stream", m.invalidateRemote, sibling, stag, false},
		{"remote invalidation in another PD", m.invalidateRemote, foreign, stag, false},
		{"remote invalidation of another key", m.invalidateRemote, q, stag + 1, false},
		{"remote invalidation", m.invalidateRemote, q, stag, true},
		{"second remote invalidation", m.invalidateRemote, q, stag, false},
		{"FastReg after remote invalidation", register, q, stag, true},
		{"Dereg", func(*qp, uint32) bool { return m.Dereg() == nil }, q, stag, true},
		{"second Dereg", func(*qp, uint32) bool { return m.Dereg() == nil }, q, stag, false},
		{"LocalInv after Dereg", m.invalidateLocal, q, stag, false},
		{"remote invalidation after Dereg", m.invalidateRemote, q, stag, false},
		{"FastReg after Dereg", register, q, stag, false},
	} {
		if got := step.request(step.q, step.stag); got != step.want {
			t.Fatalf("step %d, %s: got %v, want %v", i, step.name, got, step.want)
		}
	}
	if q.dev.table.lookup(uint32(m.first)) != nil {
		t.Error("the STag table has an MR after its Dereg")
	}
}

// TestSTagsAreUnique fills a table up to its limit. No MR may replace another one.
func TestSTagsAreUnique(t *testing.T) {
	const inserted = 400 // of which about 25 first draw the index of another MR
	var table stagTable
	table.mu.mrs = make(map[uint32]*mr, maxMR)
	for i := range uint32(maxMR - inserted) {
		table.mu.mrs[1+i] = nil
	}
	for i := range inserted {
		m := &mr{}
		if err := table.insert(m); err != nil || len(table.mu.mrs) != maxMR-inserted+i+1 ||
			table.lookup(uint32(m.first)) != m {
			t.Fatalf("MR %d with STag %#x: got %d MRs, error %v; want one more", i, m.first, len(table.mu.mrs), err)
		}
	}
	m := &mr{}
	if err := table.insert(m); !errors.Is(err, verbs.ErrNoResources) || m.first != 0 {
		t.Errorf("MR %d: got STag %#x, error %v; want %v", maxMR, m.first, err, verbs.ErrNoResources)
	}
}

// TestBufferedWriteIsRevoked registers an MR for other memory between the check of an RDMA Write
// and the copy of its data, which has arrived already.
func TestBufferedWriteIsRevoked(t *testing.T) {
	m, q := newMR(t)
	stag := uint32(m.first)
	for _, next := range []string{"invalid", "registered again", "deregistered"} {
		mem, other := make([]byte, 8), make([]byte, 8)
		m.register(q, stag, verbs.AccessRemoteWrite, winIOVA, [][]byte{mem})
		g, deny := q.access(stag, winIOVA, 8, verbs.AccessRemoteWrite)
		if deny != granted {
			t.Fatalf("access: got denial %d", deny)
		}
		switch next {
		case "deregistered":
			if err := m.Dereg(); err != nil {
				t.Error(err)
			}
		default:
			m.invalidateRemote(q, stag)
		}
		if next == "registered again" {
			m.register(q, stag, verbs.AccessRemoteWrite, winIOVA, [][]byte{other})
		}
		in := intake{buf: filler(8), w: 8}
		if err := in.place(sink{src: g, n: 8}); err != errRevoked {
			t.Errorf("%s: got %v, want %v", next, err, errRevoked)
		}
		if clean := make([]byte, 8); !bytes.Equal(mem, clean) || !bytes.Equal(other, clean) {
			t.Errorf("%s: memory was written", next)
		}
		m.invalidateLocal(q, stag)
	}
}

// TestReceiveFollowsInvalidation checks that an STag is invalid when the Receive of its Send With
// Invalidate completes (RFC 5040 §5.3).
func TestReceiveFollowsInvalidation(t *testing.T) {
	p, v := connectRaw(t, defaultConfig)
	denials := make(chan denial, 1)
	v.qp.rq.Lock()
	v.qp.rq.At(v.qp.rq.Head).done = func(*verbs.WorkCompletion) {
		_, deny := v.qp.access(v.wkey, winIOVA, 8, verbs.AccessRemoteWrite)
		denials <- deny
	}
	v.qp.rq.Unlock()
	p.send(sendInv(opSendInv, wkey)(v))
	if deny := <-denials; deny != denyInvalid {
		t.Errorf("access in the completion handler: got denial %d, want %d", deny, denyInvalid)
	}
}
