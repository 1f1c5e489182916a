package main

import (
	"fmt"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"
)

// size is that of the file in a slot, or an error where it has none that can be mapped.
func (w *world) size(slot int) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(w.fds[slot], &st); err != nil {
		return 0, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0, unix.ENODEV
	}
	return int(st.Size), nil
}

// doMmap maps the beginning of the file in a slot. What was mapped there is let go of first; a
// mapping outlives the descriptor that it was made from.
func doMmap(w *world, o *op) ([]field, error) {
	if err := w.unmap(o.fd); err != nil {
		return nil, err
	}
	prot := unix.PROT_READ
	if o.flags != 0 {
		prot |= unix.PROT_WRITE
	}
	if _, err := w.size(o.fd); err != nil { // nobody maps devices
		return nil, err
	}
	m, err := unix.Mmap(w.fds[o.fd], 0, o.n, prot, unix.MAP_SHARED)
	if err == nil {
		w.maps[o.fd] = m
	}
	return nil, err
}

// unmap brings what was written through a mapping to the file, for which nobody else waits, and
// ends it.
func (w *world) unmap(slot int) error {
	m := w.maps[slot]
	if m == nil {
		return nil
	}
	w.maps[slot] = nil
	err := unix.Msync(m, unix.MS_SYNC)
	if e := unix.Munmap(m); err == nil {
		err = e
	}
	w.letGo()
	return err
}

// reach is the part of a mapping that an operation is about. What is behind the end of the file in
// its last page is nobody's (mmap(2)), and left alone.
func (w *world) reach(o *op) ([]byte, error) {
	m := w.maps[o.fd]
	if m == nil {
		return nil, unix.EFAULT
	}
	n := min(o.off+o.n, len(m))
	if size, err := w.size(o.fd); err == nil && o.off < size {
		n = min(n, size)
	}
	if o.off < 0 || o.off >= n {
		return nil, unix.EFAULT
	}
	return m[o.off:n], nil
}

// touch does what touches a mapping, where pages beyond the end of the file are a SIGBUS.
func touch(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", syscall.SIGBUS)
		}
	}()
	f()
	return nil
}

func doMread(w *world, o *op) ([]field, error) {
	m, err := w.reach(o)
	if err != nil {
		return nil, err
	}
	b := make([]byte, len(m))
	if err := touch(func() { copy(b, m) }); err != nil {
		return nil, err
	}
	return got(b, len(b), nil)
}

// doMwrite writes through a mapping, reads the same back through the descriptor, and syncs.
func doMwrite(w *world, o *op) ([]field, error) {
	m, err := w.reach(o)
	if err != nil {
		return nil, err
	}
	if err := touch(func() { m[0] = 0 }); err != nil {
		return nil, err
	}
	if err := touch(func() { copy(m, pattern(o.seed, o.off, len(m))) }); err != nil {
		return nil, err
	}
	b := aligned(len(m))
	n, err := unix.Pread(w.fds[o.fd], b, int64(o.off))
	out := []field{{"back", errnoName(err)}}
	if err == nil {
		out = append(out, field{"data", digest(b[:n])})
	}
	all := w.maps[o.fd]
	return out, unix.Msync(all, unix.MS_SYNC)
}
