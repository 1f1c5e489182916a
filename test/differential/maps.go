package differential

import (
	"fmt"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"
)

// size returns the size of the file in a slot, or an error if the file cannot be mapped.
func (w *side) size(slot int) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(w.fds[slot], &st); err != nil {
		return 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0, unix.ENODEV
	}
	return int(st.Size), nil
}

// doMmap maps the start of the file in a slot, and unmaps the slot's previous mapping. A mapping
// outlives its descriptor.
func doMmap(w *side, o *Op) ([]Field, error) {
	if err := w.unmap(o.fd); err != nil {
		return nil, err
	}
	prot := unix.PROT_READ
	if o.flags != 0 {
		prot |= unix.PROT_WRITE
	}
	if _, err := w.size(o.fd); err != nil { // devices are not mapped
		return nil, err
	}
	m, err := unix.Mmap(w.fds[o.fd], 0, o.n, prot, unix.MAP_SHARED)
	if err == nil {
		w.maps[o.fd] = m
	}
	return nil, err
}

// unmap writes the data of a mapping to the file and removes the mapping.
func (w *side) unmap(slot int) error {
	m := w.maps[slot]
	if m == nil {
		return nil
	}
	w.maps[slot] = nil
	err := unix.Msync(m, unix.MS_SYNC)
	if e := unix.Munmap(m); err == nil {
		err = e
	}
	w.awaitRelease(true) // the file may be removed
	return err
}

// roundUp returns the first byte after the page that contains the end of a file.
func roundUp(size int) int {
	page := unix.Getpagesize()
	return (size + page - 1) / page * page
}

// mapped returns the part of a mapping that an operation uses. It excludes the rest of the last
// page, whose content is undefined (mmap(2)). A write there changes the time of a local file only.
func (w *side) mapped(o *Op) ([]byte, error) {
	m := w.maps[o.fd]
	if m == nil {
		return nil, unix.EFAULT
	}
	n := min(o.off+o.n, len(m))
	if size, err := w.size(o.fd); err == nil && o.off < roundUp(size) {
		n = min(n, size)
	}
	if o.off < 0 || o.off >= n {
		return nil, unix.EFAULT
	}
	return m[o.off:n], nil
}

// accessMapping calls f, which accesses a mapping, and returns SIGBUS for a page after the file's
// end.
func accessMapping(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", syscall.SIGBUS)
		}
	}()
	f()
	return nil
}

func doMread(w *side, o *Op) ([]Field, error) {
	m, err := w.mapped(o)
	if err != nil {
		return nil, err
	}
	b := make([]byte, len(m))
	if err := accessMapping(func() { copy(b, m) }); err != nil {
		return nil, err
	}
	return got(b, len(b), nil)
}

// doMwrite writes through a mapping, reads the data through the descriptor, and syncs.
func doMwrite(w *side, o *Op) ([]Field, error) {
	m, err := w.mapped(o)
	if err != nil {
		return nil, err
	}
	if err := accessMapping(func() { m[0] = 0 }); err != nil {
		return nil, err
	}
	if err := accessMapping(func() { copy(m, Pattern(o.seed, o.off, len(m))) }); err != nil {
		return nil, err
	}
	b := Aligned(len(m))
	n, err := unix.Pread(w.fds[o.fd], b, int64(o.off))
	out := []Field{{"back", errnoName(err)}}
	if err == nil {
		out = append(out, Field{"data", digest(b[:n])})
	}
	all := w.maps[o.fd]
	return out, unix.Msync(all, unix.MS_SYNC)
}
