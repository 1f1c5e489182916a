package differential

import (
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A mapping is a shared mapping of a file. It outlives the descriptor of the file.
type mapping struct {
	data []byte // nil: no mapping
	// file refers to the mapped file on the reference of a Run with LikeNFS. It is opened with
	// O_PATH: its close releases no lock.
	file   int
	opener int // user who opened the file
}

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

// doMmap maps the start of the file in a slot, and unmaps the slot's previous mapping.
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
	m := mapping{file: -1, opener: w.openers[o.fd]}
	var err error
	if m.data, err = unix.Mmap(w.fds[o.fd], 0, o.n, prot, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	if w.likeNFS {
		m.file, err = unix.Open(procPath(w.fds[o.fd]), unix.O_PATH|unix.O_CLOEXEC, 0)
	}
	w.maps[o.fd] = m
	return w.mappedFields(m), err
}

// mappedField is the field with the number of the inode that mmap maps, and the user who opened it.
const mappedField = contextPrefix + "mapped"

func (w *side) mappedFields(m mapping) []Field {
	var st unix.Stat_t
	if !w.likeNFS || unix.Fstat(m.file, &st) != nil {
		return nil
	}
	return []Field{{mappedField, fmt.Sprintf("%d %d", st.Ino, m.opener)}}
}

// mappers are the users who mapped files in a run. FUSE writes the pages of a file through one of
// the open files that were mapped, whichever mapping was written to. So the rights for the WRITE
// are not known when several users mapped the file.
type mappers struct {
	inodes map[[2]int]string          // by process and slot
	users  map[string]map[string]bool // by inode
}

// mapped records the file that an operation mapped.
func (m *mappers) mapped(process int, o *Op, reference []Field) {
	at := slices.IndexFunc(reference, func(f Field) bool { return f.Name == mappedField })
	if at < 0 {
		return
	}
	inode, user, _ := strings.Cut(reference[at].Value, " ")
	m.inodes[[2]int{process, o.fd}] = inode
	if m.users[inode] == nil {
		m.users[inode] = make(map[string]bool)
	}
	m.users[inode][user] = true
}

// several reports whether an operation writes through a mapping of a file that several users
// mapped.
func (m *mappers) several(process int, o *Op) bool {
	return o.do == "mwrite" && len(m.users[m.inodes[[2]int{process, o.fd}]]) > 1
}

// procPath returns a path of an open file, also when the file has no name.
func procPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// unmap writes the data of a mapping to the file and removes the mapping.
func (w *side) unmap(slot int) error {
	m := w.maps[slot]
	if m.data == nil {
		return nil
	}
	w.maps[slot] = mapping{}
	err := unix.Msync(m.data, unix.MS_SYNC)
	if e := unix.Munmap(m.data); err == nil {
		err = e
	}
	if m.file >= 0 {
		unix.Close(m.file)
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
	m := w.maps[o.fd].data
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
	err = unix.Msync(w.maps[o.fd].data, unix.MS_SYNC)
	return append(out, w.clearSetID(o)...), err
}

// clearSetID clears the set-id bits of a mapped file on the reference, as a server does when it
// executes the WRITE of another user than root. A local write through a mapping keeps the bits.
// truncate(2) to the same size clears the bits that write(2) clears.
func (w *side) clearSetID(o *Op) []Field {
	m := w.maps[o.fd]
	var st unix.Stat_t
	if !w.likeNFS || users[m.opener] == root || unix.Fstat(m.file, &st) != nil ||
		st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 {
		return nil
	}
	if w.show {
		return []Field{{contextPrefix + "setid", "kept"}}
	}
	if err := unix.Truncate(procPath(m.file), st.Size); err != nil {
		return []Field{{"setid", errnoName(err)}}
	}
	return nil
}
