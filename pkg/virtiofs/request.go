package virtiofs

import (
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/front"
)

var (
	longAgo    = time.Unix(1, 0)
	noDeadline time.Time
)

// A request is one FUSE request of the guest.
type request struct {
	c       *conn
	ring    *ring
	head    uint16 // its first descriptor
	mem     *memory
	in, out []buffer

	msg    []byte // the request, in memory of this process
	unique uint64 // number that the guest gave
	number uint64 // number that this process gave, which no other request of the connection has
	size   int    // bytes written to out
}

func (q *request) header() *fuse.InHeader { return (*fuse.InHeader)(unsafe.Pointer(&q.msg[0])) }

// opcode returns the opcode, or 0 before the request was copied.
func (q *request) opcode() uint32 {
	if len(q.msg) < headerSize {
		return 0
	}
	return q.header().Opcode
}

// begin handles the request here or in a goroutine. An error is a violation.
func (q *request) begin() error {
	if err := q.copyHeader(); err != nil {
		q.end()
		return err
	}
	switch q.opcode() {
	case opForget, opBatchForget, opInterrupt, opInit, opDestroy:
		q.handle()
	default:
		go q.handle()
	}
	return nil
}

// copyHeader copies the header, so that begin knows the request. handle copies the rest.
func (q *request) copyHeader() error {
	if n, most := sizeOf(q.in), headerSize+smallReply+q.c.s.opts.MaxWrite; n < headerSize || n > most {
		return fmt.Errorf("request of %d bytes, want %d to %d", n, headerSize, most)
	}
	q.msg = words(headerSize)
	if err := copyFrom(q.msg, q.in); err != nil {
		return err
	}
	h := q.header()
	q.unique, q.number = h.Unique, q.c.last.Add(1)
	return nil
}

// words returns n bytes that are aligned to 8 bytes.
func words(n int) []byte {
	w := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), 8*len(w))[:n]
}

// handle handles the request and gives it back to the guest.
func (q *request) handle() {
	defer q.end()
	defer func() {
		if v := recover(); v != nil {
			q.c.s.log.Error("panic in a request of the guest", "queue", q.ring.index, "opcode", q.opcode(), "panic", v,
				"stack", string(debug.Stack()))
			q.fail(syscall.EIO)
		}
	}()
	size, room := sizeOf(q.in), sizeOf(q.out)
	if size > largeRequest || room > largeRequest && q.opcode() != opRead {
		q.c.large <- struct{}{}
		defer func() { <-q.c.large }()
	}
	head := q.msg
	q.msg = words(size)
	if err := copyFrom(q.msg, q.in); err != nil {
		q.ring.breakWith(err)
		return
	}
	copy(q.msg, head) // what the guest changes meanwhile has no effect
	h := q.header()
	h.Unique = q.number
	h.Pid = 0 // of the guest, where this process cannot see the thread
	h.Length = uint32(size)
	if errno := check(q.msg, room, q.c.s.opts.MaxWrite); errno != 0 {
		q.fail(errno)
		return
	}
	if q.c.s.ro && changes(q.msg) {
		q.fail(syscall.EROFS)
		return
	}
	switch h.Opcode {
	case opInit:
		q.c.beginSession(q)
	case opDestroy:
		q.c.endSession()
		q.fail(0)
	case opInterrupt:
		unique := (*fuse.InterruptIn)(unsafe.Pointer(&q.msg[0])).Unique
		q.c.interruptAll(func(other *request) bool { return other.unique == unique })
	default:
		q.dispatch()
	}
}

// dispatch lets the file system handle the request.
func (q *request) dispatch() {
	c := q.c
	c.gate.RLock()
	defer c.gate.RUnlock()
	handler := c.handler.Load()
	if handler == nil {
		q.fail(syscall.ENOTCONN)
		return
	}
	c.active.Lock()
	c.active.requests[q.number] = q
	c.active.Unlock()
	defer func() {
		c.active.Lock()
		delete(c.active.requests, q.number)
		c.active.Unlock()
	}()
	handler.NewCall(q.reply).Handle(q.msg)
}

// reply copies a reply to the guest's memory.
func (q *request) reply(head []byte, data [][]byte) {
	binary.LittleEndian.PutUint64(head[8:], q.unique)
	n := len(head)
	for _, d := range data {
		n += len(d)
	}
	if n > sizeOf(q.out) {
		q.c.s.log.Debug("reply does not fit into the guest's buffers", "opcode", q.opcode(), "size", n)
		q.fail(syscall.EIO)
		return
	}
	if err := copyTo(q.out, head, data); err != nil {
		q.ring.breakWith(err)
		return
	}
	q.size = n
}

// fail replies with an error, or with success and no data for 0, if there is room for a reply.
func (q *request) fail(errno syscall.Errno) {
	if sizeOf(q.out) < replySize {
		return
	}
	var b [replySize]byte
	binary.LittleEndian.PutUint32(b[:], uint32(replySize))
	binary.LittleEndian.PutUint32(b[4:], uint32(-int32(errno)))
	q.reply(b[:], nil)
}

// end gives the request back to the guest.
func (q *request) end() {
	defer q.ring.requests.Done()
	defer q.mem.release()
	defer q.ring.failOnPanic()
	q.ring.complete(q, q.size)
}

// beginSession handles INIT. A session before ends.
func (c *conn) beginSession(q *request) {
	c.exclusive(func() {
		handler := front.NewHandler(c.s.fs, c.s.opts)
		reply, err := handler.Negotiate(q.msg)
		if err != nil {
			c.s.log.Info("guest cannot mount", "error", err)
		} else {
			c.handler.Store(handler)
		}
		if len(reply) > 0 {
			q.reply(reply, nil)
		}
	})
}

// endSession ends the session, if there is one.
func (c *conn) endSession() { c.exclusive(func() {}) }

// exclusive interrupts the requests in progress, ends the session, and calls f without requests.
func (c *conn) exclusive(f func()) {
	locked := make(chan struct{})
	interrupted := make(chan struct{})
	go func() {
		defer close(interrupted)
		for {
			select {
			case <-locked:
				return
			case <-time.After(interruptInterval):
				c.interruptAll(func(*request) bool { return true })
			}
		}
	}()
	c.gate.Lock()
	close(locked)
	<-interrupted
	defer c.gate.Unlock()
	if c.handler.Swap(nil) != nil {
		c.s.fs.EndSession()
	}
	f()
}

// interruptAll interrupts requests in progress.
func (c *conn) interruptAll(which func(*request) bool) {
	handler := c.handler.Load()
	if handler == nil {
		return
	}
	c.active.Lock()
	var numbers []uint64
	for number, q := range c.active.requests {
		if which(q) {
			numbers = append(numbers, number)
		}
	}
	c.active.Unlock()
	call := handler.NewCall(func([]byte, [][]byte) {}) // an error means that the request has ended
	for _, number := range numbers {
		msg := words(int(unsafe.Sizeof(fuse.InterruptIn{})))
		in := (*fuse.InterruptIn)(unsafe.Pointer(&msg[0]))
		in.Length, in.Opcode, in.Unique = uint32(len(msg)), opInterrupt, number
		*(*uint64)(unsafe.Pointer(&msg[headerSize])) = number
		call.Handle(msg)
	}
}
