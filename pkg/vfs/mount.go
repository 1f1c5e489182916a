package vfs

import (
	"errors"
	"fmt"
	"log"
	"os"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
)

// maxBackground bounds the kernel's read-ahead and direct requests in flight.
const maxBackground = 64

// readAheadRequests is the number of READ requests of maximum size that the kernel keeps in flight
// for a program that reads a file in order. With one request, the connection would be idle while
// the kernel copies the data of a reply.
const readAheadRequests = 2

// MountOptions configures the mount of an FS.
type MountOptions struct {
	mountpoint.Options
	// SkipDisablePoll makes Mount skip DisablePoll. Set SkipDisablePoll when this process opens no
	// file on the mount, or calls DisablePoll first. Mount then makes no system call on the new
	// mount. A process that is killed during such a call waits for its own reply forever: the
	// process stays a zombie and the mount stays.
	SkipDisablePoll bool
	// Mounted, if not nil, is called with the connection after the mount and before the first
	// request, and with the memory of kernel.DevFuse.Memory for Resume, which may be nil. An error
	// ends the mount. It is only called for an FS with Options.State.
	Mounted func(dev *kernel.Device, mem *os.File) error
	// KeepRequests keeps requests in memory also if the kernel can send them again, for tests of
	// what Linux before 6.9 needs.
	KeepRequests bool
	// Logger receives messages about FUSE requests. The default is the standard logger.
	Logger *log.Logger
}

// A Server is one mounted FS. The methods of a Server are safe for concurrent use.
type Server struct {
	fs     *FS
	mount  *mountpoint.Mount
	device *kernel.Device
	conn   *kernel.DevFuse
	done   chan struct{} // closed when all requests have ended and the mount point is free
}

// Mount is MountAt for the directory dir.
func Mount(dir string, fs *FS, opts MountOptions) (*Server, error) {
	p, err := mountpoint.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", dir, err)
	}
	defer p.Close()
	return MountAt(p, fs, opts)
}

// MountAt mounts fs on p, which requires CAP_SYS_ADMIN, and serves it until it is unmounted. The
// caller closes p afterwards. All users can access the mount with their own permissions. An FS can
// be mounted only once.
func MountAt(p *mountpoint.Point, fs *FS, opts MountOptions) (*Server, error) {
	abs := p.Path()
	maxWrite := min(fs.buffers.Size(), MaxIOSize)
	s := &Server{fs: fs, done: make(chan struct{})}
	var err error
	if s.device, err = kernel.OpenDevice(); err != nil {
		return nil, mountError(abs, err)
	}
	if err := s.start(p, &opts, maxWrite); err != nil {
		_ = s.device.Close()
		return nil, mountError(abs, err)
	}
	s.use()
	go s.serve()
	if !opts.SkipDisablePoll {
		mountpoint.DisablePoll(abs)
	}
	// The kernel's default of 128 KiB would bound every buffered read.
	s.mount.SetReadAhead(readAheadRequests * maxWrite)
	return s, nil
}

// use lets the FS use the connection.
func (s *Server) use() {
	s.fs.limitWriteback(s.conn.Init())
	dir := s.mount.Dir()
	s.fs.mountDir.Store(&dir)
	s.watchBusyReads()
	s.fs.expireOnly.Store(s.conn.Kernel().Flags64()&fuse.CAP_HAS_EXPIRE_ONLY != 0)
	s.fs.device.Store(s.device)
}

// Resume continues to serve the mount of an earlier process at dir. fs has a State of OpenState,
// and opts are those of the mount. mem is what MountOptions.Mounted got. Resume takes over dev
// also when it returns an error.
func Resume(dir string, dev *kernel.Device, mem *os.File, fs *FS, opts MountOptions) (_ *Server, err error) {
	r := &fs.state.mu.mount
	mount := mountpoint.Existing(dir, mountpoint.Device{Major: r.major, Minor: r.minor}, dev)
	s := &Server{fs: fs, mount: mount, device: dev, done: make(chan struct{})}
	protocol, init := s.options(&opts, r.acl == 1), r.init[:r.initLen]
	if s.conn, err = kernel.Resume(dev, fs, protocol, init, mem); err != nil {
		_ = dev.Close()
		return nil, err
	}
	s.use()
	go s.serve()
	fs.resume()
	return s, nil
}

// Discard unmounts the mount of an earlier process without an FS. Its data that is not on the
// server is lost.
func Discard(dir string, dev *kernel.Device, state *State) error {
	r := &state.mu.mount
	m := mountpoint.Existing(dir, mountpoint.Device{Major: r.major, Minor: r.minor}, dev)
	_, err := m.Unmount(unix.MNT_DETACH)
	m.Abort()
	return errors.Join(err, dev.Close())
}

// start mounts the file system and negotiates the FUSE protocol with the kernel.
func (s *Server) start(p *mountpoint.Point, opts *MountOptions, maxWrite int) (err error) {
	if s.mount, err = mountpoint.New(p, s.device, &opts.Options, maxWrite); err != nil {
		return err
	}
	protocol := s.options(opts, s.fs.acl != nil)
	if s.conn, err = kernel.NewDevFuse(s.device, s.fs, protocol); err == nil {
		err = s.keep(opts)
	}
	if err != nil {
		_, _ = s.mount.Unmount(unix.MNT_DETACH)
	}
	return err
}

// keep records a new mount in the State of the FS.
func (s *Server) keep(opts *MountOptions) error {
	if s.fs.state == nil {
		return nil
	}
	canResend := s.conn.Kernel().Flags64()&fuse.CAP_HAS_RESEND != 0
	if !canResend || opts.KeepRequests {
		if err := s.conn.KeepRequests(); err != nil {
			return err
		}
	}
	if err := s.fs.state.setMounted(s.mount.Device(), s.conn.Init(), s.fs.acl != nil); err != nil {
		return err
	}
	if opts.Mounted == nil {
		return nil
	}
	mem, err := s.conn.Memory()
	if err != nil {
		return err
	}
	if mem != nil {
		defer mem.Close()
	}
	return opts.Mounted(s.device, mem)
}

// options returns the options of the FUSE protocol. They are the same for each process that serves
// the mount.
func (s *Server) options(opts *MountOptions, acl bool) kernel.Options {
	return s.fs.protocolOptions(opts.Logger, acl)
}

// GuestOptions returns the options of the FUSE protocol for a connection other than /dev/fuse. They
// are the same for each process that serves the mount.
func (fs *FS) GuestOptions(logger *log.Logger) kernel.Options {
	return fs.protocolOptions(logger, fs.state.guestACL(fs.acl != nil))
}

func (fs *FS) protocolOptions(logger *log.Logger, acl bool) kernel.Options {
	maxWrite := min(fs.buffers.Size(), MaxIOSize)
	return kernel.Options{MaxBackground: maxBackground, MaxWrite: maxWrite, MaxReadAhead: readAheadRequests * maxWrite,
		Capabilities: fs.capabilities(acl), XAttrs: acl, Logger: logger, Panicked: fs.panicked}
}

// serve handles the kernel's requests until the connection ends. After an abort every call on the
// mount point fails, so serve unmounts it.
func (s *Server) serve() {
	defer close(s.done)
	s.conn.Serve()
	_ = s.device.Close()
	_, _ = s.mount.Unmount(unix.MNT_DETACH) // callers of Unmount get the error
}

// capabilities returns the capabilities of the kernel's FUSE client that the file system uses. On
// an ID-mapped mount the kernel does not say who makes most requests. Without CAP_ALLOW_IDMAP the
// kernel refuses to make one, as for Linux's NFS client.
func (fs *FS) capabilities(acl bool) uint64 {
	// The server clears set-user-ID and set-group-ID bits when another user writes to or chowns a
	// file. Without HANDLE_KILLPRIV the kernel would send a SETATTR as the writer, who may not have
	// permission for it.
	c := uint64(fuse.CAP_DIRECT_IO_ALLOW_MMAP|fuse.CAP_HANDLE_KILLPRIV) | fs.writebackCapabilities()
	if fs.opts.SharedNames {
		// The kernel decides by the lookups of names that it has not cached whether a program needs
		// READDIRPLUS.
		c |= fuse.CAP_READDIRPLUS_AUTO
	}
	if fs.state != nil && !fs.opts.Guest {
		c |= fuse.CAP_HAS_RESEND
	}
	if fs.explicitPages() {
		c |= fuse.CAP_EXPLICIT_INVAL_DATA
	} else {
		c |= fuse.CAP_AUTO_INVAL_DATA
	}
	// The kernel keeps the kinds of locks that it does not forward.
	if fs.opts.Locks != nil && !fs.opts.LocalPosix {
		c |= fuse.CAP_POSIX_LOCKS
	}
	if fs.opts.Locks != nil && !fs.opts.LocalFlock {
		c |= fuse.CAP_FLOCK_LOCKS
	}
	if acl {
		// DONT_MASK: only the client knows whether the umask applies. HANDLE_KILLPRIV_V2: otherwise
		// the kernel would ask for security.capability at each write(2).
		c |= fuse.CAP_POSIX_ACL | fuse.CAP_DONT_MASK | fuse.CAP_HANDLE_KILLPRIV_V2
	}
	return c
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

// Dir returns the absolute path of the mount point, without symbolic links.
func (s *Server) Dir() string { return s.mount.Dir() }

// disconnectTimeout is how long an unmount waits for the kernel to end the connection. The kernel
// ends it at once unless another mount namespace (of a container or service) has a copy of the
// mount.
const disconnectTimeout = 2 * time.Second

// Unmount unmounts the file system and waits for the last request. Unmount returns EBUSY while
// files are open, even if another program has already detached the mount. Unmount also returns
// EBUSY when another file system is mounted over this one. Copies of the mount in other mount
// namespaces end too. After success this file system is not mounted on Dir. Mounts of other
// programs on Dir stay.
func (s *Server) Unmount() error {
	state, err := s.mount.Unmount(0)
	if err != nil {
		return err
	}
	select {
	case <-s.done:
		return nil
	case <-time.After(disconnectTimeout):
	}
	if state < mountpoint.Unmounted {
		return fmt.Errorf("umount %s: %w: the mount is detached but still has open files", s.mount.Dir(), syscall.EBUSY)
	}
	s.mount.Abort()
	<-s.done
	return nil
}

// UnmountLazy detaches the mount at once. The mount ends when its last file is closed (see Wait).
func (s *Server) UnmountLazy() error {
	_, err := s.mount.Unmount(unix.MNT_DETACH)
	return err
}

// ForceUnmount unmounts even while calls are in flight. The calls fail, and data that is not
// written is lost. ForceUnmount does not wait for the server. An error means that the mount point
// is still in use; the connection has ended nevertheless.
func (s *Server) ForceUnmount() error {
	s.fs.Abort()
	_, err := s.mount.Unmount(unix.MNT_DETACH)
	s.mount.Abort()
	<-s.done
	return err
}

// Wait returns when the mount has ended, however it was unmounted.
func (s *Server) Wait() { <-s.done }

// hasMountsBelow reports whether other file systems are mounted below the mount point. When a lookup
// fails, the kernel's FUSE client detaches what is mounted on the name. A user without rights could so
// detach mounts of the administrator. The kernel keeps the mounts when the error is ENOMEM.
func (fs *FS) hasMountsBelow() bool {
	dir := fs.mountDir.Load()
	return dir != nil && mountpoint.HasMountsBelow(*dir)
}
