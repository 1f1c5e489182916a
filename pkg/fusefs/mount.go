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

// maxBackground bounds the kernel's read-ahead and direct requests in flight.
const maxBackground = 64

// disablePollTimeout bounds DisablePoll. Only programs that use their own mounts need DisablePoll,
// so a mount does not fail without it.
const disablePollTimeout = 5 * time.Second

// MountOptions configures the mount of an FS.
type MountOptions struct {
	// FsName is the source shown in /proc/mounts: "host:/export".
	FsName string
	// ReadOnly makes the mount read-only.
	ReadOnly bool
	// Suid allows set-user-ID and set-group-ID programs on the mount, and Dev allows device files.
	// NoExec forbids running programs from the mount.
	Suid, Dev, NoExec bool
	// SkipDisablePoll makes Mount skip DisablePoll. Set SkipDisablePoll when this process opens no
	// file on the mount, or calls DisablePoll first. Mount then makes no system call on the new
	// mount. A process that is killed during such a call waits for its own reply forever: the
	// process stays a zombie and the mount stays.
	SkipDisablePoll bool
	// Logger receives go-fuse's messages. The default is the standard logger.
	Logger *log.Logger
}

// A Server is one mounted FS. The methods of a Server are safe for concurrent use.
type Server struct {
	fs     *FS
	dir    string // without symbolic links
	dev    device // of the mounted file system
	device *fuseDevice
	done   chan struct{} // closed when all requests have ended and the mount point is free

	mu    sync.Mutex // held during umount(2)
	state mountState // guarded by mu
}

// Mount mounts fs on dir with mount(2), which requires CAP_SYS_ADMIN, and serves it until it is
// unmounted. dir must be an existing directory. All users can access the mount with their own
// permissions. An FS can be mounted only once.
func Mount(dir string, fs *FS, opts MountOptions) (*Server, error) {
	abs, err := mountPoint(dir)
	if err != nil {
		return nil, err
	}
	maxWrite := min(fs.buffers.Size(), MaxIOSize)
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
	if !opts.SkipDisablePoll {
		DisablePoll(abs)
	}
	s.tune(maxWrite)
	return s, nil
}

// DisablePoll informs the kernel that files on the mount at dir do not support poll(2). A
// process that serves a mount and also opens files on it must call DisablePoll first. DisablePoll
// returns after 5 seconds at most, even if the server does not answer.
func DisablePoll(dir string) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		disablePoll(dir)
	}()
	select {
	case <-done:
	case <-time.After(disablePollTimeout):
		// The kernel first requests the root's attributes, and the server does not answer.
	}
}

// mountPoint returns the directory without symbolic links, as in the kernel's mount table.
func mountPoint(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("mount %s: %w", dir, err)
	}
	if st, err := os.Stat(abs); err != nil {
		return "", fmt.Errorf("mount %s: %w", abs, err)
	} else if !st.IsDir() {
		return "", fmt.Errorf("mount %s: %w", abs, syscall.ENOTDIR)
	}
	resolved, err := filepath.EvalSymlinks(abs)
	if err != nil {
		return "", fmt.Errorf("mount %s: %w", abs, err)
	}
	return resolved, nil
}

// start mounts the file system and negotiates the FUSE protocol with the kernel.
func (s *Server) start(opts *MountOptions, maxWrite int) (*fuse.Server, error) {
	if err := s.device.mount(s.dir, opts, maxWrite); err != nil {
		return nil, err
	}
	var err error
	if s.dev, err = deviceAt(unix.AT_FDCWD, s.dir); err != nil {
		_ = unix.Unmount(s.dir, unix.MNT_DETACH)
		return nil, fmt.Errorf("find device number of new mount: %w", err)
	}
	path, err := s.device.pathForServer()
	if err != nil {
		_ = s.detach(unix.MNT_DETACH)
		return nil, err
	}
	// The server clears set-user-ID and set-group-ID bits when another user writes to or chowns a
	// file. Without HANDLE_KILLPRIV the kernel would send a SETATTR as the writer, who may not have
	// permission for it.
	srv, err := fuse.NewServer(s.fs, path, &fuse.MountOptions{
		MaxBackground:     maxBackground,
		MaxWrite:          maxWrite,
		MaxReadAhead:      maxWrite,
		DisableXAttrs:     true,
		ExtraCapabilities: fuse.CAP_READDIRPLUS_AUTO | fuse.CAP_DIRECT_IO_ALLOW_MMAP | fuse.CAP_HANDLE_KILLPRIV,
		Logger:            opts.Logger,
	})
	if err != nil {
		_ = s.detach(unix.MNT_DETACH)
		return nil, err
	}
	return srv, nil
}

// serve handles the kernel's requests until the connection ends. After an abort every call on the
// mount point fails, so serve unmounts it.
func (s *Server) serve(srv *fuse.Server) {
	defer close(s.done)
	srv.Serve()
	s.fs.interrupts.watch(nil)
	s.device.close()
	_, _ = s.umount(unix.MNT_DETACH) // callers of Unmount get the error
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
		return fmt.Errorf("mount %s: %w; load the fuse kernel module, or pass /dev/fuse to the container", dir, err)
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("mount %s: %w; mount(2) requires CAP_SYS_ADMIN, run as root", dir, err)
	}
	return fmt.Errorf("mount %s: %w", dir, err)
}

// tune raises the kernel's read-ahead to one full request. The default of 128 KiB would bound every
// buffered read. Where /sys is read-only, reads are smaller but correct.
func (s *Server) tune(maxRead int) {
	path := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", s.dev.major, s.dev.minor)
	_ = os.WriteFile(path, []byte(strconv.Itoa(maxRead>>10)), 0)
}

// Dir returns the absolute path of the mount point, without symbolic links.
func (s *Server) Dir() string { return s.dir }
