package xprt

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A sentCall is the last Send with a call, as posted.
type sentCall struct {
	rpcrdma.Header
	bytes    int // of the Send
	sges     int
	signaled bool
	body     []byte // RPC message in the Send
}

// sentCalls returns hooks that store each Send of a call in last.
func sentCalls(t *testing.T, last *atomic.Pointer[sentCall]) func() qpHooks {
	return func() qpHooks {
		return qpHooks{post: func(first *verbs.WorkRequest, _ int) (int, error) {
			for wr := first; wr != nil; wr = wr.Next {
				if wr.Opcode != verbs.OpSend {
					continue
				}
				var msg []byte
				for _, sge := range wr.SGList {
					msg = append(msg, sge.Buf...)
				}
				c := &sentCall{bytes: len(msg), sges: len(wr.SGList), signaled: wr.Signaled}
				n, err := c.Decode(msg)
				if err != nil {
					t.Errorf("Send: %v", err)
				}
				c.body = msg[n:]
				last.Store(c)
			}
			return 0, nil
		}}
	}
}

// TestFormFollowsSizes makes calls whose parts fit inline exactly, or exceed the room by one word.
// It checks the form of each call, and what the counters say about it (RFC 8166 §4.3.3).
func TestFormFollowsSizes(t *testing.T) {
	var last atomic.Pointer[sentCall]
	tr := dial(t, serve(t, svcrdma.Config{Handler: handlerFunc(ignore)}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{attrs: withDepth(64), open: sentCalls(t, &last)})
	})
	if err := tr.Call(testContext(t), echo(0, nil, 0)); err != nil { // wait for the connection
		t.Fatal(err)
	}
	cn := connOf(t, tr)
	maxSegs := cn.params.MaxSegs
	if maxSegs < 2 {
		t.Fatalf("segments of a chunk: got at most %d, want several", maxSegs)
	}
	call := sunrpc.CallSize(noCred)
	replyRoom := cn.inlineRecv - rpcrdma.MinHeaderSize - sunrpc.AcceptedReplySize
	writeRoom := replyRoom - rpcrdma.ChunkHeadSize - (maxSegs+1)*rpcrdma.SegmentSize
	callRoom := cn.inlineSend - rpcrdma.MinHeaderSize - call
	readRoom := callRoom - maxSegs*rpcrdma.ReadSegmentSize
	for _, c := range []struct {
		name                             string
		args, data, maxResult, resultLen int
		reads, writes, reply             bool
		long                             bool // the call is a position-zero read chunk
	}{
		{"smallest", 0, 0, 0, 0, false, false, false, false},
		{"largest inline reply", 0, 0, replyRoom, 0, false, false, false, false},
		{"larger reply", 0, 0, replyRoom + 1, 0, false, false, true, false},
		{"largest inline reply with data", 0, 0, 100, replyRoom - 100, false, false, false, false},
		{"larger reply with data", 0, 0, 100, replyRoom - 96, false, true, false, false},
		{"largest reply beside a write chunk", 0, 0, writeRoom, 8192, false, true, false, false},
		{"larger reply with data in the reply chunk", 0, 0, writeRoom + 1, 8192, false, false, true, false},
		{"largest inline arguments", callRoom, 0, 0, 0, false, false, false, false},
		{"larger arguments", callRoom + 4, 0, 0, 0, true, false, false, true},
		{"largest inline arguments with data", 100, callRoom - 100, 0, 0, false, false, false, false},
		{"larger arguments with data", 100, callRoom - 99, 0, 0, true, false, false, false},
		{"largest arguments beside a read chunk", readRoom, 8192, 0, 0, true, false, false, false},
		{"larger arguments with data in the long call", readRoom + 4, 8192, 0, 0, true, false, false, true},
		{"long call and long reply", 8192, 0, 8192, 0, true, false, true, true},
		{"data both ways", 100, 8191, 100, 8191, true, true, false, false},
	} {
		before := tr.Stats()
		m := &sunrpc.Message{Prog: echoProg, Vers: 1, Proc: 7, Cred: noCred, Args: make([]byte, c.args),
			ArgDataPos: c.args / 8 * 4, MaxResult: c.maxResult}
		if c.data > 0 {
			m.ArgData = fill(1, c.data)
		}
		if c.resultLen > 0 {
			m.ResultData = make([]byte, c.resultLen)
		}
		// The server refuses to move data of the procedure by RDMA Read. Only the call counts here.
		var refused *sunrpc.AcceptError
		if err := tr.Call(testContext(t), m); err != nil && !errors.As(err, &refused) {
			t.Errorf("%s: %v", c.name, err)
		}
		s, h := tr.Stats(), last.Load()
		if len(h.Reads) > 0 != c.reads || len(h.Writes) > 0 != c.writes || h.HasReply != c.reply ||
			h.Proc == rpcrdma.ProcNoMsg != c.long {
			t.Errorf("%s: got reads %v, writes %v, reply %v, type %v; want %v, %v, %v, long call %v", c.name, h.Reads,
				h.Writes, h.HasReply, h.Proc, c.reads, c.writes, c.reply, c.long)
		}
		// What the counters must say.
		var readBytes, offered uint64
		for _, r := range h.Reads {
			readBytes += uint64(r.Length)
			if want := uint32(call + m.ArgDataPos); r.Position != want && !c.long || r.Position != 0 && c.long {
				t.Errorf("%s: read chunk: got position %d, want %d", c.name, r.Position, want)
			}
		}
		for _, w := range append(h.Writes, h.Reply) {
			for _, seg := range w {
				offered += uint64(seg.Length)
			}
		}
		wantRead, wantOffered, copied := c.data, c.resultLen, c.data
		if c.long {
			wantRead = call + c.args + sunrpc.Pad4(c.data)
			copied = wantRead
		} else if c.reads {
			copied = 0
		} else {
			wantRead = 0
		}
		switch {
		case c.reply:
			wantOffered = sunrpc.MaxReplyHeader + c.maxResult + sunrpc.Pad4(c.resultLen)
		case !c.writes:
			wantOffered = 0
		}
		if readBytes != uint64(wantRead) || offered != uint64(wantOffered) {
			t.Errorf("%s: got %d bytes to read, %d bytes to write; want %d, %d", c.name, readBytes, offered, wantRead,
				wantOffered)
		}
		if got := s.PullupCopyBytes - before.PullupCopyBytes; got != uint64(copied) {
			t.Errorf("%s: bytes copied: got %d, want %d", c.name, got, copied)
		}
		if got := s.TotalRDMARequest - before.TotalRDMARequest; got != offered {
			t.Errorf("%s: bytes offered: got %d, want %d", c.name, got, offered)
		}
		writes, replies := 0, len(h.Reply)
		for _, w := range h.Writes {
			writes += len(w)
		}
		if s.ReadChunks-before.ReadChunks != uint64(len(h.Reads)) ||
			s.WriteChunks-before.WriteChunks != uint64(writes) ||
			s.ReplyChunks-before.ReplyChunks != uint64(replies) || s.NomsgCall-before.NomsgCall > 0 != c.long {
			t.Errorf("%s: got counters %+v after %+v", c.name, s, before)
		}
		if !c.long && !c.reads {
			want := call + c.args + sunrpc.Pad4(c.data)
			if len(h.body) != want || !bytes.Contains(h.body, m.ArgData) {
				t.Errorf("%s: got a message of %d bytes, want %d with the data", c.name, len(h.body), want)
			}
		}
	}
}

// TestLongMessagesAreLimited makes calls with the largest message, and with a larger one.
func TestLongMessagesAreLimited(t *testing.T) {
	tr := dial(t, serve(t, svcrdma.Config{Handler: handlerFunc(ignore)}), nil)
	args, result := longBytes-sunrpc.CallSize(noCred), longBytes-sunrpc.MaxReplyHeader
	for _, c := range []struct {
		args, result int
		fits         bool
	}{{args, 0, true}, {args + 4, 0, false}, {0, result, true}, {0, result + 1, false}} {
		m := echo(7, make([]byte, c.args), c.result)
		if err := tr.Call(testContext(t), m); err == nil != c.fits || err != nil && !isProtocol(err) {
			t.Errorf("call with %d bytes of arguments and up to %d bytes of results: got %v, want success %v", c.args,
				c.result, err, c.fits)
		}
	}
	if n := tr.long.Out(); n != 0 {
		t.Errorf("buffers for long messages in use: got %d, want 0", n)
	}
}

// TestLargeInlineDataIsGathered checks which inline data the Send takes from the memory of the
// caller: more than pullupMax, if the device can send it. That Send is signaled.
func TestLargeInlineDataIsGathered(t *testing.T) {
	for _, c := range []struct {
		anyMemory   bool // the device sends from memory that was not registered for Sends
		data, after int  // bytes of data, and of the arguments after the data
		want        int  // SGEs of the Send
	}{
		{true, pullupMax, 8, 1},
		{true, pullupMax + 1, 8, 3},
		{true, pullupMax + 4, 0, 2},
		{false, pullupMax + 1, 8, 1},
	} {
		var last atomic.Pointer[sentCall]
		tr := dial(t, serve(t, svcrdma.Config{Handler: handlerFunc(ignore), InlineBytes: 65536}), func(cfg *Config) {
			cfg.InlineBytes = 65536
			cfg.Provider = hooked(&hookedProvider{attrs: func(a *verbs.DeviceAttrs) {
				if !c.anyMemory {
					a.Caps &^= verbs.CapRegisterAny
				}
			}, open: sentCalls(t, &last)})
		})
		if err := tr.Call(testContext(t), echo(0, nil, 0)); err != nil { // wait for the connection
			t.Fatal(err)
		}
		m := &sunrpc.Message{Prog: echoProg, Vers: 1, Proc: 7, Cred: noCred, Args: fill(5, 4+c.after), ArgDataPos: 4,
			ArgData: fill(9, c.data)}
		if err := tr.Call(testContext(t), m); err != nil {
			t.Fatal(err)
		}
		got := last.Load()
		want := append(append(bytes.Clone(m.Args[:4]), m.ArgData...), make([]byte, sunrpc.Pad4(c.data)-c.data)...)
		want = append(want, m.Args[4:]...)
		if args := got.body[sunrpc.CallSize(noCred):]; got.sges != c.want || got.signaled != (c.want > 1) ||
			!bytes.Equal(args, want) {
			t.Errorf("%d bytes, from any memory %v: got %d SGEs, signaled %v; want %d, and the same arguments", c.data,
				c.anyMemory, got.sges, got.signaled, c.want)
		}
		copied := uint64(0)
		if c.want == 1 {
			copied = uint64(c.data)
		}
		if s := tr.Stats(); s.PullupCopyBytes != copied {
			t.Errorf("%d bytes, from any memory %v: got %d bytes copied, want %d", c.data, c.anyMemory,
				s.PullupCopyBytes, copied)
		}
		tr.Close()
	}
}

// TestBytesToSendOfCall checks what delays the requests behind a call: its Send and the data that
// the server reads.
func TestBytesToSendOfCall(t *testing.T) {
	s := &slot{}
	s.sendWR.SGList = []verbs.SGE{{Buf: make([]byte, 100)}, {Buf: make([]byte, 7)}}
	s.hdr.Reads = []rpcrdma.ReadSegment{{Segment: rpcrdma.Segment{Length: 3000}},
		{Segment: rpcrdma.Segment{Length: 40000}}}
	if got := s.bytesToSend(); got != 43107 {
		t.Errorf("got %d bytes, want 43107", got)
	}
}

// TestRequestsBeforeFailedOne counts the requests of a chain that were posted.
func TestRequestsBeforeFailedOne(t *testing.T) {
	chain := make([]verbs.WorkRequest, 3)
	chain[0].Next, chain[1].Next = &chain[1], &chain[2]
	for want := range chain {
		if got := before(&chain[0], &chain[want]); got != want {
			t.Errorf("request %d failed: got %d requests before it", want, got)
		}
	}
	if got := before(&chain[0], nil); got != len(chain) {
		t.Errorf("unknown request failed: got %d requests, want %d", got, len(chain))
	}
}

// TestPauseForMemoryDoubles checks the pauses of a call that finds no memory, and which errors are
// final.
func TestPauseForMemoryDoubles(t *testing.T) {
	tr := unconnected(t, nil)
	s := <-tr.free
	defer s.end()
	s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
	for _, c := range []struct{ last, want time.Duration }{
		{0, marshalRetry},
		{marshalRetry, 2 * marshalRetry},
		{marshalRetryMax/2 - 1, marshalRetryMax - 2},
		{marshalRetryMax, marshalRetryMax},
	} {
		pause := c.last
		s.wakeCaller() // ends the pause
		if !tr.waitRetry(t.Context(), s, &shortageError{errNoBuffer}, &pause) || pause != c.want {
			t.Errorf("pause after %v: got %v, want %v", c.last, pause, c.want)
		}
	}
	var pause time.Duration
	if tr.waitRetry(t.Context(), s, &ProtocolError{}, &pause) || pause != 0 {
		t.Errorf("after a final error: got a retry or a pause of %v, want neither", pause)
	}
}

// ignore handles a call without doing anything.
func ignore(context.Context, uint32) {}

// TestCallNeedsCreditOfConnection posts a call without a connection, and one whose credit belongs
// to an earlier connection. Neither may be marshaled.
func TestCallNeedsCreditOfConnection(t *testing.T) {
	for _, connected := range []bool{false, true} {
		tr := unconnected(t, nil)
		s := <-tr.free
		s.begin(t.Context(), &sunrpc.Message{}, tr.startCall())
		tr.window.reset(1, false)
		if connected {
			tr.conn.Store(&conn{adapter: &adapter{t: tr}})
		}
		if !tr.window.enter(s) {
			t.Fatal("no credit")
		}
		if connected {
			tr.window.reset(0, false)
		}
		if sent, err := tr.transmit(s); sent || err != nil || s.state != slotWaiting {
			t.Errorf("connected %v: got sent %v, %v, state %d; want false, nil, waiting", connected, sent, err, s.state)
		}
		tr.conn.Store(nil)
		s.end()
	}
}

// TestRequestsOfCallAreCounted checks the counts of the send queue after one call with a
// registration: the FastReg, the Send and the LOCAL_INV. The first two were not signaled. A write
// pad adds its FastReg and an RDMA Write.
func TestRequestsOfCallAreCounted(t *testing.T) {
	for _, pad := range []bool{false, true} {
		tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
			c.WritePad, c.NudgeAfter = pad, time.Hour
		})
		m := echo(2, sunrpc.AppendUint32(nil, 8192), 8192)
		if err := tr.Call(testContext(t), m); err != nil {
			t.Fatal(err)
		}
		want := int64(3)
		if pad {
			want += 2
		}
		q := &connOf(t, tr).sq
		if q.unsignaled.Load() != 2 || q.posted.Load() != want || q.taken.Load() != want || q.retired.Load() != want {
			t.Errorf("write pad %v: got %d unsignaled requests, %d posted, %d places taken, %d retired; "+
				"want 2, then %d each", pad, q.unsignaled.Load(), q.posted.Load(), q.taken.Load(), q.retired.Load(),
				want)
		}
		tr.Close()
		if s := tr.Stats(); s.Sends != 1 || s.Resends != 0 || s.Recvs != 1 || s.BadXIDs != 0 {
			t.Errorf("write pad %v: got %d Sends, %d resends, %d Receives, %d bad XIDs; want 1, 0, 1, 0", pad, s.Sends,
				s.Resends, s.Recvs, s.BadXIDs)
		}
	}
}
