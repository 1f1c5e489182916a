package nfsd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/internal/server/nlmd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// MaxIO is the largest READ and WRITE in bytes (rtmax and wtmax).
const MaxIO = 1 << 20

// MaxRecord is the largest call or reply in bytes: MaxIO and its headers.
const MaxRecord = MaxIO + 64<<10

// slowCalls bounds the calls that use the file system at the same time, each of which may hold an
// operating system thread.
const slowCalls = 512

// Config says what a Server exports and to which clients. Only Dir is needed.
type Config struct {
	// Dir is the directory to export. File systems that are mounted below it are not exported.
	Dir string
	// ReadOnly refuses every change.
	ReadOnly bool
	// NoRootSquash runs calls of uid 0 as root. By default uid 0 and gid 0 become 65534.
	NoRootSquash bool
	// AllowSUID lets clients set the set-user-ID and set-group-ID bits of files. By default CREATE,
	// MKNOD and SETATTR drop them.
	AllowSUID bool
	// Allow lists the client addresses that are served; empty means all.
	Allow []netip.Prefix
	// Insecure serves clients with any source port. By default it must be below 1024: only a
	// privileged process can bind such a port, and nothing else proves the user IDs of AUTH_SYS
	// (exports(5), option secure).
	Insecure bool
	// Port is the TCP port in the replies of the port mapper.
	Port uint16
	// StateDir keeps the key of the file handles. If it cannot be used, handles become stale when
	// the server ends.
	StateDir string
	// LockGrace is the time after a restart in which clients may reclaim their locks; 0 means
	// nlmd.DefaultGrace.
	LockGrace time.Duration
	// MaxReply is the largest reply in bytes; 0 means MaxRecord.
	MaxReply int
	Logger   hclog.Logger

	// For tests.
	byInode bool               // never open files by handle
	fsync   func(fd int) error // nil means fsync(2)
	newAge  time.Duration      // 0 means newAge
	// between, if not nil, runs where another process can interfere: after a call has made or found
	// the entry name, and after READ has read data (name is empty).
	between func(name string)
}

// A Server executes the calls of NFS version 3, MOUNT version 3 and the port mapper version 2 for
// one directory. It knows no transport: each call is one RPC message. It is safe for concurrent
// use.
type Server struct {
	cfg      Config
	log      hclog.Logger
	dir      string // absolute
	root     *os.Root
	rootFD   int // of the export's root, for reading
	rootKey  inodeKey
	rootPath atomic.Pointer[string] // path of the root now, with a slash at its end
	rootFH   nfs3.FH
	fsid     uint64
	cookies  nfs3.Verifier // cookie verifier: names the file system
	id       *identity
	umask    uint32
	signer   *signer
	paths    *pathTable // nil where the kernel opens files by handle
	objects  *objects
	locks    *nlmd.Server
	ports    *resvport.Rule
	verifier atomic.Uint64
	slow     chan struct{}
	calls    sync.Pool // of *call
	inMemory bool      // the file system has no disk, except for swap, and paths is nil
	end      context.CancelFunc
	sweeper  sync.WaitGroup
}

// New opens the directory. Close ends the Server.
func New(cfg Config) (*Server, error) {
	s := &Server{cfg: cfg, log: cfg.Logger, slow: make(chan struct{}, slowCalls)}
	if s.log == nil {
		s.log = hclog.NewNullLogger()
	}
	if s.cfg.MaxReply == 0 {
		s.cfg.MaxReply = MaxRecord
	}
	if s.cfg.fsync == nil {
		s.cfg.fsync = unix.Fsync
	}
	s.ports = resvport.NewRule(cfg.Insecure, s.log)
	s.calls.New = func() any { return new(call) }
	s.verifier.Store(rand.Uint64())
	err := s.open()
	if err == nil {
		s.objects = newObjects(objectLimit(), s.syncObject)
		s.rootFH, err = s.handleOf(s.rootFD, nil, "")
	}
	if err != nil {
		s.closeRoot()
		var path *fs.PathError
		if errors.As(err, &path) && path.Op != "read" {
			err = path.Err
		}
		return nil, err
	}
	s.locks = nlmd.New(nlmd.Config{Check: s.checkLock, StateFile: s.lockState(), Grace: cfg.LockGrace,
		Logger: s.log.Named("locks")})
	s.report()
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	s.sweeper.Go(func() { s.sweep(ctx) })
	return s, nil
}

// open opens the directory and finds out what its file system can do.
func (s *Server) open() (err error) {
	s.rootFD = -1
	if s.dir, err = filepath.Abs(s.cfg.Dir); err != nil {
		return err
	}
	if s.root, err = os.OpenRoot(s.dir); err != nil {
		return err
	}
	if s.rootFD, err = unix.Open(s.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(s.rootFD, &st); err != nil {
		return err
	}
	var vfs unix.Statfs_t
	if err := unix.Fstatfs(s.rootFD, &vfs); err != nil {
		return err
	}
	s.rootKey = keyOf(&st)
	s.readRootPath()
	s.fsid = uint64(uint32(vfs.Fsid.Val[0]))<<32 | uint64(uint32(vfs.Fsid.Val[1]))
	binary.BigEndian.PutUint64(s.cookies[:], s.fsid^st.Ino)
	if s.id, err = ownIdentity(); err != nil {
		return err
	}
	s.umask = processUmask()
	identity := binary.BigEndian.AppendUint64(nil, s.fsid)
	var h kernelHandle
	if !s.cfg.byInode && s.opensByHandle(&h) {
		identity = appendKernelHandle(identity, &h)
	} else {
		s.paths = newPathTable(s.rootFD, &st)
		if identity, err = s.paths.bodyOf(s.rootFD, identity); err != nil {
			return err
		}
	}
	s.inMemory = s.paths == nil && (vfs.Type == unix.TMPFS_MAGIC || vfs.Type == unix.RAMFS_MAGIC)
	key, err := handleKey(s.cfg.StateDir)
	if err != nil {
		s.log.Warn("file handles become stale when the server ends: cannot keep their key",
			"state_directory", s.cfg.StateDir, "error", err)
		key = newKey()
	}
	s.signer = newSigner(key, identity)
	return nil
}

// opensByHandle reports whether the kernel can open the export's files by handle, and reads the
// root's.
func (s *Server) opensByHandle(h *kernelHandle) bool {
	if nameToHandle(s.rootFD, h) != nil {
		return false
	}
	fd, err := openByHandle(s.rootFD, h, unix.O_PATH)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// report logs the limits that an administrator may not expect.
func (s *Server) report() {
	switch {
	case !s.id.switches:
		s.log.Warn("not running as root: every client acts as the user of this process", "uid", s.id.uid)
	case !s.id.canBe(&cred{uid: anonymous, gid: anonymous}):
		s.log.Warn("cannot act as another user: calls of other users than root are refused; "+
			"give the process CAP_SETUID and CAP_SETGID and map the users", "uid", anonymous)
	}
	if s.paths != nil {
		s.log.Info("the kernel does not open files by handle here: the server finds them by inode number", "dir", s.dir)
	}
}

// Close closes every file. No call may be running.
func (s *Server) Close() error {
	s.end()
	s.sweeper.Wait()
	s.locks.Close()
	s.objects.end()
	s.closeRoot()
	return nil
}

func (s *Server) closeRoot() {
	if s.rootFD >= 0 {
		unix.Close(s.rootFD)
	}
	if s.root != nil {
		s.root.Close()
	}
}

func (s *Server) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.objects.sweep()
			s.readRootPath()
		}
	}
}

// SetPort sets the TCP port in the replies of the port mapper. It must precede the first call.
func (s *Server) SetPort(port uint16) { s.cfg.Port = port }

// allows reports whether a client is served.
func (s *Server) allows(peer netip.AddrPort) bool {
	a := peer.Addr().Unmap().WithZone("")
	contains := func(p netip.Prefix) bool { return p.Contains(a) }
	return (len(s.cfg.Allow) == 0 || slices.ContainsFunc(s.cfg.Allow, contains)) && s.ports.Permits(peer)
}

// objectLimit is how many objects may be in the table: each has up to three descriptors.
func objectLimit() int {
	const least, most = 32, 4096
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) != nil {
		return least
	}
	return int(max(least, min(lim.Cur/8, most)))
}

// processUmask reads the umask without changing it.
func processUmask() uint32 {
	const conservative = 0o777
	b, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return conservative
	}
	var mask uint32
	for line := range strings.Lines(string(b)) {
		if n, _ := fmt.Sscanf(line, "Umask: %o", &mask); n == 1 {
			return mask
		}
	}
	return conservative
}

// newVerifier tells all clients that data which they have not committed may be lost.
func (s *Server) newVerifier() {
	s.verifier.Add(1 | rand.Uint64()<<1)
}

// writeVerifier is the verifier of WRITE and COMMIT (RFC 1813 §3.3.7).
func (s *Server) writeVerifier() (v nfs3.Verifier) {
	binary.BigEndian.PutUint64(v[:], s.verifier.Load())
	return v
}

// syncObject makes the data and attributes of a file or directory stable. A failure changes the
// write verifier before anyone hears of a later success.
func (s *Server) syncObject(o *object) error {
	return o.syncs.do(func() error {
		o.dirty.Store(false)
		fd, err := o.reader()
		if err == nil {
			err = retry(func() error { return s.cfg.fsync(fd) })
		}
		if err == unix.EINVAL || err == unix.EROFS { // a file system without fsync
			err = nil
		}
		if err != nil {
			s.log.Error("fsync failed: clients must send again what they have not committed", "inode", o.key.ino,
				"error", err)
			s.newVerifier()
		}
		return err
	})
}

// syncAny makes the attributes of an object of any type stable. What cannot be opened without side
// effects is covered by a sync of the whole file system.
func (s *Server) syncAny(o *object) error {
	if o.checkIO() == nil {
		return s.syncObject(o)
	}
	return retry(func() error { return unix.Syncfs(s.rootFD) })
}

// handleOf makes the handle of an open object, which was found as name in dir.
func (s *Server) handleOf(fd int, dir *object, name string) (nfs3.FH, error) {
	var room [nfsHandleRoom]byte
	if s.paths == nil {
		var h kernelHandle
		if err := nameToHandle(fd, &h); err != nil {
			return nfs3.FH{}, err
		}
		return s.signer.sign(formatKernel, appendKernelHandle(room[:0], &h))
	}
	body, err := s.paths.bodyOf(fd, room[:0])
	if err != nil {
		return nfs3.FH{}, err
	}
	if dir != nil {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nfs3.FH{}, err
		}
		s.paths.add(keyOf(&st), dir.key, name)
	}
	return s.signer.sign(formatInode, body)
}

// object returns the object of a handle with a reference.
func (s *Server) object(fh *nfs3.FH) (*object, nfs3.Status) {
	if o := s.objects.get(fh); o != nil {
		return o, nfs3.OK
	}
	format, body, st := s.signer.verify(fh)
	if st != nfs3.OK {
		return nil, st
	}
	fd, err := -1, error(unix.ESTALE)
	var h kernelHandle
	switch {
	case format == formatInode && s.paths != nil:
		fd, err = s.paths.open(body)
	case format == formatKernel && s.paths == nil && parseKernelHandle(body, &h):
		fd, err = openByHandle(s.rootFD, &h, unix.O_PATH|unix.O_NOFOLLOW)
	}
	if err != nil {
		if err == unix.ENOENT || err == unix.EINVAL {
			err = unix.ESTALE
		}
		return nil, statusOf(err)
	}
	var attr unix.Stat_t
	if err = unix.Fstat(fd, &attr); err == nil && (attr.Nlink == 0 || !s.inside(fd, &attr)) {
		err = unix.ESTALE
	}
	if err != nil {
		unix.Close(fd)
		return nil, statusOf(err)
	}
	return s.objects.add(fh, fd, &attr), nfs3.OK
}

// inside reports whether a directory lies below the export's root: it may have been moved out.
// Files are not checked: which directories a file is in is not known; see the package comment.
func (s *Server) inside(fd int, st *unix.Stat_t) bool {
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return true
	}
	k, at := keyOf(st), fd
	defer func() {
		if at != fd {
			unix.Close(at)
		}
	}()
	for range maxDepth {
		if k == s.rootKey {
			return true
		}
		up, err := openParent(at)
		if err != nil {
			return false
		}
		if at != fd {
			unix.Close(at)
		}
		at = up
		var attr unix.Stat_t
		if unix.Fstat(at, &attr) != nil || keyOf(&attr) == k { // the top of the host
			return false
		}
		k = keyOf(&attr)
	}
	return false
}

// readRootPath notes where the export's root is now.
func (s *Server) readRootPath() {
	path, err := os.Readlink(procFD(s.rootFD))
	if err != nil {
		return
	}
	path = strings.TrimSuffix(path, "/") + "/"
	s.rootPath.Store(&path)
}

// leftExport reports whether an object is a directory that was moved out of the export. The kernel
// knows the path of an open directory; where that does not say enough, the way up does.
func (s *Server) leftExport(o *object) bool {
	if o == nil || o.kind != unix.S_IFDIR || o.key == s.rootKey {
		return false
	}
	var buf [unix.PathMax]byte
	if root := s.rootPath.Load(); root != nil {
		n, err := unix.Readlink(o.proc, buf[:])
		if err == nil && n < len(buf) && n >= len(*root) && string(buf[:len(*root)]) == *root {
			return false
		}
	}
	var st unix.Stat_t
	return unix.Fstat(o.path, &st) != nil || !s.inside(o.path, &st)
}

// slot takes the right to use the file system, until release is called.
func (s *Server) slot(ctx context.Context) (release func(), err error) {
	select {
	case s.slow <- struct{}{}:
		return s.unslot, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Server) unslot() { <-s.slow }
