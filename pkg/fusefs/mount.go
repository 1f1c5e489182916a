package fusefs

import (
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

// settleTime is how long SettlePoll waits for what only matters to programs that use their own
// mounts.
const settleTime = 5 * time.Second

// MountOptions say how an FS is mounted.
type MountOptions struct {
	// FsName is the source shown in /proc/mounts: "host:/export".
	FsName string
	// ReadOnly mounts for reading only.
	ReadOnly bool
	// OnlyOwner keeps all users but the one who mounts out of the mount. By default all users get
	// in, with their own rights.
	OnlyOwner bool
	// Suid and Dev let set-id bits and device files on the mount work. NoExec keeps programs on it
	// from running.
	Suid, Dev, NoExec bool
	// MaxWrite bounds one request's data in octets, MinIOSize to MaxIOSize; default and upper
	// bound: the FS's buffers.
	MaxWrite int
	// NotUsedHere says that this process opens no file on the mount itself, or calls SettlePoll
	// before. Mount then makes no call on the new mount: a process that is killed during one waits
	// for its own answer for ever, as a zombie that keeps the mount with it.
	NotUsedHere bool
	// Debug prints every request to Logger.
	Debug bool
	// Logger gets go-fuse's messages; default: the standard logger.
	Logger *log.Logger
}

// A Server is one mounted FS. Its methods may be called concurrently.
type Server struct {
	fs     *FS
	dir    string // without symbolic links
	dev    device // of the mounted file system
	device *fuseDevice
	done   chan struct{} // closed when no request is worked on any more and the mount point is free

	mu    sync.Mutex // held during umount(2)
	ended ending     // what we did to the mount
}

// Mount mounts fs on dir with mount(2), which takes CAP_SYS_ADMIN, and serves it until it is
// unmounted. dir must be an existing directory. The FS can be mounted once.
func Mount(dir string, fs *FS, opts MountOptions) (*Server, error) {
	abs, err := mountPoint(dir)
	if err != nil {
		return nil, err
	}
	maxWrite := min(fs.buffers.Size(), MaxIOSize)
	if opts.MaxWrite != 0 {
		if opts.MaxWrite < MinIOSize || opts.MaxWrite > MaxIOSize {
			return nil, fmt.Errorf("mount %s: requests of %d octets: they must be %d to %d octets", abs,
				opts.MaxWrite, MinIOSize, MaxIOSize)
		}
		maxWrite = min(maxWrite, opts.MaxWrite)
	}
	s := &Server{fs: fs, dir: abs, done: make(chan struct{})}
	if s.device, err = openFuse(); err != nil {
		return nil, mountError(abs, err)
	}
	srv, err := s.start(&opts, maxWrite)
	if err != nil {
		s.device.close()
		return nil, mountError(abs, err)
	}
	fs.interrupts.watch(s.device)
	go s.serve(srv)
	if !opts.NotUsedHere {
		SettlePoll(abs)
	}
	s.tune(maxWrite)
	return s, nil
}

// SettlePoll readies the mount at dir for a process that serves it and opens files on it, too. It
// waits for the server for a few seconds at most.
func SettlePoll(dir string) {
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		settlePoll(dir)
	}()
	select {
	case <-settled:
	// the kernel asks for the root's attributes first, and the server does not answer
	case <-time.After(settleTime):
	}
}

// mountPoint is the directory without symbolic links, as the kernel names it in its mount table.
func mountPoint(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("mount %s: %w", dir, err)
	}
	if st, err := os.Stat(abs); err != nil {
		return "", fmt.Errorf("mount point: %w", err)
	} else if !st.IsDir() {
		return "", fmt.Errorf("mount point %s: %w", abs, syscall.ENOTDIR)
	}
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return "", fmt.Errorf("mount point: %w", err)
	}
	return abs, nil
}

// start mounts and shakes hands with the kernel.
func (s *Server) start(opts *MountOptions, maxWrite int) (*fuse.Server, error) {
	if err := s.device.mount(s.dir, opts, maxWrite); err != nil {
		return nil, err
	}
	var err error
	if s.dev, err = deviceAt(unix.AT_FDCWD, s.dir); err != nil {
		_ = unix.Unmount(s.dir, unix.MNT_DETACH)
		return nil, fmt.Errorf("look at what was just mounted: %w", err)
	}
	path, err := s.device.pathForServer()
	if err != nil {
		_ = s.detach(unix.MNT_DETACH)
		return nil, err
	}
	// The server takes set-id bits away from a file that others write to or chown. Without
	// HANDLE_KILLPRIV the kernel would ask for that with a SETATTR of the writer's, who may write
	// but not do that.
	srv, err := fuse.NewServer(s.fs, path, &fuse.MountOptions{
		MaxBackground:     maxBackground,
		MaxWrite:          maxWrite,
		MaxReadAhead:      maxWrite,
		DisableXAttrs:     true,
		ExtraCapabilities: fuse.CAP_READDIRPLUS_AUTO | fuse.CAP_DIRECT_IO_ALLOW_MMAP | fuse.CAP_HANDLE_KILLPRIV,
		Debug:             opts.Debug,
		Logger:            opts.Logger,
	})
	if err != nil {
		_ = s.detach(unix.MNT_DETACH)
		return nil, err
	}
	return srv, nil
}

// serve works on the kernel's requests until the connection ends. One that was aborted leaves a
// mount point on which every call fails; nobody could use or unmount it through us later, so it
// goes.
func (s *Server) serve(srv *fuse.Server) {
	defer close(s.done)
	srv.Serve()
	s.fs.interrupts.watch(nil)
	s.device.close()
	_, _ = s.umount(unix.MNT_DETACH) // whoever unmounts hears of an error
}

func (o *MountOptions) flags() uintptr {
	var flags uintptr
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
		return fmt.Errorf("mount %s: no /dev/fuse: load the fuse kernel module, or give the container the device: %w",
			dir, err)
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("mount %s: mount(2) needs root (CAP_SYS_ADMIN): %w", dir, err)
	}
	return fmt.Errorf("mount %s: %w", dir, err)
}

// tune lets the kernel read ahead by whole requests: its default of 128 KiB would bound every
// buffered read. Where /sys cannot be written, reads are smaller and right.
func (s *Server) tune(maxRead int) {
	path := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", s.dev.major, s.dev.minor)
	_ = os.WriteFile(path, []byte(strconv.Itoa(maxRead>>10)), 0)
}

// Dir is the absolute path of the mount point, without symbolic links.
func (s *Server) Dir() string { return s.dir }
