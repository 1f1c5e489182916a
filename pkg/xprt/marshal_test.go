package xprt

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A sentCall is the last Send with a call, as posted.
type sentCall struct {
	rpcrdma.Header
	body []byte // RPC message in the Send
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
				c := &sentCall{}
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
			ArgDataPos: c.args / 8 * 4, ArgData: fill(1, c.data), ResultData: make([]byte, c.resultLen),
			MaxResult: c.maxResult}
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
		var readBytes, offered, wantRead, wantOffered, copied int
		for _, r := range h.Reads {
			readBytes += int(r.Length)
			if want := uint32(call + m.ArgDataPos); r.Position != want && !c.long || r.Position != 0 && c.long {
				t.Errorf("%s: read chunk: got position %d, want %d", c.name, r.Position, want)
			}
		}
		for _, w := range append(h.Writes, h.Reply) {
			offered += chunkLen(w)
		}
		switch {
		case c.long:
			wantRead = call + c.args + sunrpc.Pad4(c.data)
			copied = wantRead
		case c.reads:
			wantRead = c.data
		default:
			copied = c.data
			if want := call + c.args + sunrpc.Pad4(c.data); len(h.body) != want || !bytes.Contains(h.body, m.ArgData) {
				t.Errorf("%s: got a message of %d bytes, want %d with the data", c.name, len(h.body), want)
			}
		}
		if c.reply {
			wantOffered = sunrpc.MaxReplyHeader + c.maxResult + sunrpc.Pad4(c.resultLen)
		} else if c.writes {
			wantOffered = c.resultLen
		}
		if readBytes != wantRead || offered != wantOffered || int(s.PullupCopyBytes-before.PullupCopyBytes) != copied ||
			int(s.TotalRDMARequest-before.TotalRDMARequest) != offered {
			t.Errorf("%s: got %d bytes to read, %d bytes to write, and counters %+v after %+v; want %d, %d, %d copied",
				c.name, readBytes, offered, s, before, wantRead, wantOffered, copied)
		}
	}
}

func chunkLen(c rpcrdma.Chunk) (n int) {
	for _, seg := range c {
		n += int(seg.Length)
	}
	return n
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
// caller: more than pullupMax, if the device can send it.
func TestLargeInlineDataIsGathered(t *testing.T) {
	for _, c := range []struct {
		anyMemory, gathered bool
		data                int
	}{{true, false, pullupMax}, {true, true, pullupMax + 1}, {false, false, pullupMax + 1}} {
		inBubble(t, func(cfg *Config, _ *stepServer) {
			cfg.InlineBytes = MaxInlineBytes
			cfg.Provider.(*stepDevice).attrs = func(a *verbs.DeviceAttrs) {
				if !c.anyMemory {
					a.Caps &^= verbs.CapRegisterAny
				}
			}
		}, func(t *testing.T, b *bubble) {
			m := &sunrpc.Message{Prog: echoProg, Vers: 1, Proc: 7, Cred: noCred, Args: fill(5, 12), ArgDataPos: 4,
				ArgData: fill(9, c.data)}
			b.mustSucceed(m)
			pad := make([]byte, sunrpc.Pad4(c.data)-c.data)
			want := slices.Concat(m.Args[:4], m.ArgData, pad, m.Args[4:])
			if got := b.calls[0].body[sunrpc.CallSize(noCred):]; !bytes.Equal(got, want) ||
				b.tr.Stats().PullupCopyBytes == 0 != c.gathered {
				t.Errorf("%d bytes, from any memory %v: got %d bytes copied, the same arguments %v", c.data,
					c.anyMemory, b.tr.Stats().PullupCopyBytes, bytes.Equal(got, want))
			}
		})
	}
}

// ignore handles a call without doing anything.
func ignore(context.Context, uint32) {}
