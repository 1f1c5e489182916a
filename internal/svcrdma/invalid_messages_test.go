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

// TestReceiveIsPostedBeforeReply keeps every credit in use: the client sends the next call directly
// after each reply. A server that posts the Receive after the reply has no buffer for this call
// (RFC 8166 §3.3.1).
func TestReceiveIsPostedBeforeReply(t *testing.T) {
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
		t.Errorf("got %d executed calls, want %d", n, calls)
	}
}

// realCalls returns the messages of a real client from the fuzz corpus.
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
		t.Fatalf("got %d messages in the corpus, want at least 10", len(calls))
	}
	return calls
}

// TestInvalidMessagesDoNotAffectOtherClients sends real calls with random changes in their headers.
// Some chunks refer to a valid region of the client, others do not. The server must serve another
// client after each connection, and must release the connections.
func TestInvalidMessagesDoNotAffectOtherClients(t *testing.T) {
	const clients, messages = 150, 12
	calls := realCalls(t)
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, RemoteInv: true, Stats: &stats, MessageMemory: 8 << 20})
	other := dialRaw(t, addr, ownPrivate(true, 4096))
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
			// Half of the messages refer to a valid region.
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
		case <-time.After(3 * time.Millisecond): // time for the server to process some messages
		}
		c.close()
		// The server knows failed calls by address and XID. No XID of the other client is in words.
		xid := 1<<24 + i
		if rep, _, _ := other.exchange(&rpcrdma.Header{XID: xid},
			rpcCall(xid, progNFS, 3, 0, nil)); rep.Proc != rpcrdma.ProcMsg || rep.XID != xid {
			t.Fatalf("other client after connection %d: got %+v, want a reply with XID %d", i, rep, xid)
		}
	}
	for deadline := time.Now().Add(testTimeout); stats.Connections.Load() != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got %d connections, want 1", stats.Connections.Load())
		}
	}
	t.Logf("%d of %d connections lost, %d calls, %d RDMA_ERRORs, %d discarded, %d bytes read, %d written", lost,
		clients, stats.Calls.Load(), stats.RDMAErrors.Load(), stats.Discarded.Load(), stats.ReadBytes.Load(),
		stats.WrittenBytes.Load())
	if lost == 0 || lost == clients || stats.RDMAErrors.Load() == 0 || stats.Discarded.Load() == 0 ||
		stats.ReadBytes.Load() == 0 {
		t.Error("the messages did not cause every kind of failure; see the log line above")
	}
}

// trySend is sendBytes on a connection that may be closed. It reports success.
func (c *rawClient) trySend(b []byte) bool {
	buf := c.mem[rawSendAt : rawSendAt+len(b)]
	copy(buf, b)
	done := make(chan verbs.Status, 1)
	_, err := c.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true,
		SGList: []verbs.SGE{{Buf: buf, LKey: c.memMR.LKey()}},
		Done:   func(wc *verbs.WorkCompletion) { done <- wc.Status }})
	return err == nil && <-done == verbs.StatusSuccess
}

// TestConnectionLimitPerAddress checks that one address can use half of MaxConns, and that a closed
// connection does not count.
func TestConnectionLimitPerAddress(t *testing.T) {
	var stats Stats
	addr := startServer(t, Config{Handler: &testHandler{}, MaxConns: 4, Stats: &stats})
	a := dialRaw(t, addr, nil)
	dialRaw(t, addr, nil)
	third := newRaw(t, addr)
	var refused *verbs.ConnError
	if err := third.connect(verbs.ConnParam{ResponderResources: 16}); !errors.As(err, &refused) ||
		refused.Kind != verbs.ConnRejected {
		t.Errorf("third connection of one client: got error %v, want %v", err, verbs.ConnRejected)
	}
	a.close()
	for deadline := time.Now().Add(testTimeout); ; time.Sleep(5 * time.Millisecond) {
		again := newRaw(t, addr)
		if again.connect(verbs.ConnParam{ResponderResources: 16}) == nil {
			break
		}
		again.close()
		if time.Now().After(deadline) {
			t.Fatalf("no new connection in %v after one was closed", testTimeout)
		}
	}

	c := newConnCount(5)
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	three := netip.MustParseAddr("192.0.2.3")
	for i, x := range []struct {
		from netip.Addr
		want bool
	}{{one, true}, {one, true}, {one, true}, {one, false}, {two, true}, {two, true}, {two, false}, {three, false}} {
		if c.admit(x.from) != x.want {
			t.Errorf("connection %d from %v: got admitted %v, want %v", i, x.from, !x.want, x.want)
		}
	}
	for _, from := range []netip.Addr{one, one, one, two, two} {
		c.leave(from)
	}
	if c.mu.all != 0 || len(c.mu.own) != 0 {
		t.Errorf("got %d connections of %d clients, want none", c.mu.all, len(c.mu.own))
	}
}

// TestReadChunkWithoutReadDepth uses a client with an IRD of 0, which accepts no RDMA Read.
func TestReadChunkWithoutReadDepth(t *testing.T) {
	c := newRaw(t, startServer(t, Config{Handler: &testHandler{}}))
	must(t, c.connect(verbs.ConnParam{}))
	seg := c.register(rawChunkAt, 4096, verbs.AccessRemoteRead)
	body := rpcCall(1, progNFS, 3, procWrite, writeHead(4096))
	c.wantErrChunk(&rpcrdma.Header{XID: 1, Reads: []rpcrdma.ReadSegment{{Position: uint32(len(body)), Segment: seg}}},
		body)
	c.exchange(&rpcrdma.Header{XID: 2}, rpcCall(2, progNFS, 3, 0, nil))
}
