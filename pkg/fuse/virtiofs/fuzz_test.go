package virtiofs

import (
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// FuzzDescriptors fills the descriptor table and a request with any bytes. The device must go on.
func FuzzDescriptors(f *testing.F) {
	d := newDevice(f)
	v := d.connect(f)
	kit.Must(f, v.conn.SetDeadline(time.Time{}))
	v.mount()
	table := make([]byte, 4*descSize)
	putDescriptor(table, guestBase+slotBase, 46, descNext, 1)
	putDescriptor(table[descSize:], guestBase+slotBase+half, 256, descWrite, 0)
	f.Add(table, encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "none\x00"))
	putDescriptor(table, guestBase+2*ringSpace, 32, descIndirect, 0)
	f.Add(table, encode(v, kernel.OpReadDir, 1, fuse.ReadIn{Fh: 1, Size: 100}))
	f.Add(table, encode(v, kernel.OpBatchForget, 1, fuse.ReadIn{Fh: 3}))
	f.Fuzz(func(t *testing.T, table, msg []byte) {
		v.t = t
		q := v.queues[2]
		copy(v.mem[q.at(0):q.at(4096)], table)
		copy(v.mem[slotBase:slotBase+half], msg)
		q.offer(0)
		waitTaken(q)
		if base := q.stop(); base > 1 {
			t.Fatalf("index after one request: got %d", base)
		}
		// The guest may have written to any of its memory.
		v.queues[0].stop()
		v.queues[1].stop()
		clear(v.mem)
		for _, q := range v.queues {
			q.avail, q.lastUsed = 0, 0
			q.start(0)
		}
		v.mount()
	})
}

// waitTaken gives the device a little time to take a request, which may be invalid.
func waitTaken(q *queue) {
	for range 20 {
		if q.usedRing()[2] != byte(q.lastUsed) {
			return
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// FuzzRequest sends any bytes as a FUSE request.
func FuzzRequest(f *testing.F) {
	d := newDevice(f)
	v := d.connect(f)
	kit.Must(f, v.conn.SetDeadline(time.Time{}))
	v.mount()
	for _, in := range [][]byte{
		encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "none\x00"),
		encode(v, kernel.OpCreate, 1, fuse.CreateIn{}, "file\x00"),
		encode(v, kernel.OpWrite, 2, fuse.WriteIn{Fh: 1, Size: 4}, "data"),
		encode(v, kernel.OpSetXAttr, 1, fuse.GetXAttrIn{}, "system.posix_acl_access\x00abc"),
		encode(v, kernel.OpBatchForget, 1, fuse.GetXAttrIn{Size: 1}, "0123456789abcdef"),
		encode(v, kernel.OpRename2, 1, fuse.RenameIn{Newdir: 1}, "file\x00b\x00"),
		encode(v, kernel.OpInit, 1, fuse.InitIn{Major: 7, Minor: 31}),
		encode(v, kernel.OpReadDirPlus, 1, fuse.ReadIn{Fh: 1, Size: 2000}),
	} {
		f.Add(in)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		v.t = t
		if len(in) < headerSize || len(in) > half {
			return
		}
		q := v.queues[1]
		q.prepare(0, in, 8192)
		q.offer(0)
		if _, n, ok := q.used(); !ok || n > 8192 {
			t.Fatalf("reply: got %d bytes, %v", n, ok)
		}
		v.mount()
		if _, errno := q.lookup(1, "none"); errno != unix.ENOENT {
			t.Fatalf("lookup afterwards: got %v", errno)
		}
	})
}
