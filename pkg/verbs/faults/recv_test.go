package faults_test

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// receives posts n Receives named by their order, and returns their buffers.
func (s *side) receives(n int) (bufs [][]byte) {
	for i := range n {
		b := s.buffer(64)
		s.recv(fmt.Sprint("recv", i), b)
		bufs = append(bufs, b.Buf)
	}
	return bufs
}

// TestDelayReply: the message delayed by an hour is overtaken by the others, and delivered when the
// queue is drained.
func TestDelayReply(t *testing.T) {
	p := broken(t, "seed=1,delay-reply=3:1h")
	c, s := clean(t, p)
	bufs := c.receives(6)
	for i := range 5 {
		s.send(uint32(100 + i))
	}
	for _, i := range []int{0, 1, 3, 4} {
		e := c.log.want(fmt.Sprint("recv", i), verbs.StatusSuccess)
		if got := binary.BigEndian.Uint32(bufs[i]); got != uint32(100+i) || e.wc.ByteLen != 4 {
			t.Errorf("message %d is %d of %d octets", i, got, e.wc.ByteLen)
		}
	}
	c.log.quiet()
	c.qp.Drain()
	c.log.want("recv5", verbs.StatusWRFlushErr)
	if e := c.log.want("recv2", verbs.StatusSuccess); e.wc.ByteLen != 4 || e.wc.Opcode != verbs.OpRecv ||
		binary.BigEndian.Uint32(bufs[2]) != 102 {
		t.Errorf("the delayed message: %+v, %d", e.wc, binary.BigEndian.Uint32(bufs[2]))
	}
	c.log.quiet()
	wantCounts(t, p, faults.Count{Name: "delay-reply", Injected: 1})
}

// TestDelayReplyEnds: the delay ends by itself.
func TestDelayReplyEnds(t *testing.T) {
	p := broken(t, "seed=1,delay-reply=1:20ms")
	c, s := clean(t, p)
	c.receives(1)
	s.send(1)
	c.log.want("recv0", verbs.StatusSuccess)
	wantCounts(t, p, faults.Count{Name: "delay-reply", Injected: 1})
}

func TestLoseReply(t *testing.T) {
	p := broken(t, "seed=1,lose-reply=2")
	c, s := clean(t, p)
	bufs := c.receives(4)
	for i := range 3 {
		s.send(uint32(i))
	}
	c.log.want("recv0", verbs.StatusSuccess)
	c.log.want("recv2", verbs.StatusSuccess)
	s.send(3) // into the fourth Receive, and lost
	s.send(4) // into the Receive of the first that was lost
	c.log.want("recv1", verbs.StatusSuccess)
	if got := binary.BigEndian.Uint32(bufs[1]); got != 4 {
		t.Errorf("message %d arrived, want 4", got)
	}
	c.log.quiet()
	if st := c.qp.Stats(); st.PostedRecvWRs != 4 || st.RecvCompletions != 3 {
		t.Errorf("%d Receives posted and %d completed, want 4 and 3", st.PostedRecvWRs, st.RecvCompletions)
	}
	wantCounts(t, p, faults.Count{Name: "lose-reply", Injected: 2})
}

// TestLoseReplyFlushes: a Receive whose message was lost is flushed at the end like any other.
func TestLoseReplyFlushes(t *testing.T) {
	p := broken(t, "seed=1,lose-reply=1")
	c, s := clean(t, p)
	c.receives(2)
	s.send(1)
	s.log.want("send", verbs.StatusSuccess)
	s.id.Close()
	c.wantGone()
	got := map[string]verbs.Status{}
	for range 2 {
		e := c.log.next()
		got[e.name] = e.wc.Status
	}
	if got["recv0"] != verbs.StatusWRFlushErr || got["recv1"] != verbs.StatusWRFlushErr {
		t.Errorf("completions %v, want both flushed", got)
	}
	c.qp.Drain()
	c.log.quiet()
	wantCounts(t, p, faults.Count{Name: "lose-reply", Injected: 1})
}

func TestCredits(t *testing.T) {
	p := broken(t, "seed=1,credits=2")
	c, s := clean(t, p)
	for i, m := range []struct{ vers, granted, want, size uint32 }{
		{1, 32, 2, 28}, {1, 2, 2, 28}, {1, 1, 1, 28}, {2, 32, 32, 28}, {1, 32, 32, 12}, {1, 3, 2, 16},
	} {
		in, out := c.buffer(64), s.buffer(64)
		for j, v := range []uint32{0xabcd, m.vers, m.granted, 0x77} {
			binary.BigEndian.PutUint32(out.Buf[4*j:], v)
		}
		c.recv("in", in)
		s.post(s.wr("out", &verbs.WorkRequest{Opcode: verbs.OpSend,
			SGList: []verbs.SGE{{Buf: out.Buf[:m.size], LKey: out.LKey}}}))
		c.log.want("in", verbs.StatusSuccess)
		if got := binary.BigEndian.Uint32(in.Buf[8:]); got != m.want {
			t.Errorf("message %d: %d credits of %d in version %d and %d octets, want %d", i, got, m.granted, m.vers,
				m.size, m.want)
		}
		if m.size > 12 && (binary.BigEndian.Uint32(in.Buf) != 0xabcd || binary.BigEndian.Uint32(in.Buf[12:]) != 0x77) {
			t.Errorf("message %d: other fields changed", i)
		}
	}
	wantCounts(t, p, faults.Count{Name: "credits", Injected: 2})
}

// TestHandlersOneAtATime: a delayed message is not delivered beside another. The handler's counter
// has no lock: the race detector watches too.
func TestHandlersOneAtATime(t *testing.T) {
	const messages = 60
	p := broken(t, "seed=1,delay-reply=~2:200us")
	c, s := clean(t, p)
	var busy atomic.Bool
	n, all := 0, make(chan struct{})
	in := c.buffer(64)
	for range messages {
		_, err := c.qp.PostRecv(&verbs.RecvRequest{SGE: in, Done: func(*verbs.WorkCompletion) {
			if busy.Swap(true) {
				t.Error("two handlers at a time")
			}
			time.Sleep(50 * time.Microsecond)
			if n++; n == messages {
				close(all)
			}
			busy.Store(false)
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for range messages {
		s.send(1)
		s.log.want("send", verbs.StatusSuccess)
	}
	select {
	case <-all:
	case <-time.After(patience):
		t.Fatal("messages are missing")
	}
	if injected := p.Counts()[0].Injected; injected == 0 || injected == messages {
		t.Errorf("%d of %d messages were delayed", injected, messages)
	}
}
