package verbstest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var connectionTests = []conformanceTest{
	{"ConnectAccept", 0, testConnectAccept},
	{"PrivateDataTooLong", 0, testPrivateDataTooLong},
	{"Reject", 0, testReject},
	{"PortClosed", 0, testPortClosed},
	{"ConnectMisuse", 0, testConnectMisuse},
	{"ConnectCanceled", 0, testConnectCanceled},
	{"ListenerClose", 0, testListenerClose},
	{"ParallelConnects", 0, testParallelConnects},
	{"SendBeforeAccept", 0, testSendBeforeAccept},
}

// maxIBPrivate is the number of private data bytes in InfiniBand's REQ message: 92 bytes minus the
// connection manager's addresses.
const maxIBPrivate = 56

func testConnectAccept(t *testing.T, s *suite) {
	maxPrivate := 196
	if s.attrs(t).Transport == verbs.TransportIB {
		maxPrivate = maxIBPrivate
	}
	for _, data := range [][]byte{nil, {1}, []byte("eight by"), bytes.Repeat([]byte{0xa5}, maxPrivate)} {
		reply := append([]byte("re:"), data...)
		p := s.pair(t, options{
			activeParam:  verbs.ConnParam{PrivateData: data, ResponderResources: 16, InitiatorDepth: 4},
			passiveParam: verbs.ConnParam{PrivateData: reply, ResponderResources: 8, InitiatorDepth: 16},
		})
		toPassive, toActive := p.passive.ID.Peer(), p.active.ID.Peer()
		if !hasPrefix(toPassive.PrivateData, data) || !hasPrefix(toActive.PrivateData, reply) {
			t.Errorf("private data: sent %q and %q, got %q and %q", data, reply, toPassive.PrivateData,
				toActive.PrivateData)
		}
		if toPassive.ResponderResources != 16 || toPassive.InitiatorDepth != 4 {
			t.Errorf("depths at the acceptor: got %d and %d, want 16 and 4", toPassive.ResponderResources,
				toPassive.InitiatorDepth)
		}
		if toActive.ResponderResources < 4 || toActive.InitiatorDepth > 16 || toActive.InitiatorDepth == 0 {
			t.Errorf("depths at the connector: got %d and %d, want at least 4 and 1 to 16", toActive.ResponderResources,
				toActive.InitiatorDepth)
		}
		if a, b := p.active.ID.LocalAddr(), p.passive.ID.RemoteAddr(); a != b || a.Port() == 0 {
			t.Errorf("connector's address: got %v at the connector and %v at the acceptor", a, b)
		}
		if a, b := p.active.ID.RemoteAddr(), p.passive.ID.LocalAddr(); a != b {
			t.Errorf("acceptor's address: got %v at the connector and %v at the acceptor", a, b)
		}
	}
}

// hasPrefix reports whether got is want with zero padding, which some transports add.
func hasPrefix(got, want []byte) bool {
	return bytes.HasPrefix(got, want) && len(bytes.Trim(got[len(want):], "\x00")) == 0
}

func wantConnError(t *testing.T, what string, err error, kind verbs.ConnErrorKind) *verbs.ConnError {
	t.Helper()
	var ce *verbs.ConnError
	if !errors.As(err, &ce) {
		t.Errorf("%s: got %v, want a *verbs.ConnError", what, err)
		return &verbs.ConnError{}
	}
	if ce.Kind != kind || ce.Phase == "" || ce.Addr == "" {
		t.Errorf("%s: got %v (kind %v), want kind %v with phase and address", what, err, ce.Kind, kind)
	}
	return ce
}

func resolve(t *testing.T, p verbs.Provider, a netip.AddrPort) (verbs.ActiveID, *Endpoint) {
	t.Helper()
	id, err := p.Resolve(Context(t), a)
	kit.Must(t, err)
	return id, newEndpoint(t, id, options{})
}

var depthOne = verbs.ConnParam{ResponderResources: 1, InitiatorDepth: 1}

func testPrivateDataTooLong(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, _ := resolve(t, p, l.Addr())
	param := depthOne
	param.PrivateData = make([]byte, 1000)
	wantConnError(t, "connect with 1000 bytes of private data", id.Connect(Context(t), param), verbs.ConnLocal)
}

func testReject(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, e := resolve(t, p, l.Addr())
	req, connected := beginConnect(t, id, l, depthOne)
	succeeds(t, "reject", req.Reject([]byte("not you")))
	ce := wantConnError(t, "connect to a rejecting peer", <-connected, verbs.ConnRejected)
	if !hasPrefix(ce.PrivateData, []byte("not you")) {
		t.Errorf("private data of the rejection: got %q, want %q", ce.PrivateData, "not you")
	}
	if len(e.Disconnects) != 0 {
		t.Error("OnDisconnect was called without a connection")
	}
}

func testPortClosed(t *testing.T, s *suite) {
	p, l := s.listen(t)
	addr := l.Addr()
	l.Close()
	id, _ := resolve(t, p, addr)
	ce := wantConnError(t, "connect to a closed port", id.Connect(Context(t), depthOne), verbs.ConnUnreachable)
	if ce.Addr != addr.String() {
		t.Errorf("address in the error: got %q, want %v", ce.Addr, addr)
	}
}

func testConnectMisuse(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, err := p.Resolve(Context(t), l.Addr())
	kit.Must(t, err)
	wantConnError(t, "connect without a QP", id.Connect(Context(t), depthOne), verbs.ConnLocal)
	kit.Must(t, id.Close())
	succeeds(t, "second Close", id.Close())
	if _, err := p.Resolve(Context(t), netip.AddrPort{}); err == nil {
		t.Error("resolve an empty address: got no error, want one")
	}

	pr := connectPair(t, p, l, options{})
	wantConnError(t, "connect twice", pr.active.ID.(verbs.ActiveID).Connect(Context(t), depthOne),
		verbs.ConnLocal)
	if _, err := pr.active.ID.CreateQP(pr.active.PD, verbs.QPInitAttr{SendCQ: pr.active.CQ, RecvCQ: pr.active.CQ,
		MaxSendWR: 1, MaxRecvWR: 1}); err == nil {
		t.Error("second QP for one connection: got no error, want one")
	}
}

// testConnectCanceled checks that the caller's context ends Connect when the peer does not answer.
func testConnectCanceled(t *testing.T, s *suite) {
	p, l := s.listen(t)
	for name, kind := range map[string]verbs.ConnErrorKind{
		"canceled": verbs.ConnLocal,
		"deadline": verbs.ConnTimeout,
	} {
		id, _ := resolve(t, p, l.Addr())
		ctx, cancel := context.WithCancel(context.Background())
		if name == "deadline" {
			ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
		}
		time.AfterFunc(50*time.Millisecond, func() {
			if name == "canceled" {
				cancel()
			}
		})
		wantConnError(t, name, id.Connect(ctx, depthOne), kind)
		cancel()
		id.Close()
	}
}

func testListenerClose(t *testing.T, s *suite) {
	p, l := s.listen(t)
	pr := connectPair(t, p, l, options{})
	got := make(chan error, 1)
	go func() {
		_, err := l.Accept(context.Background())
		got <- err
	}()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Accept with a canceled context: got %v, want context.Canceled", err)
	}
	l.Close()
	l.Close()
	if err := <-got; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept on a closed listener: got %v, want net.ErrClosed", err)
	}
	pr.sendFirst() // existing connections still work
}

// testParallelConnects checks that concurrent connects all succeed.
func testParallelConnects(t *testing.T, s *suite) {
	const n = 16
	p, l := s.listen(t)
	errs := make(chan error, n)
	for range n {
		id, _ := resolve(t, p, l.Addr())
		go func() { errs <- id.Connect(Context(t), depthOne) }()
	}
	for range n {
		req, err := l.Accept(Context(t))
		kit.Must(t, err)
		newEndpoint(t, req, options{})
		kit.Must(t, req.Accept(Context(t), depthOne))
	}
	for range n {
		succeeds(t, "connect", next(t, "end of Connect", errs))
	}
}

// testSendBeforeAccept checks that the passive side may post before the active side sends. The
// passive side's message arrives after the active side's first message.
func testSendBeforeAccept(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	in, out := newCompletions(), newCompletions()
	p.active.recv(in, p.active.Buffer(16))
	src := p.passive.Buffer(16)
	pattern(src.Buf, 3)
	p.passive.post(out, &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{src}})
	p.sendFirst()
	out.wait(t, 1)
	if wc := in.wait(t, 1)[0]; wc.Status != verbs.StatusSuccess || wc.ByteLen != 16 {
		t.Errorf("Receive: got %+v, want 16 bytes", wc)
	}
}
