package softiwarp

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var _ verbs.WithdrawingQP = (*qp)(nil)

// A call is a chain of a FastReg and a Send, as a consumer posts it for one RPC.
type call struct {
	reg, send verbs.WorkRequest
	key       uint32
	done      chan verbs.WorkCompletion // of the Send
}

// succeed waits for a completion and checks that it reports success.
func succeed(t *testing.T, what string, done <-chan verbs.WorkCompletion) {
	t.Helper()
	if wc := next(t, "completion of "+what, done); wc.Status != verbs.StatusSuccess {
		t.Errorf("%s: got %v, want success", what, wc.Status)
	}
}

// newCall returns a call that offers mem for writing and sends msg.
func newCall(v *endpoint, mem, msg []byte) *call {
	m := v.allocMR(v.pd, maxFRPages)
	c := &call{key: uint32(m.RKey().WithKey(1)), done: make(chan verbs.WorkCompletion, 2)}
	c.send = verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true, SGList: []verbs.SGE{{Buf: msg}},
		Done: func(wc *verbs.WorkCompletion) { c.done <- *wc }}
	c.reg = verbs.WorkRequest{Next: &c.send, Opcode: verbs.OpFastReg, MR: m, NewKey: 1,
		Access: verbs.AccessLocalWrite | verbs.AccessRemoteWrite, IOVA: winIOVA, Segs: [][]byte{mem},
		Done: func(*verbs.WorkCompletion) {}}
	return c
}

func (c *call) post(v *endpoint) {
	v.t.Helper()
	_, err := v.qp.PostSend(&c.reg)
	kit.Must(v.t, err)
}

// valid reports whether the key of the call is valid.
func (c *call) valid(v *endpoint) bool {
	_, deny := v.qp.access(c.key, winIOVA, 1, verbs.AccessRemoteWrite)
	return deny == granted
}

// TestWithdrawBeforeSend takes back calls while nothing can be sent. The first call is registered,
// because it was at the front of the queue, and the others are not. The peer must receive only the
// call that was not taken back, and its message must be the first one.
func TestWithdrawBeforeSend(t *testing.T) {
	p, v := connectRaw(t, defaultConfig) // sends nothing before an FPDU of the peer
	var calls []*call
	for _, msg := range []string{"first", "second", "third"} {
		c := newCall(v, make([]byte, 100), []byte(msg))
		c.post(v)
		calls = append(calls, c)
	}
	if !calls[0].valid(v) || calls[2].valid(v) {
		t.Fatalf("keys after the posts: got %v, %v; want the first one valid, the last one not", calls[0].valid(v),
			calls[2].valid(v))
	}
	for _, i := range []int{2, 0} {
		c := calls[i]
		if !v.qp.Withdraw(&c.reg) {
			t.Fatalf("call %d: Withdraw failed", i)
		}
		if c.valid(v) {
			t.Errorf("call %d: the key is valid after Withdraw", i)
		}
		clear(c.send.SGList[0].Buf) // belongs to the consumer again
	}
	succeed(t, "Send taken back", calls[0].done)
	if len(calls[2].done) > 0 {
		t.Error("a request completed before those in front of it")
	}
	p.send(zeroWrite())
	if h, b := p.mustNext(); h.op != opSend || h.msn != firstMSN || string(b) != "second" {
		t.Errorf("first message: got opcode %d, MSN %d, %q; want Send, %d, \"second\"", h.op, h.msn, b, firstMSN)
	}
	for _, c := range calls[1:] {
		succeed(t, "Send", c.done)
	}
	v.writerIdle()
	if calls[2].valid(v) {
		t.Error("a registration that was taken back was executed")
	}
	calls[2].post(v) // the MR and the requests are free again
	if h, _ := p.mustNext(); h.op != opSend || h.msn != firstMSN+1 {
		t.Errorf("next message: got opcode %d, MSN %d; want Send, %d", h.op, h.msn, firstMSN+1)
	}
	p.send(tagged(opWrite, true, calls[2].key, winIOVA, []byte("x")))
	kit.Eventually(t, "RDMA Write to the next registration", func() bool { return v.qp.Stats().BytesReceived > 0 })
	for i, c := range calls {
		if v.qp.Withdraw(&c.reg) {
			t.Errorf("call %d was taken back after it was sent or taken back", i)
		}
	}
}

// TestWithdrawBehindFullSocket takes back calls while the peer reads nothing, and the writer is in
// the middle of a Read Response or a Send. Only a call that no goroutine has begun to send can be
// taken back.
func TestWithdrawBehindFullSocket(t *testing.T) {
	const size = 1 << 20
	for _, respond := range []bool{true, false} {
		p, v := connectRaw(t, smallBuffers)
		p.send(zeroWrite())
		v.writerIdle()
		big := newCall(v, make([]byte, 1), make([]byte, size))
		if respond {
			_, key := v.register(verbs.AccessRemoteRead, 1, make([]byte, size/2))
			p.send(readReq(readRequest{msn: 1, sinkSTag: 7, size: size / 2, srcSTag: key, srcTO: winIOVA}))
		} else {
			big.post(v)
		}
		p.mustNext() // the writer is in the middle of the message
		if !respond && v.qp.Withdraw(&big.reg) {
			t.Fatal("a Send was taken back in the middle")
		}
		mem := []byte("message")
		c := newCall(v, make([]byte, 100), mem)
		c.post(v)
		if !v.qp.Withdraw(&c.reg) {
			t.Fatalf("Read Response %v: Withdraw failed", respond)
		}
		clear(mem)
		inv := v.post(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: verbs.RKey(c.key)})
		if respond { // nothing else is in the send queue
			succeed(t, "Send taken back", c.done)
			succeed(t, "LocalInv", inv)
		}
		last := newCall(v, make([]byte, 1), []byte("last"))
		last.post(v)
		for msn := uint32(firstMSN); ; {
			h, b := p.mustNext()
			if h.op == opSend && h.msn != msn {
				t.Fatalf("got MSN %d, want %d", h.msn, msn)
			}
			if h.op == opSend && h.last {
				msn++
			}
			if string(b) == "last" {
				break
			}
			if len(b) == len(mem) {
				t.Fatal("a call that was taken back was sent")
			}
		}
		succeed(t, "last Send", last.done)
		if !respond {
			succeed(t, "Send taken back", c.done)
			succeed(t, "LocalInv", inv)
		}
	}
}

// TestWithdrawAfterDisconnect takes back a call on a connection that has ended.
func TestWithdrawAfterDisconnect(t *testing.T) {
	_, v := connectRaw(t, defaultConfig)
	c := newCall(v, make([]byte, 100), []byte("call"))
	c.post(v)
	v.qp.Drain()
	if v.qp.Withdraw(&c.reg) {
		t.Error("a flushed call was taken back")
	}
	if wc := <-c.done; wc.Status != verbs.StatusWRFlushErr || len(c.done) > 0 {
		t.Errorf("Send: got %v, want one flush", wc.Status)
	}
}
