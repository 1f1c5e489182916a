package virtiofs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestKillAtSteps kills the process of a share between two steps of its operations, while a guest
// makes requests and the VMM pauses the guest. No request may be lost or executed twice, no reply
// may be lost or come twice, and no interrupt may be lost.
func TestKillAtSteps(t *testing.T) {
	steps := []string{"answer", "completion recorded", "dropped descriptors", "executed a message", "message removed",
		"published", "record of a queue", "record of the share", "reply in the pipe", "reply sent", "request completed",
		"request handled", "request in progress", "request not in progress", "request taken", "used element"}
	// Each of the requests of a round is handled, and has no reply, when a process is killed.
	const requests = 8
	n := kills(t, requests+2*len(steps))
	s := newKeptShare(t, n, func(kill int) killPlan {
		if kill < requests {
			return killPlan{step: "request handled", count: 1 + kill}
		}
		kill -= requests
		return killPlan{step: steps[kill%len(steps)], count: 1 + kill/len(steps)%10}
	})
	v := (&device{socket: s.order.Socket}).connect(t)
	v.mount()
	q := v.queues[1]
	q.create(1, "begin")
	reply, errno := q.do(encode(v, kernel.OpCreate, 1, fuse.CreateIn{Flags: appendFlags, Mode: 0o644}, "lines\x00"),
		256)
	lines := out[fuse.CreateOut](t, reply, errno)
	want := ""
	for i := 0; s.kills.Load() < int64(n) && !t.Failed(); i++ {
		kit.Must(t, v.conn.SetDeadline(time.Now().Add(kit.Timeout)))
		want += s.round(v, lines, i)
		v.pause()
	}
	q.expect(0, encode(v, kernel.OpFsync, lines.NodeId, fuse.FsyncIn{Fh: lines.Fh}))
	got, err := os.ReadFile(filepath.Join(s.dir, "lines"))
	kit.Must(t, err)
	if string(got) != want {
		t.Errorf("lines on the server: got %d bytes, want %d", len(got), len(want))
	}
}

const appendFlags = syscall.O_RDWR | syscall.O_APPEND

// round makes requests whose second execution would fail or change the result. It returns the line
// that it appends to a file.
func (s *keptShare) round(v *vmm, lines *fuse.CreateOut, i int) string {
	t, q := s.t, v.queues[1+i%2]
	dir := fmt.Sprintf("d%d\x00", i)
	reply, errno := q.do(encode(v, kernel.OpMkdir, 1, fuse.MkdirIn{Mode: 0o755}, dir), 256)
	made := out[fuse.EntryOut](t, reply, errno)
	reply, errno = q.do(encode(v, kernel.OpLookup, 1, fuse.InHeader{}, dir), 256)
	if found := out[fuse.EntryOut](t, reply, errno); found.NodeId != made.NodeId {
		t.Errorf("lookup of a new directory: got node %d, want %d", found.NodeId, made.NodeId)
	}
	// One of two references: the node must stay.
	q.prepare(0, encode(v, kernel.OpForget, made.NodeId, fuse.ForgetIn{Nlookup: 1}), 0)
	q.offer(0)
	if _, _, ok := q.used(); !ok {
		t.Fatal("FORGET did not come back")
	}
	q.expect(0, encode(v, kernel.OpGetAttr, made.NodeId, fuse.GetAttrIn{}))
	q.expect(0, encode(v, kernel.OpRmdir, 1, fuse.InHeader{}, dir))
	line := fmt.Sprintf("line %d\n", i)
	q.expect(0, encode(v, kernel.OpWrite, lines.NodeId, fuse.WriteIn{Fh: lines.Fh, Size: uint32(len(line)),
		Flags: appendFlags}, line))
	return line
}

// expect sends a request and checks the status of its reply.
func (q *queue) expect(want syscall.Errno, in []byte) {
	q.v.t.Helper()
	if _, errno := q.do(in, 256); errno != want {
		q.v.t.Fatalf("opcode %d: got %v, want %v", in[4], errno, want)
	}
}

// pause sends the messages of a VMM that pauses its guest, and gives the memory again.
func (v *vmm) pause() {
	v.t.Helper()
	if f := v.ask(msgGetFeatures); f != features {
		v.t.Fatalf("features: got %#x", f)
	}
	q := v.queues[2]
	if base := q.stop(); base != int(q.avail) {
		v.t.Fatalf("index of a stopped queue: got %d, want %d", base, q.avail)
	}
	q.start(int(q.avail))
	v.setMemory()
}

// TestDamagedMemoryEndsConnection truncates the file of the guest's memory before the process is
// killed. The next process ends the connection, and serves another VMM.
func TestDamagedMemoryEndsConnection(t *testing.T) {
	s := newKeptShare(t, 0, nil)
	d := &device{socket: s.order.Socket, unsealed: true}
	v := d.connect(t)
	kit.Must(t, unix.Ftruncate(v.memfd, slotBase))
	kit.Must(t, os.WriteFile(filepath.Join(s.dir, "begin"), nil, 0o644))
	if n, err := v.conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("connection: got %d bytes, %v, want its end", n, err)
	}
	next := d.connect(t)
	next.mount()
	if _, errno := next.queues[1].lookup(1, "begin"); errno != 0 {
		t.Errorf("lookup of another VMM: %v", errno)
	}
}

// TestDamagedRequestStopsQueue changes the descriptor of a request that waits when the process is
// killed. The next process stops the queue of the request, and the other queue goes on.
func TestDamagedRequestStopsQueue(t *testing.T) {
	s := newKeptShare(t, 0, nil)
	v := (&device{socket: s.order.Socket}).connect(t)
	v.mount()
	q, broken := v.queues[1], v.queues[2]
	broken.prepare(1, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "wait\x00"), 256)
	broken.offer(2)
	if _, errno := broken.lookup(1, "none"); errno != unix.ENOENT { // the one before is in progress
		t.Fatalf("lookup: got %v, want ENOENT", errno)
	}
	putDescriptor(broken.desc(2), 4096, 64, 0, 0)
	kit.Must(t, os.WriteFile(filepath.Join(s.dir, "begin"), nil, 0o644)) // the test kills the process
	if head, size, ok := broken.used(); !ok || head != 2 || size != 0 {
		t.Fatalf("damaged request: got descriptor %d, %d bytes, %v, want 2, 0 bytes", head, size, ok)
	}
	if _, errno := q.lookup(1, "begin"); errno != 0 {
		t.Errorf("lookup on the other queue: %v", errno)
	}
	broken.prepare(1, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "begin\x00"), 256)
	broken.offer(2) // slot 0 is for the other queue
	if _, errno := q.lookup(1, "begin"); errno != 0 {
		t.Errorf("second lookup on the other queue: %v", errno)
	}
	if base := broken.stop(); base != 2 {
		t.Errorf("index of the stopped queue: got %d, want 2", base)
	}
	broken.start(2)
	head, size, ok := broken.used()
	if !ok || head != 2 {
		t.Fatalf("after a reset of the queue: got descriptor %d, %v, want 2", head, ok)
	}
	if _, errno := broken.reply(1, size); errno != 0 {
		t.Errorf("lookup after a reset of the queue: %v", errno)
	}
}
