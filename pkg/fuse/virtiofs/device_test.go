package virtiofs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestReadOnlyShare sends requests that change the file system.
func TestReadOnlyShare(t *testing.T) {
	d := newDevice(t)
	kit.Must(t, os.WriteFile(filepath.Join(d.dir, "f"), []byte("x"), 0o644))
	d.server.opts.ReadOnly = true // before the first VMM
	v := d.connect(t)
	v.mount()
	q := v.queues[1]
	e, errno := q.lookup(1, "f")
	if errno != 0 {
		t.Fatal(errno)
	}
	for _, in := range [][]byte{
		encode(v, kernel.OpSetAttr, e.NodeId, fuse.SetAttrIn{}),
		encode(v, kernel.OpMkdir, 1, fuse.MkdirIn{}, "d\x00"),
		encode(v, kernel.OpMknod, 1, fuse.MknodIn{}, "d\x00"),
		encode(v, kernel.OpUnlink, 1, fuse.InHeader{}, "f\x00"),
		encode(v, kernel.OpCreate, 1, fuse.CreateIn{}, "d\x00"),
		encode(v, kernel.OpRename2, 1, fuse.RenameIn{Newdir: 1}, "f\x00d\x00"),
		encode(v, kernel.OpOpen, e.NodeId, fuse.OpenIn{Flags: syscall.O_WRONLY}),
		encode(v, kernel.OpOpen, e.NodeId, fuse.OpenIn{Flags: syscall.O_RDONLY | syscall.O_TRUNC}),
		encode(v, kernel.OpWrite, e.NodeId, fuse.WriteIn{}),
	} {
		if _, errno := q.do(in, 256); errno != unix.EROFS {
			t.Errorf("opcode %d: got %v, want EROFS", in[4], errno)
		}
	}
	if _, errno := q.do(encode(v, kernel.OpOpen, e.NodeId, fuse.OpenIn{}), 64); errno != 0 {
		t.Errorf("open for reading: %v", errno)
	}
}

// TestLargeInitFails sends an INIT that no record can hold.
func TestLargeInitFails(t *testing.T) {
	v := newDevice(t).connect(t)
	in := encode(v, kernel.OpInit, 0, fuse.InitIn{Major: 7, Minor: 39}, strings.Repeat("x", maxInit))
	if _, errno := v.queues[1].do(in, 256); errno != unix.EIO {
		t.Errorf("got %v, want EIO", errno)
	}
	v.mount()
}

func TestRequestBeforeInitFails(t *testing.T) {
	v := newDevice(t).connect(t)
	if _, errno := v.queues[1].lookup(1, "x"); errno != unix.ENOTCONN {
		t.Errorf("got %v, want ENOTCONN", errno)
	}
}

// TestInventedNumbersFail uses nodes and open files that the device never gave.
func TestInventedNumbersFail(t *testing.T) {
	v := newDevice(t).connect(t)
	v.mount()
	q := v.queues[1]
	f := q.create(1, "file")
	const bad = 4711
	for _, c := range []struct {
		op   string
		data []byte
		want syscall.Errno
	}{
		{"LOOKUP", encode(v, kernel.OpLookup, bad, fuse.InHeader{}, "x\x00"), unix.ESTALE},
		{"GETATTR", encode(v, kernel.OpGetAttr, bad, fuse.GetAttrIn{}), unix.ESTALE},
		{"SETATTR", encode(v, kernel.OpSetAttr, bad, fuse.SetAttrIn{}), unix.ESTALE},
		{"OPEN", encode(v, kernel.OpOpen, bad, fuse.OpenIn{}), unix.ESTALE},
		{"LINK", encode(v, kernel.OpLink, 1, fuse.LinkIn{Oldnodeid: bad}, "x\x00"), unix.ESTALE},
		{"RENAME2", encode(v, kernel.OpRename2, 1, fuse.RenameIn{Newdir: bad}, "file\x00x\x00"), unix.ESTALE},
		{"pseudo node", encode(v, kernel.OpGetAttr, 1<<64-1, fuse.GetAttrIn{}), unix.ESTALE},
		{"READ", encode(v, kernel.OpRead, 1, fuse.ReadIn{Fh: bad, Size: 10}), unix.EBADF},
		{"WRITE", encode(v, kernel.OpWrite, 1, fuse.WriteIn{Fh: bad, Size: 1}, "x"), unix.EBADF},
		{"READDIR", encode(v, kernel.OpReadDir, 1, fuse.ReadIn{Fh: bad, Size: 64}), unix.EBADF},
		{"READDIR of a file", encode(v, kernel.OpReadDir, 1, fuse.ReadIn{Fh: f.Fh, Size: 64}), unix.EBADF},
		{"FLUSH", encode(v, kernel.OpFlush, 1, fuse.FlushIn{Fh: bad}), unix.EBADF},
		{"FSYNC", encode(v, kernel.OpFsync, 1, fuse.FsyncIn{Fh: bad}), unix.EBADF},
		{"RELEASE", encode(v, kernel.OpRelease, 1, fuse.ReleaseIn{Fh: bad}), 0},
		{"RELEASEDIR", encode(v, kernel.OpReleaseDir, 1, fuse.ReleaseIn{Fh: bad}), 0},
		{"RELEASE once", encode(v, kernel.OpRelease, 1, fuse.ReleaseIn{Fh: f.Fh}), 0},
		{"RELEASE twice", encode(v, kernel.OpRelease, 1, fuse.ReleaseIn{Fh: f.Fh}), 0},
		{"READ after RELEASE", encode(v, kernel.OpRead, 1, fuse.ReadIn{Fh: f.Fh, Size: 10}), unix.EBADF},
		{"READ too large", encode(v, kernel.OpRead, 1, fuse.ReadIn{Fh: f.Fh, Size: 1 << 31}), unix.EINVAL},
		{"READ without room", encode(v, kernel.OpRead, 1, fuse.ReadIn{Fh: f.Fh, Size: 4096}), unix.EINVAL},
	} {
		if _, errno := q.do(c.data, 256); errno != c.want {
			t.Errorf("%s: got %v, want %v", c.op, errno, c.want)
		}
	}
	if _, errno := q.lookup(1, "file"); errno != 0 {
		t.Errorf("lookup afterwards: %v", errno)
	}
}

func TestWriteToReadOnlyOpenFails(t *testing.T) {
	d := newDevice(t)
	kit.Must(t, os.WriteFile(filepath.Join(d.dir, "f"), []byte("x"), 0o644))
	v := d.connect(t)
	v.mount()
	q := v.queues[1]
	e, errno := q.lookup(1, "f")
	if errno != 0 {
		t.Fatal(errno)
	}
	reply, errno := q.do(encode(v, kernel.OpOpen, e.NodeId, fuse.OpenIn{Flags: syscall.O_RDONLY}), 64)
	if errno := q.write(out[fuse.OpenOut](t, reply, errno).Fh, e.NodeId, 0, "data"); errno != unix.EBADF {
		t.Errorf("got %v, want EBADF", errno)
	}
}

// TestHostileDescriptors breaks the rules of virtio on one queue. The other queue goes on.
func TestHostileDescriptors(t *testing.T) {
	const in, at = 64, guestBase + slotBase
	for _, c := range []struct {
		name, log string
		do        func(v *vmm, q *queue)
	}{
		{"index", "descriptor 64 of 64", func(v *vmm, q *queue) { q.offer(ringSize) }},
		{"available index", "available index", func(v *vmm, q *queue) { q.avail = 1000; q.offer(0) }},
		{"loop", "has a loop", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, 1, descNext, 1)
			putDescriptor(q.desc(1), at, 1, descNext, 0)
			q.offer(0)
		}},
		{"next", "leaves its table", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, in, descNext, 64)
			q.offer(0)
		}},
		{"address", "not in the guest's memory", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), 4096, in, 0, 0)
			q.offer(0)
		}},
		{"end of memory", "not in the guest's memory", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), guestBase+memSize-8, in, 0, 0)
			q.offer(0)
		}},
		{"overflow", "not in the guest's memory", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), 1<<64-8, in, 0, 0)
			q.offer(0)
		}},
		{"length", "not in the guest's memory", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, 1<<32-1, 0, 0)
			q.offer(0)
		}},
		{"read after write", "a buffer to read follows", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, in, descWrite|descNext, 1)
			putDescriptor(q.desc(1), at, in, 0, 0)
			q.offer(0)
		}},
		{"no header", "request of 8 bytes", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, 8, 0, 0)
			q.offer(0)
		}},
		{"large request", "request of 4194304 bytes", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, 4<<20, 0, 0)
			q.offer(0)
		}},
		{"indirect size", "invalid indirect table", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, 20, descIndirect, 0)
			q.offer(0)
		}},
		{"indirect with next", "invalid indirect table", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, 16, descIndirect|descNext, 1)
			q.offer(0)
		}},
		{"indirect table", "not in the guest's memory", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), 0, 16, descIndirect, 0)
			q.offer(0)
		}},
		{"nested indirect", "invalid indirect table", func(v *vmm, q *queue) {
			putDescriptor(v.mem[slotBase:], at, 16, descIndirect, 0)
			putDescriptor(q.desc(0), at, 16, descIndirect, 0)
			q.offer(0)
		}},
		{"loop in indirect table", "has a loop", func(v *vmm, q *queue) {
			putDescriptor(v.mem[slotBase:], at, 16, descNext, 0)
			putDescriptor(q.desc(0), at, 16, descIndirect, 0)
			q.offer(0)
		}},
		{"huge indirect table", "invalid indirect table", func(v *vmm, q *queue) {
			putDescriptor(q.desc(0), at, descSize*(maxRingSize+1), descIndirect, 0)
			q.offer(0)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDevice(t)
			v := d.connect(t)
			v.mount()
			q := v.queues[2]
			c.do(v, q)
			kit.Eventually(t, "the queue is stopped", func() bool {
				return strings.Contains(d.log.String(), "virtqueue stopped")
			})
			if !strings.Contains(d.log.String(), c.log) {
				t.Errorf("log has no %q:\n%s", c.log, d.log)
			}
			if _, errno := v.queues[1].lookup(1, "none"); errno != unix.ENOENT {
				t.Errorf("other queue: got %v", errno)
			}
			v.mem[q.at(8192)+2], v.mem[q.at(8192)+3] = 0, 0
			q.stop()
			clear(v.mem[q.at(0):q.at(ringSpace)])
			q.avail, q.lastUsed = 0, 0
			q.start(0)
			if _, errno := q.lookup(1, "none"); errno != unix.ENOENT {
				t.Errorf("queue after its reset: got %v", errno)
			}
		})
	}
}

// TestDescriptorInUseIsRefused offers a request that is in progress.
func TestDescriptorInUseIsRefused(t *testing.T) {
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	q := v.queues[2]
	q.prepare(0, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "wait\x00"), 256)
	q.offer(0)
	kit.Eventually(t, "request waits", func() bool { return d.fs.waiting.Load() == 1 })
	q.offer(0)
	kit.Eventually(t, "log", func() bool { return strings.Contains(d.log.String(), "descriptor 0 is in use") })
}

// TestStopDrainsQueue stops a queue while requests wait, as a VMM does that pauses its guest.
func TestStopDrainsQueue(t *testing.T) {
	before := drainTimeout
	drainTimeout = time.Millisecond
	t.Cleanup(func() { drainTimeout = before }) // after the end of the Server
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	f := v.queues[1].create(1, "f")
	q := v.queues[2]
	const n = 4
	for i := 1; i <= n; i++ { // slot 0 is for the other queue
		q.prepare(i, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "wait\x00"), 256)
		q.offer(2 * i)
	}
	kit.Eventually(t, "requests wait", func() bool { return d.fs.waiting.Load() == n })
	if _, errno := v.queues[1].lookup(1, "none"); errno != unix.ENOENT {
		t.Errorf("other queue: got %v", errno)
	}
	base := q.stop()
	if base != n {
		t.Errorf("index: got %d, want %d", base, n)
	}
	for range n {
		head, size, ok := q.used()
		if _, errno := q.reply(head/2, size); !ok || errno != unix.EINTR {
			t.Errorf("request in progress: got %v, want EINTR", errno)
		}
	}
	q.prepare(0, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "none\x00"), 256)
	q.offer(0) // before the queue starts again
	q.start(base)
	if _, _, ok := q.used(); !ok {
		t.Error("no reply after the queue started again")
	}
	if errno := q.write(f.Fh, f.NodeId, 0, "the session goes on"); errno != 0 {
		t.Errorf("write after the pause: %v", errno)
	}
}

// TestNewCallDescriptorIsSignaled gives a running queue another call descriptor. A completion may
// have interrupted the guest through the one before.
func TestNewCallDescriptorIsSignaled(t *testing.T) {
	v := newDevice(t).connect(t)
	call, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	kit.Must(t, err)
	defer unix.Close(call)
	v.message(msgSetVringCall, le64(1), call)
	if _, err := unix.Read(call, make([]byte, 8)); err != nil {
		t.Errorf("read of the new call descriptor: %v", err)
	}
}

// TestReconnect ends a VMM with open files and a request in progress. The data is written, and the
// numbers of its session are invalid in the next one.
func TestReconnect(t *testing.T) {
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	q := v.queues[1]
	f := q.create(1, "f")
	if errno := q.write(f.Fh, f.NodeId, 0, "unwritten"); errno != 0 {
		t.Fatal(errno)
	}
	q.prepare(1, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "wait\x00"), 256)
	q.offer(2)
	kit.Eventually(t, "request waits", func() bool { return d.fs.waiting.Load() == 1 })
	v.conn.Close()
	next := d.connect(t)
	next.mount()
	q = next.queues[2]
	if errno := q.write(f.Fh, f.NodeId, 0, "x"); errno != unix.EBADF {
		t.Errorf("open file of the session before: got %v, want EBADF", errno)
	}
	kit.Eventually(t, "data on the server", func() bool {
		b, _ := os.ReadFile(filepath.Join(d.dir, "f"))
		return string(b) == "unwritten"
	})
	// A node stays until its data is written.
	kit.Eventually(t, "nodes are forgotten", func() bool { return d.fs.Inodes() == 1 })
	if _, errno := q.do(encode(next, kernel.OpGetAttr, f.NodeId, fuse.GetAttrIn{}), 256); errno != unix.ESTALE {
		t.Errorf("node of the session before: got %v, want ESTALE", errno)
	}
}

// TestGuestReboots begins a session while one is open.
func TestGuestReboots(t *testing.T) {
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	f := v.queues[1].create(1, "f")
	v.mount()
	if errno := v.queues[1].write(f.Fh, f.NodeId, 0, "x"); errno != unix.EBADF {
		t.Errorf("open file of the session before: got %v, want EBADF", errno)
	}
	if _, errno := v.queues[1].do(encode(v, kernel.OpDestroy, 0, fuse.InHeader{}), 0); errno != 0 {
		t.Errorf("DESTROY: %v", errno)
	}
	if d.server.InUse() {
		t.Error("in use after DESTROY")
	}
}

func TestSecondVMMIsRefused(t *testing.T) {
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	second := d.dial(t)
	if _, err := second.receive(); err == nil {
		t.Error("second VMM got a reply")
	}
	if want := "refused a second VMM"; !strings.Contains(d.log.String(), want) {
		t.Errorf("log has no %q", want)
	}
	if _, errno := v.queues[1].lookup(1, "none"); errno != unix.ENOENT {
		t.Errorf("first VMM: got %v", errno)
	}
}

// TestTruncatedMemory truncates the file of the guest's memory, which makes each access fault.
func TestTruncatedMemory(t *testing.T) {
	d := newDevice(t)
	d.unsealed = true
	v := d.connect(t)
	v.mount()
	q := v.queues[1]
	kit.Must(t, unix.Ftruncate(v.memfd, slotBase)) // the tables stay
	putDescriptor(q.desc(0), guestBase+slotBase, 64, 0, 0)
	q.offer(0)
	kit.Eventually(t, "queue is stopped", func() bool { return strings.Contains(d.log.String(), errFault.Error()) })
	kit.Must(t, unix.Ftruncate(v.memfd, 0))
	_, _ = unix.Write(v.queues[2].kick, le64(1))
	kit.Eventually(t, "both queues are stopped", func() bool {
		return strings.Count(d.log.String(), errFault.Error()) >= 2
	})
	v.conn.Close()
	next := d.connect(t)
	next.mount()
}

// TestMemoryChange gives a running guest another memory table while a request waits, and then
// interrupts this request.
func TestMemoryChange(t *testing.T) {
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	q := v.queues[1]
	q.prepare(1, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "wait\x00"), 256)
	unique := v.unique
	q.offer(2)
	kit.Eventually(t, "request waits", func() bool { return d.fs.waiting.Load() == 1 })
	v.message(msgSetMemTable, memTable(region{guestBase, memSize, userBase, 0}), v.memfd)
	v.queues[0].prepare(2, encode(v, kernel.OpInterrupt, 0, fuse.InterruptIn{Unique: unique}), 0)
	v.queues[0].offer(4)
	_, size, ok := q.used()
	if _, errno := q.reply(1, size); !ok || errno != unix.EINTR {
		t.Errorf("request with the memory before: got %v, want EINTR", errno)
	}
	if _, errno := q.lookup(1, "none"); errno != unix.ENOENT {
		t.Errorf("lookup afterwards: %v", errno)
	}
}

// TestInvalidMessagesEndConnection sends messages that a VMM must not send.
func TestInvalidMessagesEndConnection(t *testing.T) {
	d := newDevice(t)
	pipe := make([]int, 2)
	kit.Must(t, unix.Pipe2(pipe, unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	page := region{guestBase, pageSize, userBase, 0}
	with := func(change func(*region)) []byte {
		r := page
		change(&r)
		return memTable(r)
	}
	mem := -1 // the memory of the VMM
	for _, c := range []struct {
		name    string
		kind    uint32
		payload []byte
		fds     []int
	}{
		{"unknown", 200, nil, nil},
		{"features", msgSetFeatures, le64(1 << 40), nil},
		{"no virtio 1", msgSetFeatures, le64(featureProtocol), nil},
		{"short", msgSetFeatures, []byte{1}, nil},
		{"protocol features", msgSetProtocolFeatures, le64(1 << 20), nil},
		{"memory without regions", msgSetMemTable, memTable(), nil},
		{"memory without descriptor", msgSetMemTable, memTable(page), nil},
		{"memory short", msgSetMemTable, le64(3), []int{mem}},
		{"memory of a pipe", msgSetMemTable, memTable(page), pipe[:1]},
		{"memory size", msgSetMemTable, with(func(r *region) { r.size = 2 * memSize }), []int{mem}},
		{"memory size 0", msgSetMemTable, with(func(r *region) { r.size = 0 }), []int{mem}},
		{"memory size overflow", msgSetMemTable, with(func(r *region) { r.size = 1<<64 - pageSize }), []int{mem}},
		{"memory offset", msgSetMemTable, with(func(r *region) { r.offset = 100 }), []int{mem}},
		{"memory offset end", msgSetMemTable, with(func(r *region) { r.offset = memSize }), []int{mem}},
		{"memory user overflow", msgSetMemTable, with(func(r *region) { r.user = 1<<64 - pageSize }), []int{mem}},
		{"memory overlap", msgSetMemTable, memTable(page, page), []int{mem, mem}},
		{"queue", msgSetVringNum, state(maxRings, 64), nil},
		{"queue size 0", msgSetVringNum, state(0, 0), nil},
		{"queue size 3", msgSetVringNum, state(0, 3), nil},
		{"queue size", msgSetVringNum, state(0, 2*maxRingSize), nil},
		{"addresses without memory", msgSetVringAddr, make([]byte, 40), nil},
		{"kick of a pipe", msgSetVringKick, le64(0), pipe[:1]},
		{"kick without descriptor", msgSetVringKick, le64(0), nil},
		{"kick of a polled queue", msgSetVringKick, le64(noDescriptor), nil},
		{"call of a pipe", msgSetVringCall, le64(0), pipe[1:]},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := d.dial(t)
			v.message(msgSetFeatures, le64(features))
			v.message(msgSetProtocolFeatures, le64(protocolFeatures))
			fds := append([]int(nil), c.fds...)
			for i := range fds {
				if fds[i] == mem {
					fds[i] = v.memfd
				}
			}
			kit.Must(t, v.send(c.kind, flagNeedReply, c.payload, fds...))
			if reply, err := v.receive(); err != nil || len(reply) != 8 || reply[0] == 0 {
				t.Errorf("reply: got %v, %v, want an error", reply, err)
			}
			if _, err := v.receive(); err == nil {
				t.Error("connection is open")
			}
			want := fmt.Sprintf("vhost-user message %d", c.kind)
			kit.Eventually(t, "log has "+want, func() bool { return strings.Contains(d.log.String(), want) })
		})
	}
}

// TestLargeBuffersDoNotBlockQueue interrupts requests that have large buffers and wait. The
// INTERRUPT has large buffers too.
func TestLargeBuffersDoNotBlockQueue(t *testing.T) {
	d := newDevice(t)
	v := d.connect(t)
	v.mount()
	q := v.queues[1]
	for i := range maxLarge {
		in := slotBase + i*256
		copy(v.mem[in:], encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "wait\x00"))
		// Only the first bytes are the request. The guest gives more.
		putDescriptor(q.desc(2*i), guestBase+uint64(in), 2*largeRequest, descNext, 2*i+1)
		putDescriptor(q.desc(2*i+1), guestBase+uint64(slotAt(12)), 256, descWrite, 0)
		q.offer(2 * i)
	}
	kit.Eventually(t, "requests wait", func() bool { return d.fs.waiting.Load() == maxLarge })
	h := v.queues[0]
	copy(v.mem[slotAt(10):], encode(v, kernel.OpInterrupt, 0, fuse.InterruptIn{Unique: v.unique}))
	putDescriptor(h.desc(0), guestBase+uint64(slotAt(10)), 2*largeRequest, 0, 0)
	h.offer(0)
	if _, _, ok := h.used(); !ok {
		t.Error("INTERRUPT waits for other requests")
	}
}
