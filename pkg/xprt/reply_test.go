package xprt

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func isProtocol(err error) bool  { var e *ProtocolError; return errors.As(err, &e) }
func isServer(err error) bool    { var e *ServerError; return errors.As(err, &e) }
func isTimeout(err error) bool   { var e *TimeoutError; return errors.As(err, &e) }
func isMalformed(err error) bool { return errors.Is(err, sunrpc.ErrMalformed) }
func isNil(err error) bool       { return err == nil }

// A replyCase is a reply that uses the chunks of a call in some way.
type replyCase struct {
	name   string
	change func(c *stepCall)
	want   func(error) bool
	data   int // bytes of data, if the call succeeds
}

// used sets the lengths of the segments of the write chunk.
func used(lengths ...uint32) func(*stepCall) {
	return func(c *stepCall) {
		for i, n := range lengths {
			c.reply.Writes[0][i].Length = n
		}
	}
}

// longReply makes the reply one in the reply chunk.
func longReply(c *stepCall) {
	c.reply.Proc, c.reply.HasReply, c.rpc = rpcrdma.ProcNoMsg, true, nil
	c.reply.Reply = append(rpcrdma.Chunk(nil), c.Header.Reply...)
}

// emptyReply is longReply with nothing in the reply chunk.
func emptyReply(c *stepCall) {
	longReply(c)
	for i := range c.reply.Reply {
		c.reply.Reply[i].Length = 0
	}
}

// The segments of the write chunk of a READ of 100,000 bytes: 17 pages in the first one.
const firstSegment, secondSegment = 17 * 4096, 100000 - 17*4096

// readReplies are replies to a READ with a write chunk of two segments.
var readReplies = []replyCase{
	{"all of the write chunk", func(*stepCall) {}, isNil, 100000},
	{"part of the write chunk", used(firstSegment, 7), isNil, firstSegment + 7},
	{"part of the first segment", used(9, 0), isNil, 9},
	{"empty segments", used(0, 0), isNil, 0},
	{"unused write chunk", func(c *stepCall) { c.reply.Writes[0] = nil }, isNil, 0},
	{"hole in the write chunk", used(firstSegment-1, 1), isProtocol, 0},
	{"write chunk longer than offered", used(firstSegment, secondSegment+1), isProtocol, 0},
	{"write chunk of another key", func(c *stepCall) { c.reply.Writes[0][1].Handle++ }, isProtocol, 0},
	{"write chunk at another offset", func(c *stepCall) { c.reply.Writes[0][0].Offset++ }, isProtocol, 0},
	{"missing segment", func(c *stepCall) { c.reply.Writes[0] = c.reply.Writes[0][:1] }, isProtocol, 0},
	{"segment that was not offered", func(c *stepCall) {
		c.reply.Writes[0] = append(c.reply.Writes[0], c.reply.Writes[0][0])
	}, isProtocol, 0},
	{"two write chunks", func(c *stepCall) { c.reply.Writes = append(c.reply.Writes, c.reply.Writes...) },
		isProtocol, 0},
	{"no write chunk", func(c *stepCall) { c.reply.Writes = nil }, isProtocol, 0},
	{"Read list", func(c *stepCall) { c.reply.Reads = make([]rpcrdma.ReadSegment, 1) }, isProtocol, 0},
	{"reply chunk that was not offered", func(c *stepCall) {
		c.reply.HasReply, c.reply.Reply = true, rpcrdma.Chunk{{Handle: 1, Length: 5}}
	}, isProtocol, 0},
	{"long reply without a reply chunk", func(c *stepCall) { c.reply.Proc = rpcrdma.ProcNoMsg }, isProtocol, 0},
	{"ERR_CHUNK", func(c *stepCall) { c.reply.Proc, c.reply.Err = rpcrdma.ProcError, rpcrdma.ErrChunk }, isServer, 0},
	{"ERR_VERS", func(c *stepCall) {
		c.reply.Proc, c.reply.Err, c.reply.Low, c.reply.High = rpcrdma.ProcError, rpcrdma.ErrVers, 2, 3
	}, isServer, 0},
	{"largest results", func(c *stepCall) { c.rpc = append(c.rpc, make([]byte, 104+100000)...) }, isNil, 100000},
	{"larger results", func(c *stepCall) { c.rpc = append(c.rpc, make([]byte, 104+100001)...) }, isProtocol, 0},
	{"RPC XID of another call", func(c *stepCall) { c.rpc[0] ^= 1 }, isProtocol, 0},
	{"cut RPC reply", func(c *stepCall) { c.rpc = c.rpc[:7] }, isMalformed, 0},
	{"unknown XID", func(c *stepCall) { c.reply.XID ^= 1 << 30 }, isTimeout, 0},
	{"unknown slot", func(c *stepCall) { c.reply.XID |= 7 }, isTimeout, 0},
	{"wrong version", func(c *stepCall) { c.reply.Vers = 9 }, isTimeout, 0},
	{"backward call", func(c *stepCall) { c.rpc = sunrpc.AppendUint32(c.rpc[:4], sunrpc.MsgCall) }, isTimeout, 0},
}

// echoReplies are replies to a call with a reply chunk. The chunk holds no RPC reply.
var echoReplies = []replyCase{
	{"inline", func(*stepCall) {}, isNil, -1},
	{"inline, unused reply chunk", func(c *stepCall) {
		emptyReply(c)
		c.reply.Proc, c.rpc = rpcrdma.ProcMsg, sunrpc.AppendAcceptedReply(nil, c.Header.XID, sunrpc.Success)
	}, isNil, -1},
	{"inline, used reply chunk", func(c *stepCall) {
		longReply(c)
		c.reply.Proc, c.rpc = rpcrdma.ProcMsg, sunrpc.AppendAcceptedReply(nil, c.Header.XID, sunrpc.Success)
	}, isProtocol, 0},
	{"long reply that is no RPC reply", longReply, isMalformed, 0},
	{"empty long reply", emptyReply, isMalformed, 0},
	{"too long reply", func(c *stepCall) {
		longReply(c)
		c.reply.Reply[0].Length++
	}, isProtocol, 0},
	{"reply chunk not returned", func(c *stepCall) {
		longReply(c)
		c.reply.HasReply = false
	}, isProtocol, 0},
	{"write chunk that was not offered", func(c *stepCall) { c.reply.Writes = []rpcrdma.Chunk{c.Header.Reply} },
		isProtocol, 0},
}

// TestReplyMustMatchCall gives calls replies that use the offered chunks in different ways (RFC
// 8166 §3.4.6, §4.5). An invalid reply fails its call, or is discarded, and does nothing else.
func TestReplyMustMatchCall(t *testing.T) {
	check := func(c replyCase, makeCall func() *sunrpc.Message) {
		inBubble(t, func(cfg *Config, _ *stepServer) {
			cfg.Recovery, cfg.InlineBytes = SoftErr, MaxInlineBytes
			cfg.Provider.(*stepDevice).attrs = withDepth(17)
		}, func(t *testing.T, b *bubble) {
			b.handleWith(func(call *stepCall) outcome {
				c.change(call)
				return answered
			})
			m := makeCall()
			if err := b.tr.Call(t.Context(), m); !c.want(err) || err == nil && m.ResultDataLen != c.data {
				t.Errorf("%s: got %v, %d bytes of data", c.name, err, m.ResultDataLen)
			}
			sleep(time.Millisecond) // for the next connection after a timeout
			s := b.tr.Stats()
			bad := c.want(&ProtocolError{}) || c.want(&ServerError{}) || strings.Contains("wrong version backward call",
				c.name)
			if s.BadReply > 0 != bad || s.Connects > 1 != c.want(&TimeoutError{}) {
				t.Errorf("%s: got %d bad replies, %d connects", c.name, s.BadReply, s.Connects)
			}
			b.handleWith(nil)
			b.mustSucceed(makeCall())
		})
	}
	for _, c := range readReplies {
		check(c, func() *sunrpc.Message { return readOf(100000) })
	}
	for _, c := range echoReplies {
		check(c, func() *sunrpc.Message {
			m := echo(1, nil, 100000)
			m.ResultDataLen = -1
			return m
		})
	}
}

// TestReplyIsAcceptedOnce answers a call again: after its end, while its LOCAL_INVs are pending, and
// after its caller gave up. The second reply must be counted, and must not return a credit.
func TestReplyIsAcceptedOnce(t *testing.T) {
	for _, c := range []struct {
		name            string
		held, interrupt bool
	}{{"ended", false, false}, {"LOCAL_INVs are pending", true, false}, {"abandoned", true, true}} {
		inBubble(t, nil, func(t *testing.T, b *bubble) {
			b.handleWith(drop)
			b.start(echo(1, nil, 0)) // holds a credit
			b.set(func(s *stepServer) {
				s.holds = func(op verbs.Opcode) bool { return c.held && op == verbs.OpLocalInv }
			})
			p := b.start(readOf(8192))
			if c.interrupt {
				p.interrupt()
			}
			for i := range uint64(2) {
				b.reply(b.calls[1])
				if s := b.tr.Stats(); s.BadXIDs != i || s.InFlight != 1 {
					t.Errorf("%s: reply %d: got %d bad XIDs, %d credits in use; want %d, 1", c.name, i, s.BadXIDs,
						s.InFlight,
						i)
				}
			}
			b.set(func(s *stepServer) { s.holds = nil })
			if s := b.tr.Stats(); !p.done || p.err != nil == !c.interrupt || s.SlotsInUse != 1 || s.Connects != 1 {
				t.Errorf("%s: got returned %v, %v, %d slots in use, %d connects; want 1, 1", c.name, p.done, p.err,
					s.SlotsInUse, s.Connects)
			}
		})
	}
}

// TestRemoteInvalidationNeedsKeyOfCall gives a transport messages that invalidate a key. A message
// that answers no call, or whose call does not have the key, must end the connection, because the
// key may belong to any call (S11).
func TestRemoteInvalidationNeedsKeyOfCall(t *testing.T) {
	const foreign = 4711 << 8
	for _, c := range []struct {
		name   string
		change func(c *stepCall)
		ends   bool
	}{
		{"key of the call", func(c *stepCall) { c.inv = verbs.RKey(c.Writes[0][0].Handle) }, false},
		{"other key", func(c *stepCall) { c.inv = foreign }, true},
		{"earlier key of the MR", func(c *stepCall) { c.inv = verbs.RKey(c.Writes[0][0].Handle ^ 1) }, true},
		{"unknown XID", func(c *stepCall) { c.reply.XID, c.inv = c.reply.XID^1<<30, foreign }, true},
		{"malformed", func(c *stepCall) { c.reply.Vers, c.inv = 9, foreign }, true},
	} {
		inBubble(t, nil, func(t *testing.T, b *bubble) {
			first := b.qp()
			b.handleWith(func(call *stepCall) outcome {
				if call.qp == first {
					c.change(call)
				}
				return answered
			})
			p := b.start(readOf(8192))
			sleep(firstPause)
			s := b.tr.Stats()
			if !p.done || p.err != nil || s.Connects == 2 != c.ends ||
				c.ends && !strings.Contains(s.LastError, "server invalidated a key") {
				t.Errorf("%s: got returned %v, %v, %d connects, last error %q", c.name, p.done, p.err, s.Connects,
					s.LastError)
			}
		})
	}
}

// TestFailedReceiveEndsConnection has a Receive that cannot be posted again. The server may then
// send a message without a Receive, so the connection must end.
func TestFailedReceiveEndsConnection(t *testing.T) {
	var fail atomic.Bool
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Provider = hooked(&hookedProvider{open: func() qpHooks {
			return qpHooks{recv: func() error {
				if fail.CompareAndSwap(true, false) {
					return errPost
				}
				return nil
			}}
		}})
	})
	fail.Store(true)
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Errorf("Call: %v", err)
	}
	kit.Eventually(t, "second connection", func() bool { return tr.Stats().Connects == 2 })
	if s := tr.Stats(); !strings.Contains(s.LastError, errPost.Error()) {
		t.Errorf("last error: got %q, want %v", s.LastError, errPost)
	}
}

// TestDiscardedMessagesAreLoggedRarely has a server answer many calls with invalid messages. The
// first one is logged, and then at most one in each second.
func TestDiscardedMessagesAreLoggedRarely(t *testing.T) {
	var log bytes.Buffer
	inBubble(t, func(c *Config, _ *stepServer) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Warn, Mutex: &sync.Mutex{}})
	}, func(t *testing.T, b *bubble) {
		b.handleWith(func(c *stepCall) outcome {
			c.reply.Vers = 9
			return answered
		})
		for i, want := range []int{1, 1, 1, 2} {
			b.start(echo(1, nil, 0))
			if got := strings.Count(log.String(), "discarded"); got != want {
				t.Errorf("message %d: got %d log lines, want %d", i, got, want)
			}
			sleep(discardPause * 2 / 5)
		}
		if n := b.tr.Stats().BadReply; n != 4 {
			t.Errorf("discarded messages: got %d, want 4", n)
		}
	})
}
