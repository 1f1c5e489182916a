package virtiofs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A span is a range of the memory of a test VMM.
type span struct{ at, n int }

// Where chains of a test have their tables, requests and headers of replies.
const (
	chainTable   = slotBase
	chainRequest = slotBase + 64<<10
	chainReply   = slotBase + 128<<10
)

// doChain sends a request as Linux does: the header, each piece of data, and the header of the
// reply have a descriptor, in an indirect table. It returns the status and the size of the reply.
func (q *queue) doChain(header []byte, in, out []span) (syscall.Errno, int) {
	v := q.v
	v.t.Helper()
	copy(v.mem[chainRequest:], header)
	chain := append([]span{{chainRequest, len(header)}}, in...)
	readable := len(chain)
	chain = append(append(chain, span{chainReply, replySize}), out...)
	for i, s := range chain {
		flags := 0
		if i < len(chain)-1 {
			flags |= descNext
		}
		if i >= readable {
			flags |= descWrite
		}
		putDescriptor(v.mem[chainTable+i*descSize:], guestBase+uint64(s.at), s.n, flags, i+1)
	}
	putDescriptor(q.desc(0), guestBase+chainTable, len(chain)*descSize, descIndirect, 0)
	q.offer(0)
	head, n, ok := q.used()
	if !ok || head != 0 || n < replySize {
		v.t.Fatalf("no reply to a request of %d descriptors: %d bytes", len(chain), n)
	}
	_, errno := replyAt(v.mem[chainReply:], n)
	return errno, n - replySize
}

func replyAt(b []byte, n int) (size int, errno syscall.Errno) {
	h := (*fuse.OutHeader)(ptr(b))
	if int(h.Length) != n {
		panic(fmt.Sprintf("reply of %d bytes has length %d", n, h.Length))
	}
	return n, syscall.Errno(-h.Status)
}

func (v *vmm) join(spans []span) (b []byte) {
	for _, s := range spans {
		b = append(b, v.mem[s.at:s.at+s.n]...)
	}
	return b
}

// fill makes b the content of spans.
func (v *vmm) fill(spans []span, b []byte) {
	for _, s := range spans {
		b = b[copy(v.mem[s.at:s.at+s.n], b):]
	}
}

const dataBase = 2 << 20 // the second region

// pagesOf returns n pages in reverse order, which no two are adjacent.
func pagesOf(n int) (spans []span) {
	for i := range n {
		spans = append(spans, span{dataBase + 2*pageSize*(n-i), pageSize})
	}
	return spans
}

const samePage = "the same page twice"

// layouts are places for data. inPlace tells whether data can arrive there without a copy.
var layouts = []struct {
	name    string
	spans   []span
	inPlace bool
}{
	{"one piece", []span{{dataBase, 1 << 20}}, true},
	{"one byte", []span{{dataBase + 17, 1}}, true},
	{"odd piece", []span{{dataBase + 17, 70001}}, true},
	{"adjacent pieces", []span{{dataBase + 17, 100}, {dataBase + 117, 9000}, {dataBase + 9117, 3}}, true},
	{"scattered pages", pagesOf(256), true},
	{"offset at the ends", append(append([]span{{dataBase - pageSize + 100, pageSize - 100}}, pagesOf(40)...),
		span{dataBase + 1<<20, 5}), true},
	{"across regions", []span{{dataBase - 8192, 16384}}, true},
	{"small pieces", []span{{dataBase + 4096, 100}, {dataBase, 100}, {dataBase + 9000, 3000}}, false},
	{"end inside a page", []span{{dataBase, 100}, {dataBase + 2*pageSize, pageSize}}, false},
	{"start inside a page", []span{{dataBase, pageSize}, {dataBase + 2*pageSize + 100, 100}}, false},
	{samePage, []span{{dataBase, pageSize}, {dataBase, pageSize}}, true},
}

// openFile makes a file with data on the server and opens it.
func (v *vmm) openFile(d *device, data []byte) (q *queue, node, fh uint64) {
	v.t.Helper()
	kit.Must(v.t, os.WriteFile(filepath.Join(d.dir, "f"), data, 0o644))
	v.mount()
	q = v.queues[1]
	e, errno := q.lookup(1, "f")
	if errno != 0 {
		v.t.Fatal(errno)
	}
	reply, errno := q.do(encode(v, kernel.OpOpen, e.NodeId, fuse.OpenIn{Flags: syscall.O_RDWR}), 64)
	return q, e.NodeId, out[fuse.OpenOut](v.t, reply, errno).Fh
}

// TestDataArrivesInPlace reads into guest memory of many layouts. Some bytes are written data that
// the server does not have.
func TestDataArrivesInPlace(t *testing.T) {
	for _, unsealed := range []bool{false, true} {
		t.Run(fmt.Sprintf("unsealed=%t", unsealed), func(t *testing.T) {
			d := newDevice(t)
			d.unsealed = unsealed
			content := kit.RandomBytes(1, 2<<20+1000)
			v := d.connect(t)
			q, node, fh := v.openFile(d, content)
			read := func(name string, spans []span, off int, inPlace bool) {
				t.Helper()
				size := spanSize(spans)
				before := d.fs.placed.Load()
				v.fill(spans, bytes.Repeat([]byte{0xee}, size))
				in := encode(v, kernel.OpRead, node, fuse.ReadIn{Fh: fh, Offset: uint64(off), Size: uint32(size)})
				errno, n := q.doChain(in, nil, spans)
				want := content[min(off, len(content)):min(off+size, len(content))]
				got := v.join(spans)[:n]
				if name == samePage { // the content depends on the order of the pieces
					got, want = nil, nil
				}
				if errno != 0 || !bytes.Equal(got, want) {
					t.Errorf("%s at %d: got %v and %d bytes, want %d; equal %t", name, off, errno, n, len(want),
						bytes.Equal(got, want))
				}
				if got := d.fs.placed.Load() > before; got != (inPlace && !unsealed) {
					t.Errorf("%s at %d: in place %t, want %t", name, off, got, inPlace && !unsealed)
				}
			}
			for _, l := range layouts {
				for _, off := range []int{0, 4097, len(content) - spanSize(l.spans)/2, len(content) + 5} {
					read(l.name, l.spans, off, l.inPlace)
				}
			}
			// Data behind the end of the file, with a hole before.
			at := len(content) + 3000
			copy(content[5000:], "written")
			content = append(append(content, make([]byte, 3000)...), "the end"...)
			for off, data := range map[int]string{5000: "written", at: "the end"} {
				if errno := q.write(fh, node, uint64(off), data); errno != 0 {
					t.Fatal(errno)
				}
			}
			for _, l := range layouts {
				read(l.name, l.spans, 4999, l.inPlace)
				read(l.name, l.spans, len(content)-5000, l.inPlace)
			}
		})
	}
}

func spanSize(spans []span) (n int) {
	for _, s := range spans {
		n += s.n
	}
	return n
}

// TestDataIsWrittenFromPlace writes from guest memory of many layouts.
func TestDataIsWrittenFromPlace(t *testing.T) {
	for _, unsealed := range []bool{false, true} {
		t.Run(fmt.Sprintf("unsealed=%t", unsealed), func(t *testing.T) {
			d := newDevice(t)
			d.unsealed = unsealed
			v := d.connect(t)
			q, node, fh := v.openFile(d, nil)
			var content []byte
			for i, l := range layouts {
				size, off := spanSize(l.spans), len(content)/3
				data := kit.RandomBytes(uint64(i), size)
				v.fill(l.spans, data)
				data = v.join(l.spans) // one layout has a page twice
				in := encode(v, kernel.OpWrite, node, fuse.WriteIn{Fh: fh, Offset: uint64(off), Size: uint32(size)})
				if errno, _ := q.doChain(in, l.spans, []span{{chainReply + replySize, 8}}); errno != 0 {
					t.Errorf("%s: %v", l.name, errno)
				}
				content = append(content, make([]byte, max(0, off+size-len(content)))...)
				copy(content[off:], data)
				in = encode(v, kernel.OpWrite, node, fuse.WriteIn{Fh: fh, Size: uint32(size) + 1})
				if errno, _ := q.doChain(in, l.spans, []span{{chainReply + replySize, 8}}); errno != unix.EINVAL {
					t.Errorf("%s: WRITE with one byte less than it says: got %v, want EINVAL", l.name, errno)
				}
			}
			if _, errno := q.do(encode(v, kernel.OpFlush, node, fuse.FlushIn{Fh: fh}), 0); errno != 0 {
				t.Errorf("flush: %v", errno)
			}
			got, err := os.ReadFile(filepath.Join(d.dir, "f"))
			if err != nil || !bytes.Equal(got, content) {
				t.Errorf("file on the server: got %v and %d bytes, want %d", err, len(got), len(content))
			}
			if got := d.fs.gathered.Load() > 0; got == unsealed {
				t.Errorf("data from several places without a copy before: got %t, want %t", got, !unsealed)
			}
		})
	}
}

// TestGuestChangesDataMeanwhile changes all memory for data while READs and WRITEs use it. Other
// data must be intact.
func TestGuestChangesDataMeanwhile(t *testing.T) {
	d := newDevice(t)
	content := kit.RandomBytes(3, 1<<20)
	v := d.connect(t)
	q, node, fh := v.openFile(d, content)
	var stop atomic.Bool
	var guest sync.WaitGroup
	guest.Go(func() {
		for i := byte(0); !stop.Load(); i++ {
			scribble(v.mem[dataBase:dataBase+3<<20], i)
		}
	})
	for range 20 {
		spans := pagesOf(128)
		in := encode(v, kernel.OpRead, node, fuse.ReadIn{Fh: fh, Size: uint32(spanSize(spans))})
		if errno, n := q.doChain(in, nil, spans); errno != 0 || n != spanSize(spans) {
			t.Fatalf("read: got %v, %d bytes", errno, n)
		}
		in = encode(v, kernel.OpWrite, node, fuse.WriteIn{Fh: fh, Offset: 512 << 10, Size: uint32(spanSize(spans))})
		if errno, _ := q.doChain(in, spans, []span{{chainReply + replySize, 8}}); errno != 0 {
			t.Fatalf("write: %v", errno)
		}
	}
	stop.Store(true)
	guest.Wait()
	spans := []span{{dataBase, 512 << 10}}
	in := encode(v, kernel.OpRead, node, fuse.ReadIn{Fh: fh, Size: 512 << 10})
	if errno, n := q.doChain(in, nil, spans); errno != 0 || !bytes.Equal(v.join(spans)[:n], content[:512<<10]) {
		t.Errorf("read of other data: got %v, %d bytes, or wrong bytes", errno, n)
	}
}

// TestMemoryThatCanFault checks which files may be read into directly.
func TestMemoryThatCanFault(t *testing.T) {
	create := func(name string, flags int, seals int) int {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
		kit.Must(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		kit.Must(t, unix.Ftruncate(fd, 4<<20))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		kit.Must(t, err)
		return fd
	}
	file := func(dir string) int {
		f, err := os.CreateTemp(dir, "guest")
		kit.Must(t, err)
		t.Cleanup(func() {
			f.Close()
			os.Remove(f.Name())
		})
		return int(f.Fd())
	}
	for _, c := range []struct {
		name string
		fd   int
		want bool
	}{
		{"sealed", create("sealed", 0, membuf.Sealed), true},
		{"not sealed", create("not sealed", 0, 0), false},
		{"sealed against growth only", create("grow", 0, unix.F_SEAL_GROW), false},
		{"huge pages", create("huge", unix.MFD_HUGETLB, membuf.Sealed), false},
		{"tmpfs", file("/dev/shm"), false},
		{"disk", file(t.TempDir()), false},
	} {
		if got := cannotFault(c.fd); got != c.want {
			t.Errorf("%s: got %t, want %t", c.name, got, c.want)
		}
	}
}
