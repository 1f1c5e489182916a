package svcrdma

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestCreditsAllTheTime keeps every credit in use for a long time: each reply is followed by the
// next call at once, which a server that gave its Receive back after the reply would have no buffer
// for (RFC 8166 §3.3.1).
func TestCreditsAllTheTime(t *testing.T) {
	const credits, calls = 4, 3000
	h := &testHandler{}
	c := dialRaw(t, startServer(t, Config{Credits: credits, Handler: h}), ownPrivate(false, 4096))
	for xid := range uint32(credits) {
		c.sendMsg(&rpcrdma.Header{XID: xid}, rpcCall(xid, progNFS, 3, 0, nil))
	}
	for xid := uint32(credits); xid < calls; xid++ {
		c.receive()
		c.sendMsg(&rpcrdma.Header{XID: xid}, rpcCall(xid, progNFS, 3, 0, nil))
	}
	for range credits {
		c.receive()
	}
	if n := h.calls.Load(); n != calls {
		t.Errorf("%d calls executed, want %d", n, calls)
	}
}

// realCalls are the client's messages of the fuzz corpus.
func realCalls(t *testing.T) (calls [][]byte) {
	t.Helper()
	files, _ := filepath.Glob("testdata/fuzz/FuzzCall/ganesha-*")
	for _, f := range files {
		text, err := os.ReadFile(f)
		must(t, err)
		for line := range strings.Lines(string(text)) {
			if quoted, ok := strings.CutPrefix(strings.TrimSpace(line), "[]byte("); ok {
				s, err := strconv.Unquote(strings.TrimSuffix(quoted, ")"))
				must(t, err)
				calls = append(calls, []byte(s))
			}
		}
	}
	if len(calls) < 10 {
		t.Fatalf("%d messages in the corpus", len(calls))
	}
	return calls
}

// TestHostileClients send real calls with words of their headers changed, among them the keys and
// addresses of a region that is theirs, and of none. The server serves everybody else all the while
// and keeps nothing of them.
func TestHostileClients(t *testing.T) {
	const clients, messages = 150, 12
	calls := realCalls(t)
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, RemoteInv: true, Stats: &stats, MessageMemory: 8 << 20})
	good := dialRaw(t, addr, ownPrivate(true, 4096))
	random := rand.New(rand.NewPCG(1, 2))
	words := []uint32{0, 1, 2, 3, 4, 28, 100, 4096, 1 << 20, 1 << 30, 1<<31 - 1, 1 << 31, 1<<32 - 4, 1<<32 - 1}
	lost := 0
	for i := range uint32(clients) {
		c := dialRaw(t, addr, ownPrivate(random.IntN(2) == 0, 1024<<random.IntN(4)))
		own := c.register(rawChunkAt, 64<<10,
			[]verbs.Access{verbs.AccessRemoteRead, verbs.AccessRemoteWrite}[random.IntN(2)])
		for range messages {
			m := append([]byte(nil), calls[random.IntN(len(calls))]...)
			var h rpcrdma.Header
			// chunks that can be served in part
			if n, err := h.Decode(m); err == nil && random.IntN(2) > 0 {
				body := m[n:]
				for i := range h.Reads {
					h.Reads[i].Segment = own
					h.Reads[i].Length = words[random.IntN(len(words))] & 0xffff
				}
				for _, chunk := range h.Writes {
					for i := range chunk {
						chunk[i] = own
					}
				}
				for i := range h.Reply {
					h.Reply[i] = own
				}
				m = append(h.Append(nil), body...)
			}
			for range random.IntN(3) {
				at := random.IntN(min(len(m), 100)) &^ 3
				if at+4 <= len(m) {
					binary.BigEndian.PutUint32(m[at:], words[random.IntN(len(words))])
				}
			}
			m = m[:len(m)-random.IntN(2)*random.IntN(min(len(m), 40))]
			if !c.trySend(m) {
				break
			}
		}
		select {
		case <-c.down:
			lost++
		case <-time.After(3 * time.Millisecond): // let the server get at some of it
		}
		c.close()
		if rep, _, _ := good.exchange(&rpcrdma.Header{XID: i},
			rpcCall(i, progNFS, 3, 0, nil)); rep.Proc != rpcrdma.ProcMsg || rep.XID != i {
			t.Fatalf("after hostile client %d: %+v", i, rep)
		}
	}
	for deadline := time.Now().Add(testTimeout); stats.Connections.Load() != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are left, want 1", stats.Connections.Load())
		}
	}
	t.Logf("%d of %d connections lost, %d calls, %d RDMA_ERRORs, %d discarded, %d octets read, %d written", lost,
		clients, stats.Calls.Load(),
		stats.RDMAErrors.Load(), stats.Discarded.Load(), stats.ReadBytes.Load(), stats.WrittenBytes.Load())
	if lost == 0 || lost == clients || stats.RDMAErrors.Load() == 0 || stats.Discarded.Load() == 0 ||
		stats.ReadBytes.Load() == 0 {
		t.Error("the clients were not hostile enough")
	}
}

// trySend is sendBytes on a connection that may be gone.
func (c *rawClient) trySend(b []byte) bool {
	buf := c.mem[rawSendAt : rawSendAt+len(b)]
	copy(buf, b)
	done := make(chan verbs.Status, 1)
	_, err := c.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true,
		SGList: []verbs.SGE{{Buf: buf, LKey: c.memMR.LKey()}},
		Done:   func(wc *verbs.WorkCompletion) { done <- wc.Status }})
	return err == nil && <-done == verbs.StatusSuccess
}

// TestConnectionLimits: one address gets half of the connections, and gets them back.
func TestConnectionLimits(t *testing.T) {
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, MaxConns: 4, Stats: &stats})
	a := dialRaw(t, addr, nil)
	dialRaw(t, addr, nil)
	third := newRaw(t, addr)
	var refused *verbs.ConnError
	if err := third.connect(verbs.ConnParam{ResponderResources: 16}); !errors.As(err, &refused) ||
		refused.Kind != verbs.ConnRejected {
		t.Errorf("third connection of one client: %v, want it rejected", err)
	}
	a.close()
	for deadline := time.Now().Add(testTimeout); ; time.Sleep(5 * time.Millisecond) {
		again := newRaw(t, addr)
		if again.connect(verbs.ConnParam{ResponderResources: 16}) == nil {
			break
		}
		again.close()
		if time.Now().After(deadline) {
			t.Fatal("a connection that ended still counts")
		}
	}

	c := newConnCount(5)
	one, two, three := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr(
		"192.0.2.3")
	for i, x := range []struct {
		from netip.Addr
		want bool
	}{{one, true}, {one, true}, {one, true}, {one, false}, {two, true}, {two, true}, {two, false}, {three, false}} {
		if c.admit(x.from) != x.want {
			t.Errorf("connection %d from %v: admitted %v", i, x.from, !x.want)
		}
	}
	for _, from := range []netip.Addr{one, one, one, two, two} {
		c.leave(from)
	}
	if c.all != 0 || len(c.own) != 0 {
		t.Errorf("%d connections of %d clients are left", c.all, len(c.own))
	}
}

// TestNoReadsAllowed is a client that answers no RDMA Read (its IRD is 0): a Read chunk of it
// cannot be served.
func TestNoReadsAllowed(t *testing.T) {
	c := newRaw(t, startServer(t, Config{Handler: &testHandler{}}))
	must(t, c.connect(verbs.ConnParam{}))
	seg := c.register(rawChunkAt, 4096, verbs.AccessRemoteRead)
	body := rpcCall(1, progNFS, 3, procWrite, writeHead(4096))
	c.wantErrChunk(&rpcrdma.Header{XID: 1, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		body)
	c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil))
}
