package virtiofs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/server"
)

// TestGuestRequestsDoNotAllocate counts the allocations of the whole client, from the virtqueue to
// the transport. The server is another process.
func TestGuestRequestsDoNotAllocate(t *testing.T) {
	kit.CountsAllocations(t)
	for name, unsealed := range map[string]bool{"sealed": false, "unsealed": true} {
		t.Run(name, func(t *testing.T) { testGuestRequestsDoNotAllocate(t, unsealed) })
	}
}

func testGuestRequestsDoNotAllocate(t *testing.T, unsealed bool) {
	d := newDeviceOf(t, server.Start(t))
	d.unsealed = unsealed
	v := d.connect(t)
	q, node, fh := v.openFile(d, kit.RandomBytes(1, 1<<20))
	const room = 256
	// do sends a request and returns the place of the reply.
	do := func(in []byte, out int) []byte {
		q.prepare(0, in, out+replySize)
		q.offer(0)
		_, n, ok := q.used()
		reply := v.mem[slotAt(0)+half:]
		if status := (*fuse.OutHeader)(ptr(reply)).Status; !ok || n < replySize || status != 0 {
			t.Fatalf("reply of %d bytes, status %d", n, status)
		}
		return reply[replySize:]
	}
	request := func(in []byte, out int) func() { return func() { do(in, out) } }
	open, flush := encode(v, kernel.OpOpen, node, fuse.OpenIn{}), encode(v, kernel.OpFlush, node, fuse.FlushIn{})
	release := encode(v, kernel.OpRelease, node, fuse.ReleaseIn{})
	kit.Must(t, os.WriteFile(filepath.Join(d.dir, "name"), nil, 0o644))
	page := strings.Repeat("a", 4096)
	for _, c := range []struct {
		name string
		want float64
		do   func()
	}{
		{"LOOKUP", 0, request(encode(v, kernel.OpLookup, 1, fuse.InHeader{}, "name\x00"), room)},
		{"GETATTR", 0, request(encode(v, kernel.OpGetAttr, node, fuse.GetAttrIn{}), room)},
		{"READ 4 KiB", 0, request(encode(v, kernel.OpRead, node, fuse.ReadIn{Fh: fh, Size: 4 << 10}), 4<<10)},
		{"READ 64 KiB", 0, request(encode(v, kernel.OpRead, node, fuse.ReadIn{Fh: fh, Size: 64 << 10}), 64<<10)},
		{"WRITE", 0, request(encode(v, kernel.OpWrite, node, fuse.WriteIn{Fh: fh, Size: 4096}, page), room)},
		{"large WRITE", 0, request(encode(v, kernel.OpWrite, node, fuse.WriteIn{Fh: fh, Size: 20 * 4096},
			strings.Repeat(page, 20)), room)},
		{"OPEN, FLUSH, RELEASE", 1, func() { // the open file
			opened := (*fuse.OpenOut)(ptr(do(open, room))).Fh
			(*fuse.FlushIn)(unsafe.Pointer(&flush[0])).Fh = opened
			(*fuse.ReleaseIn)(unsafe.Pointer(&release[0])).Fh = opened
			do(flush, 0)
			do(release, 0)
		}},
	} {
		const warmUp, runs = 300, 200 // each slot of the transport has MRs
		for range warmUp {
			c.do()
		}
		if n := kit.Allocations(runs, c.do, c.want); n != c.want {
			t.Errorf("%s: got %v allocations, want %v", c.name, n, c.want)
		}
	}
}
