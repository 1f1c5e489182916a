package virtiofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxRegions is the maximum of SET_MEM_TABLE (vhost-user, "Memory regions description").
	maxRegions = 8
	pageSize   = 4096
	// maxAddress bounds addresses and sizes, so that sums do not overflow.
	maxAddress = 1 << 52
)

// errFault means that the VMM has truncated the file of the guest's memory.
var errFault = errors.New("the file of the guest's memory is shorter than the region")

// A region is one range of the guest's memory.
type region struct {
	guest, size, user, offset uint64 // user: address in the VMM, by which it gives ring addresses
}

// A mapping is a region in the memory of this process.
type mapping struct {
	region
	mapped []byte // of mmap(2)
	data   []byte // the region
}

// A memory is the guest's memory, until the next SET_MEM_TABLE. Requests in progress have
// references to it.
type memory struct {
	maps []mapping
	// faultless is true if no access to the memory can fault, see cannotFault.
	faultless bool
	refs      atomic.Int64
}

// newMemory maps the regions. It does not take over the descriptors. The caller has one reference.
func newMemory(regions []region, fds []int) (*memory, error) {
	if len(regions) == 0 || len(regions) > maxRegions || len(regions) != len(fds) {
		return nil, fmt.Errorf("%d regions with %d descriptors; want 1 to %d", len(regions), len(fds), maxRegions)
	}
	for i, r := range regions {
		if err := r.check(); err != nil {
			return nil, err
		}
		for _, other := range regions[:i] {
			if overlaps(r.guest, other.guest, r.size, other.size) || overlaps(r.user, other.user, r.size, other.size) {
				return nil, fmt.Errorf("regions at %#x and %#x overlap", other.guest, r.guest)
			}
		}
	}
	m := &memory{faultless: true}
	m.refs.Store(1)
	for i, r := range regions {
		m.faultless = m.faultless && cannotFault(fds[i])
		mapped, err := r.mmap(fds[i])
		if err != nil {
			m.release()
			return nil, fmt.Errorf("region at %#x: %w", r.guest, err)
		}
		m.maps = append(m.maps, mapped)
	}
	return m, nil
}

func (r *region) check() error {
	switch {
	case r.size == 0 || (r.guest|r.size|r.user|r.offset)%pageSize != 0:
		return fmt.Errorf("region at %#x of %#x bytes, offset %#x: not whole pages", r.guest, r.size, r.offset)
	case r.guest > maxAddress || r.size > maxAddress || r.offset > maxAddress || r.user > math.MaxUint64-r.size:
		return fmt.Errorf("region at %#x of %#x bytes, offset %#x: too large", r.guest, r.size, r.offset)
	}
	return nil
}

func overlaps(a, b, aSize, bSize uint64) bool { return a < b+bSize && b < a+aSize }

func (r *region) mmap(fd int) (mapping, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return mapping{}, os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || uint64(st.Size) < r.offset+r.size {
		return mapping{}, fmt.Errorf("file of %d bytes, mode %o: want a regular file of at least %d bytes", st.Size,
			st.Mode, r.offset+r.size)
	}
	// A file of huge pages can only be mapped in its block size.
	block := max(uint64(st.Blksize), pageSize)
	before := r.offset % block
	length := (before + r.size + block - 1) / block * block
	b, err := unix.Mmap(fd, int64(r.offset-before), int(length), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return mapping{}, os.NewSyscallError("mmap", err)
	}
	return mapping{region: *r, mapped: b, data: b[before : before+r.size : before+r.size]}, nil
}

const (
	overcommitPath   = "/proc/sys/vm/overcommit_memory"
	overcommitStrict = "2"
)

// cannotFault reports whether a file always has memory for its pages. It must be in shared memory
// without a limit (memfd), as a file of huge pages can find no page. Its size must be sealed, as
// the VMM could truncate it otherwise. With strict overcommit, a page that the VMM has returned to
// the host may not come back.
func cannotFault(fd int) bool {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC || fs.Blocks != 0 {
		return false
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return false
	}
	mode, err := os.ReadFile(overcommitPath)
	return err == nil && strings.TrimSpace(string(mode)) != overcommitStrict
}

// hold adds a reference.
func (m *memory) hold() *memory {
	m.refs.Add(1)
	return m
}

// release removes a reference. The last one unmaps the memory.
func (m *memory) release() {
	if m.refs.Add(-1) > 0 {
		return
	}
	for _, r := range m.maps {
		_ = unix.Munmap(r.mapped)
	}
	m.maps = nil
}

// A buffer is memory of the guest. Only the functions of this file access it.
type buffer []byte

// appendBuffers appends the buffers of n bytes at a guest address. The range may continue in the
// next region.
func (m *memory) appendBuffers(bufs []buffer, guest, n uint64) ([]buffer, error) {
	for n > 0 {
		b := m.at(guest, n)
		if len(b) == 0 {
			return nil, fmt.Errorf("address %#x is not in the guest's memory", guest)
		}
		bufs = append(bufs, b)
		guest += uint64(len(b))
		n -= uint64(len(b))
	}
	return bufs, nil
}

// at returns at most n bytes at a guest address, or nothing.
func (m *memory) at(guest, n uint64) buffer {
	for i := range m.maps {
		if r := &m.maps[i]; guest >= r.guest && guest-r.guest < r.size {
			off := guest - r.guest
			return buffer(r.data[off:min(r.size, off+min(n, r.size))])
		}
	}
	return nil
}

// atUser returns n bytes at an address of the VMM, which must be aligned.
func (m *memory) atUser(user, n, align uint64) (buffer, error) {
	for i := range m.maps {
		r := &m.maps[i]
		if user >= r.user && user-r.user < r.size && n <= r.size-(user-r.user) {
			if user%align != 0 {
				return nil, fmt.Errorf("address %#x is not aligned to %d bytes", user, align)
			}
			off := user - r.user
			return buffer(r.data[off : off+n]), nil
		}
	}
	return nil, fmt.Errorf("%d bytes at %#x are not in one region of the guest's memory", n, user)
}

// guarded calls f, which accesses the guest's memory, and returns errFault for a fault in it.
func guarded(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if v := recover(); v != nil {
			fault, ok := v.(interface{ Addr() uintptr })
			if !ok {
				panic(v)
			}
			_ = fault
			err = errFault
		}
	}()
	f()
	return nil
}

// copyFrom copies the start of the buffers to b.
func copyFrom(b []byte, bufs []buffer) error {
	return guarded(func() {
		for _, from := range bufs {
			b = b[copy(b, from):]
		}
	})
}

// A copier copies data to buffers, one piece after the other.
type copier struct {
	bufs []buffer
	off  int // in the first of bufs
}

func (c *copier) write(b []byte) {
	for len(b) > 0 && len(c.bufs) > 0 {
		n := copy(c.bufs[0][c.off:], b)
		b = b[n:]
		if c.off += n; c.off == len(c.bufs[0]) {
			c.bufs, c.off = c.bufs[1:], 0
		}
	}
}

// appendPieces appends n bytes of the buffers, from byte off on, to pieces. It appends nothing if
// an access could fault. The bytes can change at any time.
func (m *memory) appendPieces(pieces [][]byte, bufs []buffer, off, n int) [][]byte {
	if !m.faultless {
		return pieces
	}
	for _, b := range bufs {
		if off >= len(b) {
			off -= len(b)
			continue
		}
		if n == 0 {
			break
		}
		b = b[off:min(len(b), off+n)]
		off, n = 0, n-len(b)
		if last := len(pieces) - 1; last >= 0 && adjacent(pieces[last], b) {
			pieces[last] = pieces[last][:len(pieces[last])+len(b)]
			continue
		}
		pieces = append(pieces, b)
	}
	return pieces
}

// adjacent reports whether b begins where a ends, in the same region.
func adjacent(a []byte, b buffer) bool {
	return cap(a) >= len(a)+len(b) && &a[:len(a)+1][len(a)] == &b[0]
}

// registrable reports whether the transport can register the pieces as it registers one buffer:
// they meet at the borders of pages.
func registrable(pieces [][]byte) bool {
	for i, p := range pieces {
		start := uintptr(unsafe.Pointer(&p[0]))
		if i > 0 && start%pageSize != 0 || i < len(pieces)-1 && (start+uintptr(len(p)))%pageSize != 0 {
			return false
		}
	}
	return len(pieces) > 0
}

// copyTo copies pieces of data to the buffers, one after the other.
func copyTo(bufs []buffer, head []byte, data [][]byte) error {
	c := copier{bufs: bufs}
	return guarded(func() {
		c.write(head)
		for _, d := range data {
			c.write(d)
		}
	})
}

func sizeOf(bufs []buffer) (n int) {
	for _, b := range bufs {
		n += len(b)
	}
	return n
}

// word returns the 32-bit word at an offset, which is aligned, for atomic access. The caller is
// guarded.
func (b buffer) word(off int) *uint32 { return (*uint32)(unsafe.Pointer(&b[off : off+4][0])) }

func (b buffer) uint16(off int) uint16 { return binary.LittleEndian.Uint16(b[off:]) }
