package virtiofs

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// endTimeout is how long a new connection waits for the end of the one before, whose VMM may have
// ended just now.
const endTimeout = 2 * time.Second

// A FileSystem is served to a guest.
type FileSystem interface {
	kernel.FileSystem
	// EndSession closes the files and forgets the nodes of a guest. No request is in progress. The
	// next session must not use their numbers for other nodes and files.
	EndSession()
	// Resume is called before the requests of an earlier process are handled again, if the Server
	// has a State of OpenState. pending are their numbers, as kernel.Request.Unique. Repeated is
	// called when one of them has ended, also if it could not be handled.
	Resume(pending []uint64)
	Repeated(unique uint64)
}

// A Config configures a Server.
type Config struct {
	Socket  string // path
	FS      FileSystem
	Options kernel.Options
	// State is what the next process needs to continue the share. The file system must have a state
	// that lives as long. nil: the share ends with this process.
	State *State
	Log   hclog.Logger
}

// A Server serves a file system to one VMM at a time. Its methods are safe for concurrent use.
type Server struct {
	fs      FileSystem
	opts    kernel.Options
	log     hclog.Logger
	state   *State
	last    atomic.Uint64  // number of the last request
	listens *listener      // nil after StopListening in an earlier process
	work    sync.WaitGroup // the accept loop and the connections
	done    chan struct{}  // closed when the server has ended
	stop    sync.Once      // StopListening

	mu     sync.Mutex
	closed bool
	active *conn // nil without a VMM
}

// Listen makes the socket and accepts VMMs. It replaces a socket without a listener. With a State
// of OpenState it continues the share of an earlier process, and its VMM does not notice. The
// caller closes the Server. The Server closes the State; after an error the caller does.
func Listen(c Config) (_ *Server, err error) {
	if !littleEndian() {
		return nil, errors.New("virtiofs: big-endian hosts are not supported")
	}
	s := &Server{fs: c.FS, opts: c.Options, log: c.Log, state: c.State,
		done: make(chan struct{})}
	if s.state == nil {
		if s.state, err = NewState(); err != nil {
			return nil, fmt.Errorf("virtiofs: %w", err)
		}
		defer func() {
			if err != nil {
				_ = s.state.Close()
			}
		}()
	}
	// Numbers of requests differ from those of earlier processes.
	s.last.Store(uint64(s.state.Restarts()) << 40)
	if s.state.restored {
		err = s.resume(c.Socket)
	} else {
		err = s.listen(c.Socket)
	}
	if err != nil {
		return nil, fmt.Errorf("virtiofs: %w", err)
	}
	if s.listens != nil {
		s.work.Go(s.accept)
	}
	go func() {
		s.work.Wait()
		_ = s.state.Close()
		close(s.done)
	}()
	return s, nil
}

func (s *Server) listen(path string) (err error) {
	if s.listens, err = listen(path); err != nil {
		return err
	}
	if err := s.state.setListener(s.listens); err != nil {
		_ = s.listens.Close()
		return err
	}
	return nil
}

// accept accepts connections until the listener is closed.
func (s *Server) accept() {
	for {
		socket, err := s.listens.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			s.log.Error("accept of a VMM failed", "error", err)
			time.Sleep(time.Second)
			continue
		}
		if c := s.begin(socket); c != nil {
			s.work.Go(func() { s.serve(c) })
		}
	}
}

// begin makes the connection of a VMM the active one. It returns nil if there is another VMM.
func (s *Server) begin(socket *net.UnixConn) *conn {
	s.mu.Lock()
	before := s.active
	s.mu.Unlock()
	if before != nil {
		select {
		case <-before.ended:
		case <-time.After(endTimeout):
			s.log.Warn("refused a second VMM; one VMM at a time can use the share")
			socket.Close()
			return nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		socket.Close()
		return nil
	}
	if err := s.state.beginConn(socket); err != nil {
		s.log.Error("connection of a VMM failed", "error", err)
		socket.Close()
		return nil
	}
	s.active = newConn(s, socket)
	return s.active
}

func (s *Server) serve(c *conn) {
	s.log.Info("VMM connected")
	if err := c.serve(); err != nil {
		s.log.Error("connection of the VMM ended", "error", err)
	} else {
		s.log.Info("VMM disconnected")
	}
	s.mu.Lock()
	s.active = nil
	s.mu.Unlock()
	close(c.ended)
}

// InUse reports whether a guest has the file system mounted.
func (s *Server) InUse() bool {
	s.mu.Lock()
	c := s.active
	s.mu.Unlock()
	return c != nil && c.handler.Load() != nil
}

// StopListening removes the socket. The Server ends with the VMM that is connected. Further calls
// do nothing.
func (s *Server) StopListening() (err error) {
	if s.listens == nil {
		return nil
	}
	// The accept loop keeps the State open until the first call closes the listener.
	s.stop.Do(func() {
		// The other order could leave a share that listens and cannot be reached.
		err = errors.Join(s.state.setListener(nil), s.listens.Close())
	})
	return err
}

// Close removes the socket, ends the connection of the VMM, and ends the requests in progress. It
// returns when the Server has ended.
func (s *Server) Close() error {
	err := s.StopListening()
	s.mu.Lock()
	s.closed = true
	if s.active != nil {
		s.active.hangUp()
	}
	s.mu.Unlock()
	<-s.done
	return err
}

// Wait returns when the Server has ended.
func (s *Server) Wait() { <-s.done }
