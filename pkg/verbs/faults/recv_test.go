package faults_test

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// receives posts n numbered Receives and returns their buffers.
func (s *side) receives(n int) (bufs [][]byte) {
	for i := range n {
		b := s.Buffer(64)
		s.recv(fmt.Sprint("recv", i), b)
		bufs = append(bufs, b.Buf)
	}
	return bufs
}

// TestDelayedReplyIsOvertaken delays a message by one hour. Later messages arrive before it, and
// Drain delivers it.
func TestDelayedReplyIsOvertaken(t *testing.T) {
	p := withFaults(t, "seed=1,delay-reply=3:1h")
	c, s := connectClient(t, p)
	bufs := c.receives(6)
	for i := range 5 {
		s.send(uint32(100 + i))
	}
	for _, i := range []int{0, 1, 3, 4} {
		e := c.log.want(fmt.Sprint("recv", i), verbs.StatusSuccess)
		if got := binary.BigEndian.Uint32(bufs[i]); got != uint32(100+i) || e.wc.ByteLen != 4 {
			t.Errorf("message %d: got %d and %d bytes, want 4 bytes", i, got, e.wc.ByteLen)
		}
	}
	c.log.wantEmpty()
	c.QP.Drain()
	c.log.want("recv5", verbs.StatusWRFlushErr)
	if e := c.log.want("recv2", verbs.StatusSuccess); e.wc.ByteLen != 4 || e.wc.Opcode != verbs.OpRecv ||
		binary.BigEndian.Uint32(bufs[2]) != 102 {
		t.Errorf("delayed message: got %+v, %d, want 102", e.wc, binary.BigEndian.Uint32(bufs[2]))
	}
	c.log.wantEmpty()
	wantCounts(t, p, faults.Count{Name: "delay-reply", Injected: 1})
}

func TestLostReplyRepostsReceive(t *testing.T) {
	p := withFaults(t, "seed=1,lose-reply=2")
	c, s := connectClient(t, p)
	bufs := c.receives(4)
	for i := range 3 {
		s.send(uint32(i))
	}
	c.log.want("recv0", verbs.StatusSuccess)
	c.log.want("recv2", verbs.StatusSuccess)
	s.send(3) // uses the fourth Receive and is lost
	s.send(4) // uses the Receive of the first lost message
	c.log.want("recv1", verbs.StatusSuccess)
	if got := binary.BigEndian.Uint32(bufs[1]); got != 4 {
		t.Errorf("message: got %d, want 4", got)
	}
	c.log.wantEmpty()
	if st := c.QP.Stats(); st.PostedRecvWRs != 4 || st.RecvCompletions != 3 {
		t.Errorf("Receives: got %d posted and %d completed, want 4 and 3", st.PostedRecvWRs, st.RecvCompletions)
	}
	wantCounts(t, p, faults.Count{Name: "lose-reply", Injected: 2})
}

// TestLostReplyReceiveIsFlushed checks that the Receive of a lost message is flushed when the
// connection ends.
func TestLostReplyReceiveIsFlushed(t *testing.T) {
	p := withFaults(t, "seed=1,lose-reply=1")
	c, s := connectClient(t, p)
	c.receives(2)
	s.send(1)
	s.log.want("send", verbs.StatusSuccess)
	s.ID.Close()
	c.WaitDisconnect()
	got := map[string]verbs.Status{}
	for range 2 {
		e := c.log.next()
		got[e.name] = e.wc.Status
	}
	if got["recv0"] != verbs.StatusWRFlushErr || got["recv1"] != verbs.StatusWRFlushErr {
		t.Errorf("completions: got %v, want both flushed", got)
	}
	c.QP.Drain()
	c.log.wantEmpty()
	wantCounts(t, p, faults.Count{Name: "lose-reply", Injected: 1})
}

func TestCreditLimit(t *testing.T) {
	p := withFaults(t, "seed=1,credits=2")
	c, s := connectClient(t, p)
	for i, m := range []struct{ vers, granted, want, size uint32 }{
		{1, 32, 2, 28}, {1, 2, 2, 28}, {1, 1, 1, 28}, {2, 32, 32, 28}, {1, 32, 32, 12}, {1, 3, 2, 16},
	} {
		in, out := c.Buffer(64), s.Buffer(64)
		for j, v := range []uint32{0xabcd, m.vers, m.granted, 0x77} {
			binary.BigEndian.PutUint32(out.Buf[4*j:], v)
		}
		c.recv("in", in)
		s.post(s.wr("out", &verbs.WorkRequest{Opcode: verbs.OpSend,
			SGList: []verbs.SGE{{Buf: out.Buf[:m.size], LKey: out.LKey}}}))
		c.log.want("in", verbs.StatusSuccess)
		if got := binary.BigEndian.Uint32(in.Buf[8:]); got != m.want {
			t.Errorf("message %d: got %d credits (sent %d, version %d, %d bytes), want %d", i, got, m.granted, m.vers,
				m.size, m.want)
		}
		if m.size > 12 && (binary.BigEndian.Uint32(in.Buf) != 0xabcd || binary.BigEndian.Uint32(in.Buf[12:]) != 0x77) {
			t.Errorf("message %d: other fields changed", i)
		}
	}
	wantCounts(t, p, faults.Count{Name: "credits", Injected: 2})
}

// TestHandlersRunOneAtATime checks that the handler of a delayed message does not run concurrently
// with another one. The counter n has no lock, so that the race detector also checks this.
func TestHandlersRunOneAtATime(t *testing.T) {
	const messages = 30
	p := withFaults(t, "seed=1,delay-reply=~2:200us")
	c, s := connectClient(t, p)
	var busy atomic.Bool
	n, all := 0, make(chan struct{})
	in := c.Buffer(64)
	for range messages {
		_, err := c.QP.PostRecv(&verbs.RecvRequest{SGE: in, Done: func(*verbs.WorkCompletion) {
			if busy.Swap(true) {
				t.Error("two handlers ran concurrently")
			}
			runtime.Gosched()
			if n++; n == messages {
				close(all)
			}
			busy.Store(false)
		}})
		kit.Must(t, err)
	}
	for range messages {
		s.send(1)
		s.log.want("send", verbs.StatusSuccess)
	}
	select {
	case <-all:
	case <-time.After(kit.Timeout):
		t.Fatal("not all messages arrived")
	}
	if injected := p.Counts()[0].Injected; injected == 0 || injected == messages {
		t.Errorf("delayed messages: got %d of %d, want some but not all", injected, messages)
	}
}
