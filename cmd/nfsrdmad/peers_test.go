package main

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// peerAt listens on addr and calls play with each connection. Connections stay open until the test
// ends.
func peerAt(t *testing.T, addr string, play func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(playTCP(l, play))
	return netip.MustParseAddrPort(l.Addr().String())
}

// playTCP calls play with each connection of l until the returned function is called.
func playTCP(l net.Listener, play func(net.Conn)) (end func()) {
	var mu sync.Mutex
	var conns []net.Conn // guarded by mu
	var players sync.WaitGroup
	players.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			players.Go(func() { play(c) })
		}
	})
	return func() {
		l.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		players.Wait()
	}
}

func peer(t *testing.T, play func(net.Conn)) netip.AddrPort { return peerAt(t, "127.0.0.1:0", play) }

// A tcpAnswer returns the reply record to a call, or nil to send no reply.
type tcpAnswer func(call sunrpc.CallHeader) []byte

// rpcPeer runs an RPC service on TCP, for example MOUNT or the port mapper.
func rpcPeer(t *testing.T, addr string, answer tcpAnswer) netip.AddrPort {
	t.Helper()
	return peerAt(t, addr, func(c net.Conn) { answerRPC(c, answer) })
}

func playRPC(l net.Listener, answer tcpAnswer) (end func()) {
	return playTCP(l, func(c net.Conn) { answerRPC(c, answer) })
}

func answerRPC(c net.Conn, answer tcpAnswer) {
	for {
		record, err := rpctcp.ReadRecord(c, nil, 4096)
		if err != nil {
			return
		}
		call, _, err := sunrpc.ParseCall(record)
		if err != nil {
			return
		}
		reply := answer(call)
		if reply == nil {
			continue
		}
		if rpctcp.WriteRecord(c, reply) != nil {
			return
		}
	}
}

// words returns accepted replies with the given results.
func words(results ...uint32) tcpAnswer {
	return func(call sunrpc.CallHeader) []byte { return acceptedWords(call.XID, results...) }
}

func acceptedWords(xid uint32, results ...uint32) []byte {
	b := sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success)
	for _, w := range results {
		b = sunrpc.AppendUint32(b, w)
	}
	return b
}

// goodMount replies to MNT with a handle of one word and AUTH_SYS (RFC 1813 §5.2.1).
var goodMount = words(0, 4, 0x12345678, 1, sunrpc.FlavorSys)

// An rdmaCall is a call received over RDMA.
type rdmaCall struct {
	header rpcrdma.Header
	rpc    sunrpc.CallHeader
}

// wire returns a message with header h and an RPC reply.
func wire(h rpcrdma.Header, reply []byte) []byte { return append(h.Append(nil), reply...) }

// reply returns the header of a valid reply.
func (c *rdmaCall) reply() rpcrdma.Header {
	return rpcrdma.Header{XID: c.header.XID, Vers: rpcrdma.Version, Credits: 16, Proc: rpcrdma.ProcMsg}
}

// results returns a valid RPC reply to the calls of a mount, GETATTR and FSINFO (RFC 1813 §3.3.1,
// §3.3.19).
func (c *rdmaCall) results() []byte {
	switch nfs3.Proc(c.rpc.Proc) {
	case nfs3.ProcGetAttr:
		return acceptedWords(c.rpc.XID, 0, uint32(nfs3.NF3DIR), 0o755, 2, 0, 0, 0, 4096, 0, 4096, 0, 0, 0, 1, 0, 2, 0,
			0, 0, 0, 0, 0)
	case nfs3.ProcFSInfo:
		return acceptedWords(c.rpc.XID, 0, 0, 1<<20, 1<<20, 4096, 1<<20, 1<<20, 4096, 4096, 0x7fffffff, 0xffffffff, 0,
			1, 0x1b)
	}
	return sunrpc.AppendAcceptedReply(nil, c.rpc.XID, sunrpc.ProcUnavail)
}

// valid returns a valid reply message.
func (c *rdmaCall) valid() []byte { return wire(c.reply(), c.results()) }

// rdmaPeer runs an NFS/RDMA server on softiwarp. answer returns the message to send for each call,
// or nil to send nothing.
func rdmaPeer(t *testing.T, answer func(*rdmaCall) []byte) netip.AddrPort {
	t.Helper()
	l, err := softiwarp.New(softiwarp.Config{}).Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			req, err := l.Accept(ctx)
			if err != nil {
				return
			}
			conns.Go(func() {
				if err := serveRDMA(ctx, req, answer); err != nil {
					t.Error(err)
				}
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		l.Close()
		conns.Wait()
	})
	return l.Addr()
}

const (
	peerQueue  = 32
	peerInline = 4096
)

func serveRDMA(ctx context.Context, req verbs.ConnRequest, answer func(*rdmaCall) []byte) error {
	dev := req.Device()
	pd, err := dev.AllocPD()
	if err != nil {
		return err
	}
	defer pd.Dealloc()
	cq, err := dev.CreateCQ(2 * peerQueue)
	if err != nil {
		return err
	}
	defer cq.Close()
	defer req.Close()
	gone := make(chan struct{})
	qp, err := req.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: peerQueue, MaxRecvWR: peerQueue,
		MaxSendSGE:   1,
		OnDisconnect: func(error) { close(gone) }})
	if err != nil {
		return err
	}
	calls := make(chan []byte, peerQueue)
	for range peerQueue / 2 {
		r := &verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, peerInline)}}
		r.Done = func(wc *verbs.WorkCompletion) {
			if wc.Status == verbs.StatusSuccess {
				calls <- bytes.Clone(r.SGE.Buf[:wc.ByteLen])
				_, _ = qp.PostRecv(r)
			}
		}
		if _, err := qp.PostRecv(r); err != nil {
			return err
		}
	}
	private := rpcrdma.Private{SendSize: peerInline, RecvSize: peerInline}.Append(nil)
	if req.Accept(ctx, verbs.ConnParam{PrivateData: private, InitiatorDepth: 16}) != nil {
		return nil // the client closed the connection
	}
	for {
		select {
		case msg := <-calls:
			var c rdmaCall
			n, err := c.header.Decode(msg)
			if err != nil {
				return err
			}
			if c.rpc, _, err = sunrpc.ParseCall(msg[n:]); err != nil {
				return err
			}
			if out := answer(&c); out != nil {
				sent := make(chan struct{})
				wr := &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: out}}, Signaled: true,
					Done: func(*verbs.WorkCompletion) { close(sent) }}
				if _, err := qp.PostSend(wr); err == nil {
					<-sent
				}
			}
		case <-gone:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}
