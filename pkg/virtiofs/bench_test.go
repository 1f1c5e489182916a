package virtiofs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit/server"
)

// A nullFS has one file, whose data it neither keeps nor makes.
type nullFS struct{ fuse.RawFileSystem }

const nullNode = 2

func (nullFS) EndSession()                 {}
func (nullFS) Resume([]uint64)             {}
func (nullFS) Replied(uint64, ledger.Time) {}
func (nullFS) Disconnected()               {}
func (nullFS) Warn(string, ...any)         {}
func (nullFS) String() string              { return "null" }
func (nullFS) SetDebug(bool)               {}
func (nullFS) OnUnmount()                  {}
func (nullFS) Forget(_, _ uint64)          {}

func (nullFS) Lookup(_ <-chan struct{}, _ *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if name != "f" {
		return fuse.ENOENT
	}
	out.NodeId, out.Attr.Mode, out.Attr.Size = nullNode, unix.S_IFREG|0o644, 64<<20
	return fuse.OK
}

func (nullFS) Create(_ <-chan struct{}, _ *fuse.CreateIn, _ string, out *fuse.CreateOut) fuse.Status {
	out.NodeId, out.Attr.Mode = nullNode+1, unix.S_IFREG|0o644
	return fuse.OK
}

func (nullFS) Unlink(<-chan struct{}, *fuse.InHeader, string) fuse.Status    { return fuse.OK }
func (nullFS) Open(<-chan struct{}, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.OK }
func (nullFS) Flush(<-chan struct{}, *fuse.FlushIn) fuse.Status              { return fuse.OK }
func (nullFS) Fsync(<-chan struct{}, *fuse.FsyncIn) fuse.Status              { return fuse.OK }
func (nullFS) Release(<-chan struct{}, *fuse.ReleaseIn)                      {}
func (nullFS) Write(_ <-chan struct{}, in *fuse.WriteIn, _ []byte) (uint32, fuse.Status) {
	return in.Size, fuse.OK
}

func (nullFS) Writev(_ <-chan struct{}, in *fuse.WriteIn, _ [][]byte) (uint32, fuse.Status) {
	return in.Size, fuse.OK
}

func (nullFS) ReadTo(_ <-chan struct{}, in *fuse.ReadIn, place [][]byte) (int, fuse.ReadResult, fuse.Status) {
	if place == nil {
		return 0, nil, fuse.EIO // the memory of the guest is sealed
	}
	return int(in.Size), nil, fuse.OK
}

// BenchmarkShare measures requests of a guest, without the guest's kernel: those of a file system
// that does nothing, and those of a share of this project's server, which is another process.
// BenchmarkRequest of pkg/front and BenchmarkMount of pkg/fusefs measure the other fronts.
func BenchmarkShare(b *testing.B) {
	b.Run("null", func(b *testing.B) {
		d := &device{socket: filepath.Join(b.TempDir(), "vfs.sock")}
		server, err := Listen(Config{Socket: d.socket, FS: nullFS{fuse.NewDefaultRawFileSystem()},
			Log: hclog.NewNullLogger(), Options: &fuse.MountOptions{MaxWrite: 1 << 20, DisableXAttrs: true,
				PanicHandler: func(any) fuse.Status { return fuse.EIO }}})
		must(b, err)
		defer func() { must(b, server.Close()) }()
		benchmarkRequests(b, d)
	})
	b.Run("share", func(b *testing.B) {
		d := newDeviceOf(b, server.Start(b))
		must(b, os.WriteFile(filepath.Join(d.dir, "f"), make([]byte, 64<<20), 0o644))
		benchmarkRequests(b, d)
	})
}

func benchmarkRequests(b *testing.B, d *device) {
	v := d.connect(b)
	v.mount()
	q := v.queues[1]
	e, errno := q.lookup(1, "f")
	if errno != 0 {
		b.Fatal(errno)
	}
	node := e.NodeId
	reply, errno := q.do(encode(v, opOpen, node, fuse.OpenIn{Flags: unix.O_RDWR}), 64)
	fh := out[fuse.OpenOut](b, reply, errno).Fh
	check := func(errno error) {
		if errno != unix.Errno(0) {
			b.Fatal(errno)
		}
	}
	do := func(in []byte, out int) {
		_, errno := q.do(in, out)
		check(errno)
	}
	b.Run("stat", func(b *testing.B) {
		for i := 0; b.Loop(); i++ { // the client has no reply for a new name
			_, _ = q.lookup(1, strconv.Itoa(i))
		}
	})
	b.Run("create", func(b *testing.B) {
		for b.Loop() {
			c := q.create(1, "new")
			do(encode(v, opFlush, c.NodeId, fuse.FlushIn{Fh: c.Fh}), 0)
			do(encode(v, opRelease, c.NodeId, fuse.ReleaseIn{Fh: c.Fh}), 0)
			do(encode(v, opUnlink, 1, fuse.InHeader{}, "new\x00"), 0)
		}
	})
	read := func(i, size int) []byte {
		return encode(v, opRead, node, fuse.ReadIn{Fh: fh, Offset: uint64(i*7%64) << 20, Size: uint32(size)})
	}
	for _, size := range []int{4 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("read-%dk", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			for i := 0; b.Loop(); i++ {
				errno, n := q.doChain(read(i, size), nil, []span{{dataBase, size}})
				if check(errno); n != size {
					b.Fatalf("read %d bytes, want %d", n, size)
				}
			}
		})
	}
	b.Run("read-4k-4", func(b *testing.B) {
		const callers, size = 4, 4 << 10
		sent, done := 0, 0
		send := func(slot int) {
			q.prepare(slot, read(sent, size), size+replySize)
			q.offer(2 * slot)
			sent++
		}
		for slot := range min(callers, b.N) {
			send(slot)
		}
		for ; done < b.N; done++ {
			head, n, ok := q.used()
			if !ok || n != size+replySize {
				b.Fatalf("reply of %d bytes", n)
			}
			if sent < b.N {
				send(head / 2)
			}
		}
	})
	for _, size := range []int{4 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("write-%dk", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			for i := 0; b.Loop(); i++ {
				in := encode(v, opWrite, node, fuse.WriteIn{Fh: fh, Offset: uint64(i) * uint64(size) % (64 << 20),
					Size: uint32(size)})
				errno, _ := q.doChain(in, []span{{dataBase, size}}, []span{{chainReply + replySize, 8}})
				check(errno)
			}
			do(encode(v, opFsync, node, fuse.FsyncIn{Fh: fh}), 0)
		})
	}
	do(encode(v, opRelease, node, fuse.ReleaseIn{Fh: fh}), 0)
}
