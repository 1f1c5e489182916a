package virtiofs

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// A share of an earlier process continues in this order: the memory and the queues of the guest are
// found again, the FUSE session is negotiated again for the decoder, the requests in progress are
// read again from the guest's memory, and then everything starts. Each queue is looked at once, and
// each guest is interrupted once, so no kick and no interrupt is lost.
//
// If the VMM has ended meanwhile, its connection has an end of file, and it ends as usual.

// resume continues the share of an earlier process.
func (s *Server) resume(path string) error {
	r := &s.state.rec
	if r.listener != 0 {
		fds, err := s.state.take(r.listener, 1)
		if err != nil {
			return err
		}
		if s.listens, err = listenerOf(fds[0], path, r.dev, r.ino); err != nil {
			return err
		}
		if !s.listens.isThere() {
			s.log.Warn("another program has removed or replaced the socket; no VMM can connect", "socket", path)
		}
	}
	if err := s.resumeConn(); err != nil {
		if s.listens != nil {
			_ = s.listens.UnixListener.Close() // the socket stays for another attempt
		}
		return err
	}
	s.state.closeLeft()
	return nil
}

func (s *Server) resumeConn() error {
	r := &s.state.rec
	if r.conn == 0 {
		s.fs.Resume(nil)
		s.fs.EndSession()
		return nil
	}
	fds, err := s.state.take(r.conn, 1)
	if err != nil {
		return err
	}
	socket, err := connOf(fds[0])
	if err != nil {
		return err
	}
	c := newConn(s, socket)
	requests, err := c.restore()
	if err != nil {
		c.release()
	}
	if errors.Is(err, errMemory) {
		s.log.Error("the VMM has damaged the guest's memory; its connection ends", "error", err)
		s.fs.Resume(nil)
		s.fs.EndSession()
		s.state.endConn()
		return nil
	} else if err != nil {
		return err
	}
	numbers := make([]uint64, len(requests))
	for i, q := range requests {
		numbers[i] = q.number
	}
	s.fs.Resume(numbers)
	if c.handler.Load() == nil {
		s.fs.EndSession() // the earlier process may have been killed before it did so
	}
	s.log.Info("continued the connection of a VMM", "requests", len(requests))
	s.active = c
	go c.repeat(requests)
	for _, r := range c.rings {
		if err := r.start(); err != nil {
			r.fail(err)
		}
		r.mu.Lock()
		r.signal()
		r.mu.Unlock()
	}
	s.work.Go(func() { s.serve(c) })
	return nil
}

// errMemory means that the guest's memory cannot be mapped again. Only the VMM can cause this.
var errMemory = errors.New("memory of the guest")

// connOf takes over a connection.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "VMM")
	defer f.Close() // FileConn duplicates it
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("connection of the VMM: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("kept connection of the VMM is no Unix socket")
	}
	return u, nil
}

// restore restores a connection from its records. It returns the requests in progress in the order
// in which the guest made them.
func (c *conn) restore() (requests []*request, err error) {
	st := c.s.state
	rec := &st.rec
	c.features, c.protocols = rec.features, rec.protocols
	if rec.memory != 0 {
		fds, err := st.take(rec.memory, int(rec.regionCount))
		if err != nil {
			return nil, err
		}
		c.mem, err = newMemory(rec.regions[:rec.regionCount], fds)
		closeAll(fds)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errMemory, err)
		}
	}
	if rec.initLen > 0 {
		handler := kernel.NewHandler(c.s.fs, c.s.opts)
		if _, err := handler.Negotiate(slices.Clone(rec.init[:rec.initLen])); err != nil {
			return nil, err
		}
		c.handler.Store(handler)
	}
	for i, r := range c.rings {
		if err := r.restore(&st.kept[i]); err != nil {
			return nil, fmt.Errorf("queue %d: %w", i, err)
		}
	}
	for _, r := range c.rings {
		requests = append(requests, r.pending()...)
	}
	slices.SortFunc(requests, func(a, b *request) int { return cmp.Compare(a.number, b.number) })
	return requests, nil
}

// release releases a connection that cannot be continued, without an end for the VMM. It changes no
// record.
func (c *conn) release() {
	c.socket.Close()
	for _, r := range c.rings {
		if r.kick != nil {
			r.kick.Close()
		}
		r.close()
	}
	if c.mem != nil {
		c.mem.release()
	}
}

// repeat handles the requests of an earlier process again.
func (c *conn) repeat(requests []*request) {
	for _, q := range requests {
		r := q.ring // begin recycles a request that it refuses
		if err := q.begin(); err != nil {
			r.fail(err)
		}
	}
}

// settle tells the file system that a request of an earlier process has ended.
func (q *request) settle() {
	if q.resent {
		q.c.s.fs.Repeated(q.number)
	}
}

// restore restores a ring, which does not run yet.
func (r *ring) restore(rec *ringRecord) error {
	st := r.c.s.state
	if r.c.features != 0 {
		r.setFeatures(r.c.features)
	}
	r.enabled, r.base = r.enabled || rec.enabled == 1, rec.base == 1
	r.next = uint16(r.progress.load(counterNext))
	r.size, r.at = int(rec.size), rec.at
	r.busy = make([]bool, r.size)
	for _, k := range []struct {
		id   uint64
		f    **os.File
		kept *uint64
	}{{rec.kick, &r.kick, &r.keptKick}, {rec.call, &r.call, &r.keptCall}} {
		if k.id == 0 {
			continue
		}
		fds, err := st.take(k.id, 1)
		if err == nil {
			err = checkEventfd(fds[0])
		}
		if err != nil {
			return err
		}
		*k.f, *k.kept = os.NewFile(uintptr(fds[0]), "eventfd"), k.id
	}
	if r.c.mem != nil {
		r.mem = r.c.mem.hold()
		if r.at != (addresses{}) {
			_ = r.locate() // as setMemory: they may be from before a reset of the guest
		}
	}
	return nil
}

// pending ends a completion that was in progress, and returns the requests that are.
func (r *ring) pending() (requests []*request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d := completion(r.progress.load(counterCompleting)); d != 0 {
		if r.used != nil {
			_, _ = r.publish(d) // start reports a fault
		}
		r.progress.store(int(uint16(d))%maxRingSize, 0)
		r.progress.store(counterCompleting, 0)
	}
	if r.used != nil {
		_ = guarded(func() { r.usedIdx = r.used.uint16(2) })
	}
	r.skipTaken()
	for head := range maxRingSize {
		number := r.progress.load(head)
		if number == 0 {
			continue
		}
		if head >= r.size || r.desc == nil {
			r.progress.store(head, 0) // the VMM has changed the queue meanwhile
			continue
		}
		q := r.c.newRequest(r, uint16(head))
		q.number, q.resent = number, true
		if err := r.readChain(q); err != nil {
			r.c.s.log.Error("the guest has changed a request in progress", "queue", r.index, "error", err)
			q.in, q.out = nil, nil // begin ends it
		}
		r.hold(q)
		requests = append(requests, q)
	}
	return requests
}

// skipTaken makes the request behind the next one the next, if the earlier process was killed
// between its two records of the next one. The caller holds mu.
func (r *ring) skipTaken() {
	if r.avail == nil {
		return
	}
	var idx, head uint16
	err := guarded(func() {
		idx = r.avail.uint16(2)
		head = r.avail.uint16(ringHeader + availElement*(int(r.next)&(r.size-1)))
	})
	if err == nil && idx != r.next && int(head) < r.size && r.progress.load(int(head)) != 0 {
		r.setNext(r.next + 1)
	}
}

// Discard ends a share that no Server continues: it hangs up, and removes the socket at path.
func (s *State) Discard(path string) error {
	r := &s.rec
	for _, fd := range s.left[r.conn] {
		_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	}
	if r.listener == 0 {
		return nil
	}
	l := &listener{path: path, dev: r.dev, ino: r.ino}
	if !l.isThere() {
		return nil
	}
	return os.Remove(path)
}
