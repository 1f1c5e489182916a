package base

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestUsesEndFailsWhileUsed(t *testing.T) {
	u := Uses{Provider: "test"}
	kit.Must(t, u.Take())
	if err := u.End(); !errors.Is(err, verbs.ErrBusy) {
		t.Errorf("End with one use: got %v, want ErrBusy", err)
	}
	u.Drop()
	if err := u.End(); err != nil {
		t.Errorf("End without uses: got %v, want nil", err)
	}
	if err := u.End(); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("second End: got %v, want ErrInvalid", err)
	}
	if err := u.Take(); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("Take after End: got %v, want ErrInvalid", err)
	}
}

func TestReserveTakesAllOrNothing(t *testing.T) {
	attr := verbs.QPInitAttr{MaxSendWR: 8, MaxRecvWR: 4}
	for _, c := range []struct {
		name       string
		send, recv *CQEntries
		want       error
	}{
		{"enough entries", NewCQEntries("test", 8, 0), NewCQEntries("test", 4, 0), nil},
		{"send queue too deep", NewCQEntries("test", 7, 0), NewCQEntries("test", 4, 0), verbs.ErrNoResources},
		{"receive queue too deep", NewCQEntries("test", 8, 0), NewCQEntries("test", 3, 0), verbs.ErrNoResources},
		{"closed", NewCQEntries("test", 8, 0), closedEntries(), verbs.ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			u := &Uses{Provider: "test"}
			r, err := Reserve(u, c.send, c.recv, attr)
			if !errors.Is(err, c.want) {
				t.Fatalf("Reserve: got %v, want %v", err, c.want)
			}
			if err == nil {
				if _, err := c.send.Close(); !errors.Is(err, verbs.ErrBusy) {
					t.Errorf("close a used completion queue: got %v, want ErrBusy", err)
				}
				r.Release()
			}
			if n := c.send.reserved + c.recv.reserved + c.send.queues + c.recv.queues; n != 0 {
				t.Errorf("reserved entries and queues: got %d, want 0", n)
			}
			if err := u.End(); err != nil {
				t.Errorf("End: got %v, want nil", err)
			}
		})
	}
}

func closedEntries() *CQEntries {
	c := NewCQEntries("test", 4, 0)
	c.Close()
	return c
}

func TestReserveLimitsWorkQueues(t *testing.T) {
	u, cq := &Uses{}, NewCQEntries("test", 100, 2)
	attr := verbs.QPInitAttr{MaxSendWR: 1, MaxRecvWR: 1}
	r, err := Reserve(u, cq, cq, attr)
	kit.Must(t, err)
	if _, err := Reserve(u, cq, cq, attr); !errors.Is(err, verbs.ErrNoResources) {
		t.Errorf("third work queue of two: got %v, want ErrNoResources", err)
	}
	r.Release()
	if first, err := cq.Close(); err != nil || !first {
		t.Errorf("Close: got %v, %v, want true, nil", first, err)
	}
	if first, err := cq.Close(); err != nil || first {
		t.Errorf("second Close: got %v, %v, want false, nil", first, err)
	}
}

func TestCheckQPAttr(t *testing.T) {
	limits := verbs.DeviceAttrs{MaxQPWR: 16, MaxSendSGE: 4}
	for _, c := range []struct {
		name string
		attr verbs.QPInitAttr
		ok   bool
	}{
		{"largest", verbs.QPInitAttr{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 4}, true},
		{"no SGE", verbs.QPInitAttr{MaxSendWR: 1, MaxRecvWR: 1}, true},
		{"no send queue", verbs.QPInitAttr{MaxRecvWR: 1}, false},
		{"no receive queue", verbs.QPInitAttr{MaxSendWR: 1}, false},
		{"send queue too deep", verbs.QPInitAttr{MaxSendWR: 17, MaxRecvWR: 1}, false},
		{"receive queue too deep", verbs.QPInitAttr{MaxSendWR: 1, MaxRecvWR: 17}, false},
		{"too many SGEs", verbs.QPInitAttr{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 5}, false},
		{"negative SGEs", verbs.QPInitAttr{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: -1}, false},
	} {
		err := CheckQPAttr("test", &c.attr, limits)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, verbs.ErrInvalid) {
			t.Errorf("%s: got %v, want success %v", c.name, err, c.ok)
		}
		if err == nil && c.attr.MaxSendSGE < 1 {
			t.Errorf("%s: MaxSendSGE: got %d, want at least 1", c.name, c.attr.MaxSendSGE)
		}
	}
}

func TestPostChecksSend(t *testing.T) {
	checks := PostChecks{Provider: "test", MaxSendSGE: 2, MaxMessage: 100}
	request := func(op verbs.Opcode, sges ...verbs.SGE) verbs.WorkRequest {
		return verbs.WorkRequest{Opcode: op, Done: func(*verbs.WorkCompletion) {}, SGList: sges}
	}
	sge := verbs.SGE{Buf: make([]byte, 50)}
	for _, c := range []struct {
		name string
		wr   verbs.WorkRequest
		ord  int
		want uint32
		ok   bool
	}{
		{"longest Send", request(verbs.OpSend, sge, sge), 0, 100, true},
		{"empty Write", request(verbs.OpRDMAWrite), 0, 0, true},
		{"Read", request(verbs.OpRDMARead, sge), 1, 50, true},
		{"LocalInv", request(verbs.OpLocalInv), 0, 0, true},
		{"FastReg", request(verbs.OpFastReg), 0, 0, true},
		{"no handler", verbs.WorkRequest{Opcode: verbs.OpLocalInv}, 0, 0, false},
		{"Read with depth 0", request(verbs.OpRDMARead, sge), 0, 0, false},
		{"Read with two SGEs", request(verbs.OpRDMARead, sge, sge), 1, 0, false},
		{"three SGEs", request(verbs.OpSend, make([]verbs.SGE, 3)...), 0, 0, false},
		{"too long", request(verbs.OpSend, verbs.SGE{Buf: make([]byte, 101)}), 0, 0, false},
		{"Recv", request(verbs.OpRecv), 0, 0, false},
	} {
		got, err := checks.Send(&c.wr, c.ord)
		if got != c.want || (err == nil) != c.ok || err != nil && !errors.Is(err, verbs.ErrInvalid) {
			t.Errorf("%s: got %d, %v, want %d, success %v", c.name, got, err, c.want, c.ok)
		}
	}
}

func TestPostChecksRecv(t *testing.T) {
	var checks PostChecks
	valid := verbs.RecvRequest{Done: func(*verbs.WorkCompletion) {}}
	for _, c := range []struct {
		name         string
		rr           verbs.RecvRequest
		closed, full bool
		want         error
	}{
		{"free slot", valid, false, false, nil},
		{"full queue", valid, false, true, verbs.ErrQueueFull},
		{"closed queue", valid, true, true, verbs.ErrQPState},
		{"no handler", verbs.RecvRequest{}, false, true, verbs.ErrInvalid},
	} {
		if err := checks.Recv(&c.rr, c.closed, c.full); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
}

func TestPostChecksDoNotAllocate(t *testing.T) {
	checks := PostChecks{Provider: "test", MaxSendSGE: 2, MaxMessage: 100}
	wr := verbs.WorkRequest{Opcode: verbs.OpSend, Done: func(*verbs.WorkCompletion) {}, SGList: make([]verbs.SGE, 2)}
	rr := verbs.RecvRequest{Done: wr.Done}
	if n := testing.AllocsPerRun(100, func() {
		if _, err := checks.Send(&wr, 0); err != nil {
			t.Fatal(err)
		}
		kit.Must(t, checks.Recv(&rr, false, false))
	}); n != 0 {
		t.Errorf("allocations per check: got %v, want 0", n)
	}
}

func TestRingSize(t *testing.T) {
	for n, want := range map[int]int{-1: 1, 0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 32768: 32768} {
		if got := ringSize(n); got != want {
			t.Errorf("ringSize(%d): got %d, want %d", n, got, want)
		}
	}
}

func TestRingPositionsWrap(t *testing.T) {
	r := NewRing[int](3)
	r.Head, r.Tail = 1<<32-2, 1<<32-2
	for i := range 3 {
		if r.Full() || r.Len() != i {
			t.Errorf("ring with %d entries: got full %v and length %d, want false and %d", i, r.Full(), r.Len(), i)
		}
		if pos := r.Push(i); *r.At(pos) != i {
			t.Errorf("entry at %d: got %d, want %d", pos, *r.At(pos), i)
		}
	}
	if !r.Full() {
		t.Error("ring of limit 3 with 3 entries: got full false, want true")
	}
	for want := range 3 {
		if got := *r.At(r.Head); got != want {
			t.Errorf("oldest entry: got %d, want %d", got, want)
		}
		r.Head++
	}
	if r.Len() != 0 || r.Full() {
		t.Errorf("empty ring: got length %d and full %v, want 0 and false", r.Len(), r.Full())
	}
	none := NewRing[int](0)
	if !none.Full() {
		t.Error("ring of limit 0: got full false, want true")
	}
}

func TestConnIDCreatesOneQP(t *testing.T) {
	type qp struct{ n int }
	c := NewConnID[qp]("test", netip.AddrPort{}, netip.MustParseAddrPort("192.0.2.1:20049"))
	failure := errors.New("no memory")
	if _, err := c.MakeQP(func() (*qp, error) { return nil, failure }); !errors.Is(err, failure) {
		t.Errorf("MakeQP: got %v, want %v", err, failure)
	}
	q, err := c.MakeQP(func() (*qp, error) { return &qp{1}, nil })
	if err != nil || c.QP() != q {
		t.Fatalf("MakeQP: got %v, %v; QP returns %v", q, err, c.QP())
	}
	if _, err := c.MakeQP(func() (*qp, error) { return &qp{2}, nil }); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("second MakeQP: got %v, want ErrInvalid", err)
	}
}

func TestConnIDClosesOnce(t *testing.T) {
	type qp struct{}
	c := NewConnID[qp]("test", netip.AddrPort{}, netip.AddrPort{})
	releases := 0
	for range 2 {
		c.CloseOnce(func(q *qp) {
			releases++
			if q != nil {
				t.Errorf("queue pair: got %v, want nil", q)
			}
		})
	}
	if releases != 1 {
		t.Errorf("releases: got %d, want 1", releases)
	}
	select {
	case <-c.Done():
	default:
		t.Error("Done is open after CloseOnce")
	}
	if _, err := c.MakeQP(func() (*qp, error) { return &qp{}, nil }); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("MakeQP after CloseOnce: got %v, want ErrInvalid", err)
	}
}
