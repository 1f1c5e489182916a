package nfsserve

import (
	"bufio"
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
)

// Limits of the TCP port.
const (
	// from the reading of a call to the end of its reply; more wait in the socket
	callsPerConn = 32
	// of all connections: their replies are the memory that small calls can ask for
	callsAtOnce  = 256
	maxTCPConns  = 512 // of clients on TCP; those of RDMA clients come on top
	acceptPause  = 50 * time.Millisecond
	writeTimeout = 30 * time.Second
)

// A tcpServer answers RPC over TCP. Calls of one connection run in parallel and are answered as
// they finish.
type tcpServer struct {
	serve    func(ctx context.Context, call, reply []byte) ([]byte, error)
	maxConns int
	log      hclog.Logger
}

var messages = sync.Pool{New: func() any { return new([]byte) }}

// run serves l until ctx ends, and returns when every connection has ended.
func (s *tcpServer) run(ctx context.Context, l net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	slots := make(chan struct{}, s.maxConns)
	room := make(chan struct{}, callsAtOnce)
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.log.Warn("accept failed", "listener", l.Addr(), "error", err)
			time.Sleep(acceptPause)
			continue
		}
		select {
		case slots <- struct{}{}:
			conns.Go(func() {
				defer func() { <-slots }()
				s.conn(ctx, c, room)
			})
		default:
			c.Close()
		}
	}
}

// conn serves one connection until its first error. Each of its calls takes a place of room.
func (s *tcpServer) conn(ctx context.Context, c net.Conn, room chan struct{}) {
	var calls sync.WaitGroup
	defer calls.Wait()
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	running := make(chan struct{}, callsPerConn)
	var write sync.Mutex
	r := bufio.NewReaderSize(c, pipeBuffer)
	for {
		call := messages.Get().(*[]byte)
		var err error
		if *call, err = rpctcp.ReadRecord(r, *call, maxRecord); err != nil {
			return
		}
		running <- struct{}{}
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return
		}
		calls.Go(func() {
			defer func() { <-room; <-running }()
			reply := messages.Get().(*[]byte)
			out, err := s.serve(ctx, *call, (*reply)[:0])
			messages.Put(call)
			if err == nil {
				*reply = out
				write.Lock() // one record at a time; the deadline bounds a peer that does not read
				_ = c.SetWriteDeadline(time.Now().Add(writeTimeout))
				err = rpctcp.WriteRecord(c, out)
				write.Unlock()
			}
			messages.Put(reply)
			if err != nil {
				c.Close()
			}
		})
	}
}
