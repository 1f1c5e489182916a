package nfs3_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-git/go-billy/v5"
	"golang.org/x/sys/unix"
)

// diskFS is a directory as go-nfs wants to see it: a billy file system, with the changes that NFS
// knows.
type diskFS struct{ root string }

// diskFile adds to an os.File the locks that billy asks for and go-nfs never takes.
type diskFile struct{ *os.File }

func (diskFile) Lock() error   { return nil }
func (diskFile) Unlock() error { return nil }

// path takes names below the root, and, as go-nfs sometimes has them, with the root in front.
func (d diskFS) path(name string) string {
	return filepath.Join(d.root, filepath.Join("/", strings.TrimPrefix(name, d.root)))
}

func (d diskFS) OpenFile(name string, flag int, perm os.FileMode) (billy.File, error) {
	f, err := os.OpenFile(d.path(name), flag, perm)
	if err != nil {
		return nil, err
	}
	return diskFile{f}, nil
}

func (d diskFS) ReadDir(name string) ([]os.FileInfo, error) {
	entries, err := os.ReadDir(d.path(name))
	var infos []fs.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			infos = append(infos, info)
		}
	}
	return infos, err
}

func (d diskFS) Create(name string) (billy.File, error) {
	return d.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o666)
}
func (d diskFS) Open(name string) (billy.File, error)            { return d.OpenFile(name, os.O_RDONLY, 0) }
func (d diskFS) Stat(name string) (os.FileInfo, error)           { return os.Stat(d.path(name)) }
func (d diskFS) Lstat(name string) (os.FileInfo, error)          { return os.Lstat(d.path(name)) }
func (d diskFS) Rename(from, to string) error                    { return os.Rename(d.path(from), d.path(to)) }
func (d diskFS) Remove(name string) error                        { return os.Remove(d.path(name)) }
func (d diskFS) Join(elem ...string) string                      { return filepath.Join(elem...) }
func (d diskFS) TempFile(dir, prefix string) (billy.File, error) { return nil, billy.ErrNotSupported }
func (d diskFS) MkdirAll(name string, perm os.FileMode) error    { return os.MkdirAll(d.path(name), perm) }
func (d diskFS) Symlink(target, link string) error               { return os.Symlink(target, d.path(link)) }
func (d diskFS) Readlink(link string) (string, error)            { return os.Readlink(d.path(link)) }
func (d diskFS) Chroot(name string) (billy.Filesystem, error)    { return diskFS{d.path(name)}, nil }
func (d diskFS) Root() string                                    { return d.root }

func (d diskFS) Chmod(name string, mode os.FileMode) error   { return os.Chmod(d.path(name), mode) }
func (d diskFS) Lchown(name string, uid, gid int) error      { return os.Lchown(d.path(name), uid, gid) }
func (d diskFS) Chown(name string, uid, gid int) error       { return os.Chown(d.path(name), uid, gid) }
func (d diskFS) Chtimes(name string, at, mt time.Time) error { return os.Chtimes(d.path(name), at, mt) }
func (d diskFS) Link(name, link string) error                { return os.Link(d.path(name), d.path(link)) }
func (d diskFS) Mkfifo(name string, mode uint32) error       { return unix.Mkfifo(d.path(name), mode) }
func (d diskFS) Socket(string) error                         { return syscall.EOPNOTSUPP }
func (d diskFS) Mknod(name string, mode, major, minor uint32) error {
	return unix.Mknod(d.path(name), mode, int(unix.Mkdev(major, minor)))
}
