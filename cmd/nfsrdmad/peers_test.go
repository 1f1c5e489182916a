package main

import (
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// peer listens on a free port and calls play with each connection. Connections stay open until the
// test ends.
func peer(t *testing.T, play func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
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
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		players.Wait()
	})
	return netip.MustParseAddrPort(l.Addr().String())
}

// A tcpAnswer returns the reply record to a call, or nil to send no reply.
type tcpAnswer func(call sunrpc.CallHeader) []byte

// rpcPeer runs an RPC service on TCP, for example MOUNT.
func rpcPeer(t *testing.T, answer tcpAnswer) netip.AddrPort {
	t.Helper()
	return peer(t, func(c net.Conn) { answerRPC(c, answer) })
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
