package kernel

import (
	"math"
	"strings"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestInitReply negotiates with kernels of several versions, all of which have all capabilities.
func TestInitReply(t *testing.T) {
	opts := options(new(logBuffer))
	opts.MaxWrite, opts.MaxReadAhead = 100<<10, 200<<10
	flags := uint32(commonCapabilities&math.MaxUint32 | fuse.CAP_EXPLICIT_INVAL_DATA | fuse.CAP_INIT_EXT)
	const flags2 = (fuse.CAP_PASSTHROUGH | fuse.CAP_HAS_EXPIRE_ONLY) >> 32
	want := fuse.InitOut{Major: 7, Minor: 28, MaxReadAhead: 200 << 10, Flags: flags, Flags2: flags2, MaxBackground: 64,
		CongestionThreshold: 48, MaxWrite: 100 << 10, MaxPages: 25, MaxStackDepth: 1}
	for _, c := range []struct {
		name      string
		minor     uint32
		readAhead uint32
		in, out   int // bytes without the headers
		change    func(*fuse.InitOut)
	}{
		{"new", 45, 1 << 20, 64, 64, func(*fuse.InitOut) {}},
		{"less read-ahead", 45, 4096, 64, 64, func(o *fuse.InitOut) { o.MaxReadAhead = 4096 }},
		{"short request", 31, 1 << 20, 16, 64, func(o *fuse.InitOut) { o.Flags2 = 0 }},
		{"old", 23, 1 << 20, 16, 64, func(o *fuse.InitOut) { o.Minor, o.Flags2 = 23, 0 }},
		{"short reply", 22, 1 << 20, 16, 24, func(o *fuse.InitOut) { o.Minor, o.Flags2 = 22, 0 }},
	} {
		in := fuse.InitIn{Major: 7, Minor: c.minor, MaxReadAhead: c.readAhead, Flags: math.MaxUint32,
			Flags2: math.MaxUint32}
		in.Opcode, in.Unique = uint32(OpInit), 2
		reply, err := NewHandler(newTestFS(), opts).Negotiate(bytesOf(&in)[:inHeaderSize+c.in])
		kit.Must(t, err)
		wanted := want
		c.change(&wanted)
		data := append(reply[:len(reply):len(reply)], bytesOf(&wanted)[c.out:]...)[headerSize:]
		if got := *(*fuse.InitOut)(unsafe.Pointer(&data[0])); got != wanted || len(reply) != headerSize+c.out ||
			*(*fuse.OutHeader)(unsafe.Pointer(&reply[0])) != (fuse.OutHeader{Length: uint32(len(reply)), Unique: 2}) {
			t.Errorf("%s: got %d bytes, % x,\n%+v, want %d,\n%+v", c.name, len(reply), reply[:headerSize], got,
				headerSize+c.out, wanted)
		}
	}
}

// TestWritebackNeedsDirectIO checks which kernels get the writeback cache.
func TestWritebackNeedsDirectIO(t *testing.T) {
	for flags, want := range map[uint64]uint64{
		fuse.CAP_WRITEBACK_CACHE:                                 0,
		fuse.CAP_WRITEBACK_CACHE | fuse.CAP_DIRECT_IO_ALLOW_MMAP: fuse.CAP_WRITEBACK_CACHE,
	} {
		opts := options(new(logBuffer))
		opts.Capabilities |= fuse.CAP_WRITEBACK_CACHE | fuse.CAP_DIRECT_IO_ALLOW_MMAP
		in := fuse.InitIn{Major: 7, Minor: 45, Flags: uint32(flags) | 1<<30, Flags2: uint32(flags >> 32)}
		in.Opcode, in.Length = uint32(OpInit), uint32(unsafe.Sizeof(in))
		reply, err := NewHandler(newTestFS(), opts).Negotiate(bytesOf(&in))
		kit.Must(t, err)
		out := (*fuse.InitOut)(unsafe.Pointer(&reply[headerSize]))
		if got := out.Flags64() & fuse.CAP_WRITEBACK_CACHE; got != want {
			t.Errorf("INIT with capabilities %#x: got writeback %#x, want %#x", flags, got, want)
		}
	}
}

func TestInitErrors(t *testing.T) {
	k := newKernel(t)
	defer unix.Close(k.fd)
	defer k.dev.Close()
	in := fuse.InitIn{Major: 6}
	k.send(26, 1, bytesOf(&in)[unsafe.Sizeof(in.InHeader):])
	_, err := NewDevFuse(k.dev, newTestFS(), options(k.log))
	if err == nil || !strings.Contains(err.Error(), "protocol 6.0") {
		t.Errorf("NewDevFuse for protocol 6: got %v, want an error that names the version", err)
	}
	if errno, _ := k.receive(1); errno != unix.EIO {
		t.Errorf("reply: got %v, want EIO", errno)
	}
}
