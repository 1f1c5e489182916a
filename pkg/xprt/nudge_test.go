package xprt

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// readFPDU reads one FPDU without a CRC and returns its ULPDU.
func readFPDU(c net.Conn) ([]byte, error) {
	var l [2]byte
	if _, err := io.ReadFull(c, l[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(l[:]))
	b := make([]byte, (2+n+3)&^3-2+4) // pad and CRC field
	_, err := io.ReadFull(c, b)
	return b[:n], err
}

// sendFPDU returns an FPDU with an RDMAP Send of msg.
func sendFPDU(msn uint32, msg []byte) []byte {
	u := []byte{0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0}
	u = binary.BigEndian.AppendUint32(u, msn)
	u = append(append(u, 0, 0, 0, 0), msg...)
	b := append(binary.BigEndian.AppendUint16(nil, uint16(len(u))), u...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return append(b, 0, 0, 0, 0)
}

// A stuckServer reads the first FPDU of a connection only after another has arrived, as stock siw
// sometimes does.
type stuckServer struct {
	t      *testing.T
	nudged chan int // number of nudges before each reply
}

// serve answers two calls. It delays the second reply, which must not cause a nudge.
func (s *stuckServer) serve(c *net.TCPConn) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	req := make([]byte, 20+4+8)
	if _, err := io.ReadFull(c, req); err != nil {
		s.t.Error(err)
		return
	}
	rep := append([]byte("MPA ID Rep Frame"), 0x10, 2, 0, 12, 0, 0, 0, 16)
	c.Write(rpcrdma.Private{SendSize: 4096, RecvSize: 4096}.Append(rep))
	for msn := uint32(1); msn <= 2; msn++ {
		call, err := readFPDU(c)
		nudges := 0
		if msn == 2 {
			// A nudge may have been in flight when the first reply was sent.
			for err == nil && call[1]&0xf == 0 {
				call, err = readFPDU(c)
			}
			time.Sleep(150 * time.Millisecond)
		} else if err == nil {
			var next []byte
			if next, err = readFPDU(c); err == nil {
				nudges++
				if len(next) != 14 || !bytes.Equal(next[:2], []byte{0xc1, 0x40}) {
					s.t.Errorf("FPDU after the first call: got %x, want an empty RDMA Write", next)
				}
			}
		}
		if err != nil || call[1]&0xf != 3 {
			s.t.Errorf("call %d: got %x, %v; want a Send", msn, call, err)
			return
		}
		xid := binary.BigEndian.Uint32(call[18:])
		reply := binary.BigEndian.AppendUint32(nil, xid)
		// Version, credits, RDMA_MSG, three empty lists.
		for _, w := range []uint32{1, 32, 0, 0, 0, 0} {
			reply = binary.BigEndian.AppendUint32(reply, w)
		}
		c.Write(sendFPDU(msn, sunrpc.AppendAcceptedReply(reply, xid, sunrpc.Success)))
		s.nudged <- nudges
	}
	c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if b, err := readFPDU(c); err == nil {
		s.t.Errorf("after two replies: got %x, want nothing", b)
	}
}

// TestNudge checks that an empty RDMA Write wakes a server that has not read the first call. A
// server that has answered must get no RDMA Write.
func TestNudge(t *testing.T) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &stuckServer{t: t, nudged: make(chan int, 2)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if c, err := l.AcceptTCP(); err == nil {
			s.serve(c)
		}
	}()
	defer func() { l.Close(); <-ended }()
	x, err := New(Config{KeepAlive: -1, Provider: softiwarp.New(softiwarp.Config{}),
		Addr: l.Addr().(*net.TCPAddr).AddrPort(), Slots: 4, NudgeAfter: 30 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := x.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	var previous uint64
	for call := range 2 {
		if err := x.Call(ctx, &sunrpc.Message{Prog: echoProg, Vers: 1, MaxResult: 100,
			Result: make([]byte, 0, 100)}); err != nil {
			t.Fatalf("call %d: %v", call, err)
		}
		if n := <-s.nudged; n != 1-call {
			t.Errorf("nudges before the reply to call %d: got %d, want %d", call, n, 1-call)
		}
		// The count may be late by one nudge.
		if n := x.Stats().Nudges; call == 0 && n == 0 || call == 1 && n > previous+1 {
			t.Errorf("nudges after call %d: got %d, %d before", call, n, previous)
		} else {
			previous = n
		}
	}
	<-ended
}
