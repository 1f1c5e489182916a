package nfsserve

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path"
	"sort"
	"syscall"
	"time"

	"github.com/go-git/go-billy/v5"
	"golang.org/x/sys/unix"
)

// exportFS is the exported directory as one go-nfs worker sees it: confined by os.Root, never
// through a symbolic link, under the credential of the call that the worker executes. It is used by
// one goroutine at a time.
type exportFS struct {
	tree     *tree
	readOnly bool

	who  cred
	sync bool  // writes reach the disk before they are answered
	err  error // the last failure of this call, for the status that go-nfs does not pass on
	// Of a READDIRPLUS: where it goes on, and how many entries its reply has at most.
	cookie uint64
	page   int
}

var _ billy.Filesystem = (*exportFS)(nil)

// clean makes a path as go-nfs joins it one that os.Root takes.
func clean(name string) string {
	if name = path.Clean("/" + name)[1:]; name == "" {
		return "."
	}
	return name
}

// do runs an operation as the caller and remembers its failure.
func (e *exportFS) do(f func() error) error {
	err := e.who.as(f)
	if err != nil {
		e.err = err
	}
	return err
}

// Capabilities says what go-nfs may do.
func (e *exportFS) Capabilities() billy.Capability {
	if e.readOnly {
		return billy.ReadCapability | billy.SeekCapability
	}
	return billy.AllCapabilities
}

// Create makes or opens a file for writing. It does not truncate: UNCHECKED changes only the
// attributes given (RFC 1813 §3.3.8).
func (e *exportFS) Create(name string) (billy.File, error) {
	return e.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o666)
}

// Open opens a file for reading.
func (e *exportFS) Open(name string) (billy.File, error) { return e.OpenFile(name, os.O_RDONLY, 0) }

// OpenFile opens a regular file. Its owner is let in whatever the mode says, as NFS servers do: a
// client checked when the file was opened, and the mode may have changed since (RFC 1813 §4.4).
func (e *exportFS) OpenFile(name string, flag int, perm os.FileMode) (billy.File, error) {
	name = clean(name)
	info, err := e.tree.root.Lstat(name)
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: name, Err: irregular(info)}
		e.err = err
		return nil, err
	}
	var f *os.File
	open := func() (err error) {
		f, err = e.tree.root.OpenFile(name, flag, perm)
		return err
	}
	if err = e.who.as(open); errors.Is(err, os.ErrPermission) && info != nil && ownerOf(info) == e.who.uid {
		err = open()
	}
	if err != nil {
		e.err = err
		return nil, err
	}
	return &exportFile{File: f, fs: e, name: name}, nil
}

func irregular(info os.FileInfo) error {
	if info.IsDir() {
		return syscall.EISDIR
	}
	return syscall.EINVAL
}

func ownerOf(info os.FileInfo) uint32 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return nobody
}

// Stat is Lstat: a server never follows a link.
func (e *exportFS) Stat(name string) (os.FileInfo, error) { return e.Lstat(name) }

// Lstat runs as the server: who holds a handle may see attributes (RFC 1813 §3.3.1), and lookups
// are checked by [front].
func (e *exportFS) Lstat(name string) (os.FileInfo, error) {
	info, err := e.tree.root.Lstat(clean(name))
	if err != nil {
		e.err = err
		return nil, err
	}
	return wireInfo{info}, nil
}

// Rename renames, and lets the handles follow. Not by os.Root, which refuses to replace an empty
// directory (RFC 1813 §3.3.14).
func (e *exportFS) Rename(from, to string) error {
	from, to = clean(from), clean(to)
	err := e.at(from, func(fromDir int, fromBase string) error {
		return e.atDir(to, func(toDir int, toBase string) error {
			return unix.Renameat(fromDir, fromBase, toDir, toBase)
		})
	})
	if err == nil {
		e.tree.renamed(from, to)
	}
	return err
}

// Remove removes a file or an empty directory.
func (e *exportFS) Remove(name string) error {
	name = clean(name)
	err := e.do(func() error { return e.tree.root.Remove(name) })
	if err == nil {
		e.tree.removed(name)
	}
	return err
}

// Join joins path elements.
func (e *exportFS) Join(elem ...string) string { return path.Join(elem...) }

// TempFile is not an operation of NFS.
func (e *exportFS) TempFile(string, string) (billy.File, error) { return nil, billy.ErrNotSupported }

// ReadDir lists a directory, sorted by name.
func (e *exportFS) ReadDir(name string) ([]os.FileInfo, error) {
	var entries []os.DirEntry
	err := e.do(func() error {
		// a symbolic link would be followed
		if info, err := e.tree.root.Lstat(clean(name)); err != nil || !info.IsDir() {
			return cmp.Or(err, error(syscall.ENOTDIR))
		}
		d, err := e.tree.root.OpenFile(clean(name), os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer d.Close()
		entries, err = d.ReadDir(-1)
		return err
	})
	if err != nil {
		return nil, err
	}
	infos := make([]os.FileInfo, 0, len(entries))
	for _, entry := range entries {
		info, err := e.tree.root.Lstat(path.Join(clean(name), entry.Name()))
		if err != nil {
			continue // removed meanwhile
		}
		infos = append(infos, wireInfo{info})
	}
	sort.Slice(infos, func(i, j int) bool { return infos[i].Name() < infos[j].Name() })
	return infos, nil
}

// MkdirAll makes one directory; its parent is there, or the call fails.
func (e *exportFS) MkdirAll(name string, perm os.FileMode) error {
	return e.do(func() error { return e.tree.root.Mkdir(clean(name), perm.Perm()) })
}

// Symlink makes a symbolic link whose text is not looked at.
func (e *exportFS) Symlink(target, link string) error {
	return e.do(func() error { return e.tree.root.Symlink(target, clean(link)) })
}

// Readlink reads a link's text.
func (e *exportFS) Readlink(link string) (target string, err error) {
	err = e.do(func() (err error) {
		target, err = e.tree.root.Readlink(clean(link))
		return err
	})
	return target, err
}

// Chroot is not an operation of NFS.
func (e *exportFS) Chroot(string) (billy.Filesystem, error) { return nil, billy.ErrNotSupported }

// Root is the export's root.
func (e *exportFS) Root() string { return "/" }

// at runs f with the directory of name open and the last element of name, for the calls that
// os.Root lacks.
func (e *exportFS) at(name string, f func(dirfd int, base string) error) error {
	return e.do(func() error { return e.atDir(name, f) })
}

func (e *exportFS) atDir(name string, f func(dirfd int, base string) error) error {
	dir, base := path.Split(clean(name))
	d, err := e.tree.root.OpenFile(clean(dir), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer d.Close()
	return f(int(d.Fd()), base)
}

// Chmod sets the permission bits; of a symbolic link they mean nothing.
func (e *exportFS) Chmod(name string, mode os.FileMode) error {
	return e.chmod(name, uint32(mode.Perm()))
}

// chmod sets all twelve mode bits.
func (e *exportFS) chmod(name string, mode uint32) error {
	info, err := e.tree.root.Lstat(clean(name))
	if err != nil || info.Mode()&os.ModeSymlink != 0 {
		return err
	}
	m := os.FileMode(mode & 0o777)
	for bit, goBit := range map[uint32]os.FileMode{unix.S_ISUID: os.ModeSetuid, unix.S_ISGID: os.ModeSetgid,
		unix.S_ISVTX: os.ModeSticky} {
		if mode&bit != 0 {
			m |= goBit
		}
	}
	return e.do(func() error { return e.tree.root.Chmod(clean(name), m) })
}

// Lchown sets the owner of the object itself.
func (e *exportFS) Lchown(name string, uid, gid int) error {
	return e.do(func() error { return e.tree.root.Lchown(clean(name), uid, gid) })
}

// Chown is Lchown: a server never follows a link.
func (e *exportFS) Chown(name string, uid, gid int) error { return e.Lchown(name, uid, gid) }

// Chtimes sets both times of the object itself.
func (e *exportFS) Chtimes(name string, atime, mtime time.Time) error {
	return e.utimes(name, [2]unix.Timespec{unix.NsecToTimespec(atime.UnixNano()),
		unix.NsecToTimespec(mtime.UnixNano())})
}

func (e *exportFS) utimes(name string, ts [2]unix.Timespec) error {
	return e.at(name, func(fd int, base string) error {
		return unix.UtimesNanoAt(fd, base, ts[:], unix.AT_SYMLINK_NOFOLLOW)
	})
}

// Mknod makes a device file. mode holds the type too.
func (e *exportFS) Mknod(name string, mode, major, minor uint32) error {
	return e.at(name, func(fd int, base string) error {
		return unix.Mknodat(fd, base, mode, int(unix.Mkdev(major, minor)))
	})
}

// Mkfifo makes a named pipe.
func (e *exportFS) Mkfifo(name string, mode uint32) error {
	return e.Mknod(name, unix.S_IFIFO|mode&0o777, 0, 0)
}

// Socket makes the name of a socket.
func (e *exportFS) Socket(name string) error { return e.Mknod(name, unix.S_IFSOCK|0o666, 0, 0) }

// Link makes another name of a file.
func (e *exportFS) Link(target, link string) error {
	return e.do(func() error { return e.tree.root.Link(clean(target), clean(link)) })
}

// An exportFile is an open file.
type exportFile struct {
	*os.File
	fs      *exportFS
	name    string
	written bool
}

// Name is the path within the export, by which go-nfs looks the file up again.
func (f *exportFile) Name() string { return f.name }

// Write writes at the file's offset. An error closes the file: go-nfs does not close what it could
// not write to, and the space of a file that is removed later would stay taken.
func (f *exportFile) Write(p []byte) (int, error) {
	f.written = true
	n, err := f.File.Write(p)
	if err != nil {
		f.fs.err = err
		_ = f.File.Close()
	}
	return n, err
}

// Seek sets the offset of the next Write. Some file systems refuse here what is beyond their
// largest file. An error closes the file, as in Write.
func (f *exportFile) Seek(offset int64, whence int) (int64, error) {
	at, err := f.File.Seek(offset, whence)
	if err != nil {
		f.fs.err = syscall.EFBIG
		_ = f.File.Close()
	}
	return at, err
}

// Truncate sets the size. An error closes the file, as in Write.
func (f *exportFile) Truncate(size int64) error {
	err := f.File.Truncate(size)
	if err != nil {
		f.fs.err = err
		_ = f.File.Close()
	}
	return err
}

// Close closes the file, after an fsync when the WRITE asked for stable storage (RFC 1813 §3.3.7).
func (f *exportFile) Close() error {
	var err error
	if f.written && f.fs.sync {
		err = f.File.Sync()
	}
	if cerr := f.File.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		f.fs.err = err
	}
	return err
}

// Lock does nothing: NLM is another protocol.
func (f *exportFile) Lock() error { return nil }

// Unlock does nothing.
func (f *exportFile) Unlock() error { return nil }

// wireInfo gives the mode's set-id and sticky bits where NFS has them; go-nfs sends the number as
// it is.
type wireInfo struct{ os.FileInfo }

// Mode is the type in Go's bits, and twelve bits of mode as in mode3 (RFC 1813 §2.5).
func (w wireInfo) Mode() os.FileMode {
	m := w.FileInfo.Mode()
	out := m &^ (os.ModeSetuid | os.ModeSetgid | os.ModeSticky)
	if m&os.ModeSetuid != 0 {
		out |= unix.S_ISUID
	}
	if m&os.ModeSetgid != 0 {
		out |= unix.S_ISGID
	}
	if m&os.ModeSticky != 0 {
		out |= unix.S_ISVTX
	}
	return out
}
