package front

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
)

// Commands and structures of FUSE over io_uring (include/uapi/linux/fuse.h).
const (
	cmdRegister       = 1
	cmdCommitAndFetch = 2
	entryOpHeader     = 128 // offset of the fixed part of a request in struct fuse_uring_req_header
	entryInOut        = 256 // offset of struct fuse_uring_ent_in_out
	entryCommitID     = entryInOut + 8
	entryPayloadSize  = entryInOut + 16
	entryHeaderSize   = 288
)

const (
	// registerTries bounds the attempts while the kernel handles the reply to INIT.
	registerTries = 1000
	registerPause = time.Millisecond
)

// An entry handles the requests of one queue, one after the other, on its own thread: only the
// thread that submits a command gets its result.
type entry struct {
	s     *DevFuse
	queue int
	ring  *ioRing
	mem   []byte // slotPage bytes, then the payload
	iov   *[2]unix.Iovec
	place [1][]byte
	call  *Call
	ready func() // called once, when the kernel knows the entry

	caller  atomic.Uint32 // thread that waits for the request in progress, 0 if none
	request atomic.Uint64 // in progress, by its number; 0 for none
	looks   watched
}

// newEntry makes an entry for a queue. The kernel does not know it before run.
func (s *DevFuse) newEntry(queue int) (*entry, error) {
	ring, err := newIORing()
	if err != nil {
		return nil, err
	}
	r := s.rings
	n := r.total.Add(1)
	if n > maxEntries {
		r.total.Add(-1)
		ring.close()
		return nil, fmt.Errorf("%d requests are in progress", maxEntries)
	}
	e := &entry{s: s, queue: queue, ring: ring, mem: r.mem.slot(int(n) - 1), iov: new([2]unix.Iovec)}
	e.iov[0].Base, e.iov[1].Base = &e.mem[0], &e.mem[slotPage]
	e.iov[0].SetLen(entryHeaderSize)
	e.iov[1].SetLen(r.mem.payload)
	e.call = s.NewCall(e)
	e.record().queue = uint64(queue) + 1
	r.queues[queue].idle.Add(1)
	r.entries[n-1].Store(e)
	return e, nil
}

// run handles requests until the connection ends. It calls ready when the kernel knows the entry,
// and also when it never will.
func (e *entry) run(ready func()) {
	runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
	defer e.ring.close()
	e.ready = ready
	defer e.isReady()
	command := e.restore()
	for tries := 0; ; {
		errno := e.fetch(command)
		switch {
		case errno == 0:
			e.isReady()
			e.handle(0)
			command = cmdCommitAndFetch
		case errno == unix.ENOTCONN, errno == unix.ECONNABORTED:
			e.s.retry(unix.ENODEV)
			return
		case command == cmdCommitAndFetch:
			command = cmdRegister // the kernel does not have the request any more
		case errno == unix.EAGAIN && tries < registerTries:
			tries++
			time.Sleep(registerPause)
		default:
			e.s.fs.Warn("a thread of FUSE over io_uring ended: requests may wait", "cpu", e.queue, "error", errno)
			return
		}
	}
}

func (e *entry) isReady() {
	if e.ready != nil {
		e.ready()
		e.ready = nil
	}
}

// fetch gives a command to the kernel, and waits for a request.
func (e *entry) fetch(command uint32) syscall.Errno {
	var addr unsafe.Pointer
	n := 0
	if command == cmdRegister {
		addr, n = unsafe.Pointer(e.iov), len(e.iov)
	}
	var data [24]byte // struct fuse_uring_cmd_req
	binary.NativeEndian.PutUint64(data[8:], e.commitID())
	binary.NativeEndian.PutUint16(data[16:], uint16(e.queue))
	e.ring.command(e.s.fd, command, addr, uint32(n), data[:])
	if e.ready != nil {
		if err := e.ring.enter(false); err != nil {
			return errnoOf(err)
		}
		if !e.ring.ready() {
			e.isReady()
		}
	}
	err := e.ring.enter(true)
	runtime.KeepAlive(e.iov)
	if err != nil {
		return errnoOf(err)
	}
	return e.ring.result()
}

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		errno = unix.EIO
	}
	return errno
}

// restore handles a request that another process received, and returns the first command.
func (e *entry) restore() uint32 {
	r, id := e.record(), e.commitID()
	switch {
	case id == 0:
		return cmdRegister
	case r.replied == id:
		e.applyReply()
	case header(e.mem).Unique == id:
		e.isReady()
		e.handle(resent)
	default: // the kernel has ended the request
		return cmdRegister
	}
	return cmdCommitAndFetch
}

// handle handles one request. mark is resent, or 0.
func (e *entry) handle(mark uint64) {
	received := ledger.Now()
	rings := e.s.rings
	q := &rings.queues[e.queue]
	idle := q.idle.Add(-1)
	if rings.parking.Load() {
		<-rings.parked
	}
	r, id := e.record(), e.commitID()
	if header(e.mem).Opcode == opNotifyReply {
		var empty [headerSize]byte
		putHeader(empty[:], headerSize, 0, id)
		e.Send(empty[:], nil)
	} else {
		if idle <= 0 {
			e.s.grow(e.queue)
		}
		if in, err := e.get(id); err != nil {
			e.s.logger.Printf("FUSE over io_uring: %v", err)
		} else {
			h := header(in)
			h.Unique |= mark
			rings.noteFile(h)
			e.caller.Store(h.Pid)
			e.request.Store(h.Unique)
			e.s.watchSignals()
			e.call.Handle(in, received)
			e.request.Store(0)
		}
		if r.replied != id {
			var failure [headerSize]byte
			e.Send(failure[:putError(failure[:], id, unix.EIO)], nil)
		}
	}
	e.applyReply()
	if q.idle.Add(1); rings.parking.Load() {
		q.idle.Add(-1)
		<-rings.parked
	}
}

// noteFile remembers a node if it is surely a regular file.
func (r *rings) noteFile(h *fuse.InHeader) {
	switch h.Opcode {
	case opOpen, opRead, opWrite, opFsync, opFlush, opGetLk, opSetLk, opSetLkw:
		file := &r.mem.header().files[h.NodeId%notedFiles]
		if atomic.LoadUint64(file) != h.NodeId {
			atomic.StoreUint64(file, h.NodeId)
		}
	}
}

// get returns the request as it is on /dev/fuse. A small request is copied, so that it stays
// complete while the reply is written. The data of a large one stays where it is: only small
// replies belong to large requests.
func (e *entry) get(id uint64) ([]byte, error) {
	r := e.record()
	if r.copied == id {
		return e.mem[slotRequestAt:][:header(e.mem[slotRequestAt:]).Length], nil
	}
	h := header(e.mem)
	payload := int(binary.NativeEndian.Uint32(e.mem[entryPayloadSize:]))
	inHeader := int(unsafe.Sizeof(*h))
	fixed := int(h.Length) - inHeader - payload
	if fixed < 0 || fixed > entryInOut-entryOpHeader || fixed%8 != 0 && payload > 0 || payload > len(e.mem)-slotPage {
		return nil, fmt.Errorf("request %d of %d bytes has a payload of %d", h.Opcode, h.Length, payload)
	}
	start := slotPage - inHeader - fixed
	small := inHeader+fixed+payload <= slotRequestMax
	if small {
		start = slotRequestAt
		copy(e.mem[start+inHeader+fixed:], e.mem[slotPage:slotPage+payload])
	}
	copy(e.mem[start:], e.mem[:inHeader])
	copy(e.mem[start+inHeader:], e.mem[entryOpHeader:entryOpHeader+fixed])
	if small {
		atomic.StoreUint64(&r.copied, id)
	}
	return e.mem[start:][:inHeader+fixed+payload], nil
}

// Place returns the payload of the entry. The request must not be there, because another process
// may handle it again.
func (e *entry) Place(n int) [][]byte {
	payload := e.mem[slotPage:]
	if n > len(payload) || e.record().copied != e.commitID() {
		return nil
	}
	e.place[0] = payload[:n:n]
	return e.place[:]
}

// SendPlaced is Send for data that is in the payload.
func (e *entry) SendPlaced(header []byte, n int) {
	copy(e.mem[slotReplyAt:], header)
	e.complete(len(header), n)
}

// Send puts a reply into the memory of the entry, outside of the memory of the request.
func (e *entry) Send(reply []byte, data [][]byte) {
	payload := e.mem[slotPage:]
	small := reply
	if len(reply) > smallReply {
		small, data = reply[:headerSize], [][]byte{reply[headerSize:]}
	}
	payload = payload[len(small)-headerSize:]
	n := 0
	for _, d := range data {
		if n+len(d) > len(payload) {
			e.s.logger.Printf("reply to FUSE request %d has more than %d bytes", e.commitID(), len(payload))
			small, n = small[:putError(small, 0, unix.EIO)], 0
			break
		}
		n += copy(payload[n:], d)
	}
	copy(e.mem[slotReplyAt:], small)
	e.complete(len(small), n)
}

// complete marks a reply as complete. From now on another process can send it.
func (e *entry) complete(size, data int) {
	r := e.record()
	r.replySize, r.dataSize = uint64(size), uint64(data)
	atomic.StoreUint64(&r.replied, e.commitID())
}

// applyReply moves a complete reply to where the kernel reads it.
func (e *entry) applyReply() {
	r := e.record()
	n := min(max(int(r.replySize), headerSize), smallReply)
	size := min(n-headerSize+int(r.dataSize), len(e.mem)-slotPage)
	copy(e.mem[slotPage:], e.mem[slotReplyAt+headerSize:slotReplyAt+n])
	copy(e.mem, e.mem[slotReplyAt:slotReplyAt+headerSize])
	binary.NativeEndian.PutUint64(e.mem[8:], e.commitID()) // without the mark of resent
	binary.NativeEndian.PutUint32(e.mem[entryPayloadSize:], uint32(size))
}
