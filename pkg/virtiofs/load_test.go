package virtiofs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A load makes requests on one queue, from one goroutine for each slot.
type load struct {
	v *vmm
	q *queue

	mu     *sync.Mutex     // of all loads
	result [slots]chan int // of requests in progress: their sizes
	failed atomic.Pointer[string]
}

func (l *load) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	l.failed.CompareAndSwap(nil, &text)
}

// interruptTimeout is longer than a process takes to continue the share.
const interruptTimeout = 10 * time.Second

// collect gives the requests that come back to their goroutines. It looks at the ring only after an
// interrupt, as a guest does.
func (l *load) collect(done <-chan struct{}) {
	ring := l.q.usedRing()
	for {
		select {
		case <-done:
			return
		default:
		}
		word := binary.LittleEndian.Uint32(ring)
		if uint16(word>>16) == l.q.lastUsed {
			fds := []unix.PollFd{{Fd: int32(l.q.call), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, int(interruptTimeout.Milliseconds()))
			if n == 1 {
				_, _ = unix.Read(l.q.call, make([]byte, 8))
			} else if err == nil && uint16(binary.LittleEndian.Uint32(ring)>>16) != l.q.lastUsed {
				l.fail("a request came back without interrupt")
			}
			continue
		}
		e := ring[ringHeader+usedElement*(int(l.q.lastUsed)%ringSize):]
		head, size := int(binary.LittleEndian.Uint32(e)), int(binary.LittleEndian.Uint32(e[4:]))
		l.q.lastUsed++
		l.mu.Lock()
		var result chan int
		if head%2 == 0 && head/2 < slots {
			result = l.result[head/2]
			l.result[head/2] = nil
		}
		l.mu.Unlock()
		if result == nil {
			l.fail("descriptor %d came back twice", head)
			return
		}
		result <- size
	}
}

// do makes a request in a slot and waits for the reply.
func (l *load) do(slot int, out int, encode func() []byte) ([]byte, syscall.Errno) {
	result := make(chan int, 1)
	l.mu.Lock()
	if out > 0 {
		out += replySize
	}
	unique := l.v.unique
	in := encode()
	if l.v.unique != unique+1 {
		l.fail("one request has one number")
	}
	l.q.prepare(slot, in, out)
	l.result[slot] = result
	l.q.offer(2 * slot)
	l.mu.Unlock()
	select {
	case size := <-result:
		if out == 0 {
			return nil, 0
		}
		b := l.v.mem[slotAt(slot)+half:][:size]
		if size < replySize || int(binary.LittleEndian.Uint32(b)) != size ||
			binary.LittleEndian.Uint64(b[8:]) != binary.LittleEndian.Uint64(in[8:]) {
			l.fail("reply of %d bytes: % x", size, b[:min(size, 16)])
			return nil, unix.EPROTO
		}
		return bytes.Clone(b[replySize:]), syscall.Errno(-int32(binary.LittleEndian.Uint32(b[4:])))
	case <-time.After(testTimeout):
		l.fail("no reply to opcode %d", binary.LittleEndian.Uint32(in[4:]))
		return nil, unix.ETIMEDOUT
	}
}

// A worker makes requests in one slot, one after the other.
type worker struct {
	*load
	slot   int
	name   string
	rounds int
	node   uint64 // of its file
	fh     uint64
	size   int
	lines  *fuse.CreateOut // its file for appending
}

func (w *worker) want(what string, errno, want syscall.Errno) bool {
	if errno != want && w.failed.Load() == nil {
		w.fail("%s in round %d of %s: got %v, want %v", what, w.rounds, w.name, errno, want)
	}
	return errno == want
}

// as decodes a reply, which must be no error.
func as[T any](w *worker, what string, b []byte, errno syscall.Errno) *T {
	v := new(T)
	if w.want(what, errno, 0) {
		copy(bytesOf(v), b)
	}
	return v
}

func (w *worker) entry(what string, body func() []byte) *fuse.EntryOut {
	b, errno := w.do(w.slot, 256, body)
	return as[fuse.EntryOut](w, what, b, errno)
}

func (w *worker) open(name string, flags uint32) *fuse.CreateOut {
	b, errno := w.do(w.slot, 256, func() []byte {
		return encode(w.v, opCreate, 1, fuse.CreateIn{Flags: flags | syscall.O_CREAT, Mode: 0o644}, name, "\x00")
	})
	return as[fuse.CreateOut](w, "create", b, errno)
}

func (w *worker) begin() {
	f := w.open(w.name, syscall.O_RDWR|syscall.O_EXCL)
	w.node, w.fh = f.NodeId, f.Fh
	w.lines = w.open(w.name+"-lines", syscall.O_WRONLY|syscall.O_APPEND|syscall.O_EXCL)
}

// pattern is the content of the file of a worker.
func (w *worker) pattern(off, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		at := off + i
		b[i] = byte(at*7 + at>>8 + len(w.name) + w.slot)
	}
	return b
}

// round makes requests whose second execution would fail or change the result.
func (w *worker) round(rng *rand.Rand) {
	w.rounds++
	simple := func(what string, op uint32, body string) bool {
		_, errno := w.do(w.slot, 64, func() []byte { return encode(w.v, op, 1, fuse.InHeader{}, body) })
		return w.want(what, errno, 0)
	}
	dir := fmt.Sprintf("%s-d%d", w.name, w.rounds)
	d := w.entry("mkdir", func() []byte { return encode(w.v, opMkdir, 1, fuse.MkdirIn{Mode: 0o755}, dir, "\x00") })
	l := w.entry("lookup", func() []byte { return encode(w.v, opLookup, 1, fuse.InHeader{}, dir, "\x00") })
	if d.NodeId != l.NodeId {
		w.fail("lookup of a new directory: got node %d, want %d", l.NodeId, d.NodeId)
	}
	// One of two references: the node must stay.
	w.do(w.slot, 0, func() []byte {
		return encode(w.v, opForget, d.NodeId, fuse.ForgetIn{Nlookup: 1})
	})
	_, errno := w.do(w.slot, 256, func() []byte { return encode(w.v, opGetAttr, d.NodeId, fuse.GetAttrIn{}) })
	w.want("getattr of a directory with a reference", errno, 0)
	simple("rmdir", opRmdir, dir+"\x00")

	n := 1 + rng.IntN(60000)
	data := w.pattern(w.size, n)
	_, errno = w.do(w.slot, 64, func() []byte {
		return encode(w.v, opWrite, w.node, fuse.WriteIn{Fh: w.fh, Offset: uint64(w.size), Size: uint32(n)},
			string(data))
	})
	w.want("write", errno, 0)
	w.size += n
	at := rng.IntN(w.size)
	n = min(w.size-at, 1+rng.IntN(60000))
	b, errno := w.do(w.slot, n, func() []byte {
		return encode(w.v, opRead, w.node, fuse.ReadIn{Fh: w.fh, Offset: uint64(at), Size: uint32(n)})
	})
	if w.want("read", errno, 0) && !bytes.Equal(b, w.pattern(at, n)) {
		w.fail("read of %d bytes at %d of %s: wrong data, %d bytes", n, at, w.name, len(b))
	}
	line := fmt.Sprintf("line %d\n", w.rounds)
	_, errno = w.do(w.slot, 64, func() []byte {
		return encode(w.v, opWrite, w.lines.NodeId, fuse.WriteIn{Fh: w.lines.Fh, Size: uint32(len(line)),
			Flags: syscall.O_WRONLY | syscall.O_APPEND}, line)
	})
	w.want("append", errno, 0)

	name := fmt.Sprintf("%s-f%d", w.name, w.rounds)
	f := w.open(name, syscall.O_RDWR|syscall.O_EXCL)
	_, errno = w.do(w.slot, 64, func() []byte {
		newDirAndFlags := string(append(le64(1), le64(0)...))
		return encode(w.v, opRename2, 1, fuse.InHeader{}, newDirAndFlags, name, "\x00", name, "x\x00")
	})
	w.want("rename", errno, 0)
	simple("unlink", opUnlink, name+"x\x00")
	_, errno = w.do(w.slot, 64, func() []byte { return encode(w.v, opRelease, f.NodeId, fuse.ReleaseIn{Fh: f.Fh}) })
	w.want("release", errno, 0)
	w.do(w.slot, 0, func() []byte { return encode(w.v, opForget, f.NodeId, fuse.ForgetIn{Nlookup: 1}) })
}

// end writes all data, and compares the files with those on the server.
func (w *worker) end(dir string) {
	for node, fh := range map[uint64]uint64{w.node: w.fh, w.lines.NodeId: w.lines.Fh} {
		_, errno := w.do(w.slot, 64, func() []byte { return encode(w.v, opFsync, node, fuse.FsyncIn{Fh: fh}) })
		w.want("fsync", errno, 0)
	}
	b, err := os.ReadFile(filepath.Join(dir, w.name))
	if err != nil || !bytes.Equal(b, w.pattern(0, w.size)) {
		w.fail("file %s on the server: got %d bytes, %v, want %d", w.name, len(b), err, w.size)
	}
	var lines strings.Builder
	for i := range w.rounds {
		fmt.Fprintf(&lines, "line %d\n", i+1)
	}
	if b, err = os.ReadFile(filepath.Join(dir, w.name+"-lines")); err != nil || string(b) != lines.String() {
		w.fail("lines of %s on the server: got %d bytes, %v, want %d", w.name, len(b), err, lines.Len())
	}
}

// exchange sends a message and returns the reply, of which there must be one.
func (v *vmm) exchange(kind uint32, payload []byte, fds ...int) ([]byte, error) {
	flags := uint32(flagNeedReply)
	if kind == msgGetVringBase || kind == msgGetFeatures {
		flags = 0
	}
	if err := v.conn.SetDeadline(time.Now().Add(testTimeout)); err != nil {
		return nil, err
	}
	if err := v.send(kind, flags, payload, fds...); err != nil {
		return nil, err
	}
	b := make([]byte, messageHeader+8)
	if _, err := io.ReadFull(v.conn, b); err != nil {
		return nil, err
	}
	if got := binary.LittleEndian.Uint32(b); got != kind || binary.LittleEndian.Uint32(b[8:]) != 8 {
		return nil, fmt.Errorf("reply to message %d: got % x", kind, b)
	}
	if reply := b[messageHeader:]; flags == 0 || binary.LittleEndian.Uint64(reply) == 0 {
		return reply, nil
	}
	return nil, fmt.Errorf("message %d was refused", kind)
}

// messages sends messages as a VMM does that pauses its guest and gets other interrupts, until done
// is closed. The queue has no other use.
func (v *vmm) messages(q *queue, done <-chan struct{}) error {
	for i := 0; ; i++ {
		select {
		case <-done:
			return nil
		default:
		}
		b, err := v.exchange(msgGetFeatures, nil)
		if err == nil && binary.LittleEndian.Uint64(b) != features {
			err = fmt.Errorf("features: got % x", b)
		}
		if err != nil {
			return err
		}
		b, err = v.exchange(msgGetVringBase, state(q.index, 0))
		if err == nil && binary.LittleEndian.Uint64(b) != uint64(q.index)|uint64(q.avail)<<32 {
			err = fmt.Errorf("base of a stopped queue: got % x, want %d", b, q.avail)
		}
		if err != nil {
			return err
		}
		call, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return err
		}
		addr := le64(uint64(q.index))
		for _, off := range []int{0, 8192, 4096} {
			addr = binary.LittleEndian.AppendUint64(addr, uint64(userBase+q.at(off)))
		}
		for _, m := range []struct {
			kind    uint32
			payload []byte
			fds     []int
		}{
			{msgSetVringNum, state(q.index, ringSize), nil},
			{msgSetVringBase, state(q.index, int(q.avail)), nil},
			{msgSetVringAddr, append(addr, make([]byte, 8)...), nil},
			{msgSetVringCall, le64(uint64(q.index)), []int{call}},
			{msgSetVringKick, le64(uint64(q.index)), []int{q.kick}},
			{msgSetVringEnable, state(q.index, 1), nil},
			{msgSetMemTable, memTable(region{guestBase, memSize, userBase, 0}), []int{v.memfd}},
		} {
			if _, err = v.exchange(m.kind, m.payload, m.fds...); err != nil {
				break
			}
		}
		unix.Close(q.call)
		q.call = call
		if err != nil {
			return err
		}
		q.prepare(slots-1, encode(&vmm{}, opInterrupt, 0, fuse.InterruptIn{Unique: 1}), 0)
		q.offer(2 * (slots - 1))
		if head, _, ok := q.used(); !ok || head != 2*(slots-1) {
			return fmt.Errorf("INTERRUPT: got descriptor %d, %v", head, ok)
		}
	}
}
