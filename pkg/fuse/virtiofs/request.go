package virtiofs

import (
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

var (
	longAgo    = time.Unix(1, 0)
	noDeadline time.Time
)

// maxIdle bounds the requests that a connection keeps for reuse. Each has at most largeRequest
// bytes of memory for its message.
const maxIdle = 128

const (
	headerSize = int(unsafe.Sizeof(fuse.InHeader{}))
	replySize  = int(unsafe.Sizeof(fuse.OutHeader{}))
	writeSize  = int(unsafe.Sizeof(fuse.WriteIn{}))
	// smallRequest is larger than any request without the data of a WRITE and without the name and
	// the value of an extended attribute.
	smallRequest = 1024
)

// A request is one FUSE request of the guest.
type request struct {
	c       *conn
	ring    *ring
	head    uint16 // its first descriptor
	mem     *memory
	in, out []buffer

	first  [headerSize / 8]uint64 // the header
	msg    []byte                 // the request, in memory of this process
	data   [][]byte               // of a WRITE, in the guest's memory
	unique uint64                 // number that the guest gave
	number uint64                 // number that this share gave
	resent bool                   // an earlier process gave the number
	size   int                    // bytes written to out

	completed bool // the guest has the request back
	received  ledger.Time

	// Kept for later requests.
	memory  []uint64 // for msg
	place   [][]byte // result of Place
	begun   func()   // handle
	fuse    *kernel.Request
	handler *kernel.Handler // of fuse
}

// newRequest returns a request that begins at a descriptor.
func (c *conn) newRequest(r *ring, head uint16) *request {
	c.idle.Lock()
	defer c.idle.Unlock()
	var q *request
	if n := len(c.idle.requests); n > 0 {
		q = c.idle.requests[n-1]
		c.idle.requests = c.idle.requests[:n-1]
	} else {
		q = &request{c: c}
	}
	q.ring, q.head = r, head
	return q
}

// recycle keeps a request that has ended for newRequest.
func (q *request) recycle() {
	for _, bufs := range [...][]buffer{q.in, q.out} {
		clear(bufs)
	}
	clear(q.place)
	clear(q.data)
	q.ring, q.mem, q.msg, q.size, q.resent, q.completed = nil, nil, nil, 0, false, false
	q.in, q.out, q.place, q.data = q.in[:0], q.out[:0], q.place[:0], q.data[:0]
	q.c.idle.Lock()
	defer q.c.idle.Unlock()
	if len(q.c.idle.requests) < maxIdle {
		q.c.idle.requests = append(q.c.idle.requests, q)
	}
}

func (q *request) header() *fuse.InHeader { return (*fuse.InHeader)(unsafe.Pointer(&q.msg[0])) }

// op returns the operation, or 0 before the request was copied.
func (q *request) op() kernel.Op {
	if len(q.msg) < headerSize {
		return 0
	}
	return kernel.Op((*fuse.InHeader)(unsafe.Pointer(&q.first)).Opcode)
}

// begin handles the request here or in a goroutine. An error is a violation.
func (q *request) begin() error {
	q.received = ledger.Now()
	if err := q.copyHeader(); err != nil {
		q.end()
		return err
	}
	if inline(q.op()) {
		q.handle()
		return nil
	}
	if q.begun == nil {
		q.begun = q.handle
	}
	go q.begun()
	return nil
}

// inline reports whether the goroutine of the ring handles a request.
func inline(op kernel.Op) bool {
	switch op {
	case kernel.OpForget, kernel.OpBatchForget, kernel.OpInterrupt, kernel.OpInit, kernel.OpDestroy:
		return true
	}
	return false
}

// copyHeader copies the header, so that begin knows the request. handle copies the rest.
func (q *request) copyHeader() error {
	if n, most := sizeOf(q.in), headerSize+smallRequest+q.c.s.opts.MaxWrite; n < headerSize || n > most {
		return fmt.Errorf("request of %d bytes, want %d to %d", n, headerSize, most)
	}
	q.msg = bytesOfWords(q.first[:])
	if err := copyFrom(q.msg, q.in); err != nil {
		return err
	}
	h := q.header()
	q.unique = h.Unique
	return nil
}

// room returns n bytes for the message.
func (q *request) room(n int) []byte {
	if words := (n + 7) / 8; words > len(q.memory) {
		q.memory = make([]uint64, max(words, smallRequest/8))
	}
	return bytesOfWords(q.memory)[:n]
}

func bytesOfWords(w []uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), 8*len(w))
}

// handle handles the request and gives it back to the guest.
func (q *request) handle() {
	defer q.end()
	defer func() {
		if v := recover(); v != nil {
			q.c.s.log.Error("panic in a request of the guest", "queue", q.ring.index, "operation", q.op(), "panic", v,
				"stack", string(debug.Stack()))
			q.fuse, q.handler = nil, nil // their state is unknown
			q.fail(syscall.EIO)
		}
	}()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // see cannotFault
	size, room := sizeOf(q.in), sizeOf(q.out)
	copied := size
	if h := q.header(); q.op() == kernel.OpWrite && h.TotalExtlen == 0 && size > writeSize {
		if q.data = q.mem.appendPieces(q.data, q.in, writeSize, size-writeSize); len(q.data) > 0 {
			copied = writeSize
		}
	}
	small := q.memory
	switch op := q.op(); {
	case copied <= largeRequest && (room <= largeRequest || !op.RepliesData()):
	case inline(op): // the end of the connection waits for the goroutine of the ring
		q.memory = nil
		defer func() { q.memory = small }()
	default:
		q.memory = <-q.c.large
		defer func() {
			q.c.large <- q.memory
			q.memory = small
		}()
	}
	q.msg = q.room(copied)
	if err := copyFrom(q.msg, q.in); err != nil {
		q.ring.breakWith(err)
		return
	}
	copy(q.msg, bytesOfWords(q.first[:])) // what the guest changes meanwhile has no effect
	h := q.header()
	h.Unique = q.number
	h.Pid = 0 // of the guest, where this process cannot see the thread
	h.Length = uint32(size)
	switch q.op() {
	case kernel.OpInit:
		q.c.beginSession(q)
	case kernel.OpDestroy:
		q.c.endSession()
		q.fail(0)
	case kernel.OpInterrupt:
		if in := (*fuse.InterruptIn)(unsafe.Pointer(h)); size >= int(unsafe.Sizeof(*in)) {
			q.c.interruptAll(func(other *request) bool { return other.unique == in.Unique })
		}
	case kernel.OpForget, kernel.OpBatchForget:
		// The next process must not handle it again. If this one is killed here, the references
		// stay until the end of the session.
		q.complete()
		q.dispatch()
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
	if q.handler != handler {
		q.handler, q.fuse = handler, handler.NewRequest(q)
	}
	q.fuse.Handle(kernel.Message{In: q.msg, Data: q.data, Received: q.received, Resent: q.resent})
}

// Room returns the size of the guest's memory for the reply.
func (q *request) Room() int { return sizeOf(q.out) }

// Place returns the guest's memory for n bytes after the header, if it cannot fault.
func (q *request) Place(n int) [][]byte {
	if n == 0 || replySize+n > sizeOf(q.out) {
		return nil
	}
	if q.place = q.mem.appendPieces(q.place[:0], q.out, replySize, n); !registrable(q.place) {
		return nil
	}
	return q.place
}

// Send copies a reply to the guest's memory, except for the data in the memory of Place.
func (q *request) Send(head []byte, data [][]byte, placed int) {
	binary.LittleEndian.PutUint64(head[8:], q.unique)
	n := len(head) + placed
	for _, d := range data {
		n += len(d)
	}
	if n > sizeOf(q.out) {
		q.c.s.log.Debug("reply does not fit into the guest's buffers", "operation", q.op(), "size", n)
		q.fail(syscall.EIO)
		return
	}
	if err := copyTo(q.out, head, data); err != nil {
		q.ring.breakWith(err)
		return
	}
	q.size = n
	q.complete() // before the file system forgets the request
}

// fail replies with an error, or with success and no data for 0, if there is room for a reply.
func (q *request) fail(errno syscall.Errno) {
	if sizeOf(q.out) < replySize || q.completed {
		return
	}
	var b [replySize]byte
	binary.LittleEndian.PutUint32(b[:], uint32(replySize))
	binary.LittleEndian.PutUint32(b[4:], uint32(-int32(errno)))
	q.Send(b[:], nil, 0)
}

// complete gives the request back to the guest, once.
func (q *request) complete() {
	if q.completed {
		return
	}
	q.completed = true
	q.ring.complete(q, q.size)
}

// end completes the request.
func (q *request) end() {
	defer q.ring.requests.Done()
	defer q.recycle()
	defer q.mem.release()
	defer q.ring.failOnPanic()
	q.complete()
	q.settle()
}

// beginSession handles INIT. A session before ends.
func (c *conn) beginSession(q *request) {
	c.exclusive(func() {
		handler := kernel.NewHandler(c.s.fs, c.s.opts)
		reply, err := handler.Negotiate(q.msg)
		if err == nil {
			if err = c.s.state.setSession(handler.Init()); err != nil {
				reply = nil
				q.fail(syscall.EIO)
			}
		}
		if err != nil {
			c.s.log.Info("guest cannot mount", "error", err)
		} else {
			c.handler.Store(handler)
		}
		if len(reply) > 0 {
			q.Send(reply, nil, 0)
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
		_ = c.s.state.setSession(nil)
	}
	f()
}

// interruptAll interrupts requests in progress.
func (c *conn) interruptAll(which func(*request) bool) {
	c.s.fs.Requests().Interrupt(func(r *kernel.Request) bool {
		q, ok := r.Transport().(*request)
		return ok && q.c == c && which(q)
	})
}
