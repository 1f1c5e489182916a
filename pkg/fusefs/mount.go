package fusefs

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Subtype makes the mount's type in /proc/mounts "fuse.nfsrdma".
const Subtype = "nfsrdma"

// maxBackground is the number of read-ahead and direct requests that the kernel may have under way.
const maxBackground = 64

// MountOptions say how an FS is mounted.
type MountOptions struct {
	// FsName is the source shown in /proc/mounts: "host:/export".
	FsName string
	// ReadOnly mounts for reading only.
	ReadOnly bool
	// OnlyOwner keeps all users but the one who mounts out of the mount. By default all users get in, with their own rights.
	OnlyOwner bool
	// Suid and Dev let set-id bits and device files on the mount work. NoExec keeps programs on it from running.
	Suid, Dev, NoExec bool
	// MaxWrite bounds one request's data in octets, MinIOSize to MaxIOSize; default and upper bound: the FS's buffers.
	MaxWrite int
	// Debug prints every request to Logger.
	Debug bool
	// Logger gets go-fuse's messages; default: the standard logger.
	Logger *log.Logger
}

// A Server is one mounted FS. Its methods may be called concurrently.
type Server struct {
	fs   *FS
	srv  *fuse.Server
	dir  string
	dev  uint32 // minor device number: the name of the connection below /sys/fs/fuse
	done chan struct{}

	mu   sync.Mutex
	gone bool // unmounted by us
}

// Mount mounts fs on dir with mount(2), which takes CAP_SYS_ADMIN, and serves it until it is unmounted. dir must be
// an existing directory. The FS can be mounted once.
func Mount(dir string, fs *FS, opts MountOptions) (*Server, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", dir, err)
	}
	if st, err := os.Stat(abs); err != nil {
		return nil, fmt.Errorf("mount point: %w", err)
	} else if !st.IsDir() {
		return nil, fmt.Errorf("mount point %s: %w", abs, syscall.ENOTDIR)
	}
	maxWrite := min(fs.buffers.Size(), MaxIOSize)
	if opts.MaxWrite != 0 {
		if opts.MaxWrite < MinIOSize || opts.MaxWrite > MaxIOSize {
			return nil, fmt.Errorf("mount %s: requests of %d octets: they must be %d to %d octets", abs, opts.MaxWrite, MinIOSize, MaxIOSize)
		}
		maxWrite = min(maxWrite, opts.MaxWrite)
	}
	srv, err := fuse.NewServer(fs, abs, &fuse.MountOptions{
		AllowOther: !opts.OnlyOwner,
		// Without default_permissions names in the kernel's cache would let users through directories that are closed to them.
		Options:           []string{"default_permissions"},
		FsName:            opts.FsName,
		Name:              Subtype,
		MaxBackground:     maxBackground,
		MaxWrite:          maxWrite,
		MaxReadAhead:      maxWrite,
		DisableXAttrs:     true,
		DirectMountStrict: true,
		DirectMountFlags:  opts.flags(),
		ExtraCapabilities: fuse.CAP_READDIRPLUS_AUTO | fuse.CAP_DIRECT_IO_ALLOW_MMAP,
		Debug:             opts.Debug,
		Logger:            opts.Logger,
	})
	if err != nil {
		return nil, mountError(abs, err)
	}
	s := &Server{fs: fs, srv: srv, dir: abs, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		srv.Serve()
	}()
	if err := srv.WaitMount(); err != nil {
		return nil, errors.Join(fmt.Errorf("mount %s: %w", abs, err), s.Unmount())
	}
	s.tune(maxWrite)
	return s, nil
}

func (o *MountOptions) flags() uintptr {
	flags := uintptr(unix.MS_MGC_VAL) // means nothing to the kernel, and to go-fuse that the rest is meant as it is
	for _, f := range []struct {
		on  bool
		bit uintptr
	}{{!o.Suid, unix.MS_NOSUID}, {!o.Dev, unix.MS_NODEV}, {o.NoExec, unix.MS_NOEXEC}, {o.ReadOnly, unix.MS_RDONLY}} {
		if f.on {
			flags |= f.bit
		}
	}
	return flags
}

func mountError(dir string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("mount %s: no /dev/fuse: load the fuse kernel module, or give the container the device: %w", dir, err)
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("mount %s: mount(2) needs root (CAP_SYS_ADMIN): %w", dir, err)
	}
	return fmt.Errorf("mount %s: %w", dir, err)
}

// tune learns the mount's device number and lets the kernel read ahead by whole requests: its default of 128 KiB would bound every
// buffered read. Where /sys cannot be written, reads are smaller and right.
func (s *Server) tune(maxRead int) {
	var st unix.Statx_t
	// AT_STATX_DONT_SYNC: the answer is in the kernel, no request is made.
	if err := unix.Statx(unix.AT_FDCWD, s.dir, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st); err != nil {
		return
	}
	s.dev = st.Dev_minor
	path := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", st.Dev_major, st.Dev_minor)
	_ = os.WriteFile(path, []byte(strconv.Itoa(maxRead>>10)), 0)
}

// Dir is the absolute path of the mount point.
func (s *Server) Dir() string { return s.dir }

// copyGrace is how long an unmount waits for the kernel to end the connection, which it does at once unless
// another mount namespace (a container's, a service's) holds a copy of the mount.
const copyGrace = 2 * time.Second

// Unmount unmounts and waits for the last request. It returns EBUSY while files are open. Copies of the mount in
// other mount namespaces end with it.
func (s *Server) Unmount() error {
	if err := s.umount(0); err != nil {
		return err
	}
	select {
	case <-s.done:
	case <-time.After(copyGrace):
		s.abortConnection()
		<-s.done
	}
	return nil
}

// connectionsDir is where the kernel's control file system usually is.
const connectionsDir = "/sys/fs/fuse/connections"

// abortConnection has the kernel drop the requests it has, so that processes which hold files of the mount open get on.
func (s *Server) abortConnection() {
	if s.dev == 0 {
		return
	}
	name := filepath.Join(strconv.FormatUint(uint64(s.dev), 10), "abort")
	if os.WriteFile(filepath.Join(connectionsDir, name), []byte("1"), 0) == nil {
		return
	}
	// The control file system is not mounted everywhere: look at it for a moment.
	dir, err := os.MkdirTemp("", "nfsrdmad-fusectl")
	if err != nil {
		return
	}
	defer os.Remove(dir)
	if unix.Mount("fusectl", dir, "fusectl", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "") != nil {
		return
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	_ = os.WriteFile(filepath.Join(dir, name), []byte("1"), 0)
}

// UnmountLazy takes the mount out of the tree at once; it ends when its last file is closed (see Wait).
func (s *Server) UnmountLazy() error { return s.umount(unix.MNT_DETACH) }

func (s *Server) umount(flags int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return nil
	}
	select {
	case <-s.done: // unmounted by someone else
		s.gone = true
		return nil
	default:
	}
	if err := unix.Unmount(s.dir, flags); err != nil {
		return fmt.Errorf("umount %s: %w", s.dir, err)
	}
	s.gone = true
	return nil
}

// ForceUnmount unmounts whatever is going on: calls under way end with an error, and data that is not written is lost. It asks the
// server nothing and does not wait for it.
func (s *Server) ForceUnmount() error {
	s.fs.Abort()
	err := s.umount(unix.MNT_DETACH)
	s.abortConnection()
	<-s.done
	return err
}

// Wait returns when the mount is gone, by whatever hand.
func (s *Server) Wait() { <-s.done }

// WaitContext is Wait bounded by ctx.
func (s *Server) WaitContext(ctx context.Context) error {
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
