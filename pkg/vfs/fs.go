package vfs

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/acl"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
)

// LookupCache selects the directory entries that may be cached (nfs(5), lookupcache).
type LookupCache uint8

// Kinds of lookup caching.
const (
	LookupCacheAll      LookupCache = iota // existing and missing names
	LookupCachePositive                    // existing names
	LookupCacheNone                        // no names: each use of a name asks the server
)

// Limits and defaults of Options.
const (
	// MaxIOSize is the largest RSize and WSize in bytes. The kernel's FUSE client sends no larger
	// requests.
	MaxIOSize         = 1 << 20
	MinIOSize         = 4096     // bytes
	DefaultDirCount   = 64 << 10 // bytes
	DefaultMaxWrites  = 16
	DefaultDirtyBytes = 32 << 20
)

// Options configures an FS. The attribute cache times have no defaults. Each other field has a
// default for its zero value.
type Options struct {
	// RSize and WSize bound one READ and one WRITE in bytes, from MinIOSize to MaxIOSize. The
	// default is MaxIOSize. The server's limits also apply.
	RSize, WSize int
	// AcRegMin, AcRegMax, AcDirMin and AcDirMax bound how long attributes of files and directories
	// are cached. The time doubles while the attributes stay the same (nfs(5)).
	AcRegMin, AcRegMax, AcDirMin, AcDirMax time.Duration
	// NoAC disables attribute caching and makes every write synchronous (nfs(5), noac).
	NoAC bool
	// NoCTO lets an open use cached attributes and cached rights of its user (nfs(5), nocto).
	NoCTO bool
	// Writeback makes the kernel gather writes in its pages, see writebackcache.go. Other clients
	// must not use the files. Writeback is not valid with NoAC and with Guest.
	Writeback bool
	// LookupCache selects the names that may be cached.
	LookupCache LookupCache
	// SharedNames makes the kernel cache names for all users. The kernel then checks by mode bits
	// alone who may search a directory: a user that only the server refuses can use the names that
	// another user has looked up.
	SharedNames bool
	// ACL gets and sets POSIX ACLs over the transport of the client. nil disables ACLs (nfs(5),
	// noacl).
	ACL *nfsacl.Client
	// DirCount bounds one READDIR or READDIRPLUS reply in bytes. The default is DefaultDirCount.
	DirCount uint32
	// MaxWrites bounds the WRITE calls in flight. The default is DefaultMaxWrites.
	MaxWrites int
	// Buffers holds the data of reads and writes. Each buffer must have at least MinIOSize bytes
	// and bounds the size of a request. The default is a private pool of buffers of MaxIOSize for
	// DirtyBytes and some reads. A pool that the caller supplies is closed by the caller, after
	// FS.Close.
	Buffers *membuf.Pool
	// ReadInPlace lets the data of a READ arrive in memory of the connection, without a buffer. The
	// transport of the client must be able to read into any memory.
	ReadInPlace bool
	// DirtyExpire is the age after which the data of open files is written to stable storage. 0
	// keeps the data until an fsync, a close, or until its buffers are needed.
	DirtyExpire time.Duration
	// DirtyBytes bounds the buffers of data that is not stable, in bytes. A write waits while it
	// would exceed the bound. The bound is at least one buffer. The default is DefaultDirtyBytes.
	DirtyBytes int64
	// DirtyTotal, if not nil, bounds the dirty data of all FSs that share it.
	DirtyTotal *data.Total
	// Lost, if not nil, is called for data that the FS discards: for each range that the server
	// rejects, and in Close for each file. Lost must not block and must not call the FS.
	Lost func(data.Loss)
	// Failed, if not nil, is called after each panic of the FS with the panic and the stack. Failed
	// must not block and must not call the FS.
	Failed func(reason string, stack []byte)
	// Invalid, if not nil, is called with a description for each reply that breaks the protocol.
	// Invalid must not block and must not call the FS.
	Invalid func(reason string)
	// BusyTimeout bounds the delays of one call that the server answers with NFS3ERR_JUKEBOX. Then
	// the call fails with BusyErrno. 0 retries forever.
	BusyTimeout time.Duration
	BusyErrno   syscall.Errno
	// Locks holds the locks at the server; nil if the kernel keeps all locks. LocalPosix and
	// LocalFlock leave fcntl(2) or flock(2) locks to the kernel. The caller closes Locks after
	// FS.Close.
	Locks                  *nlm.Client
	LocalPosix, LocalFlock bool
	// Guest is set when the requests come from the kernel of a virtual machine: it gets no
	// notifications, and the groups of its processes are unknown.
	Guest bool
	// State, if not nil, keeps what the next process needs to continue the mount. Buffers must then
	// be a pool of a file. A State of OpenState makes New continue the mount of an earlier process.
	// The caller closes State after FS.Close.
	State *State
	// Settled, if not nil, is called once after a continued mount has handled the requests of the
	// earlier process.
	Settled func()
	// Observe, if not nil, is called for each request after its reply was written. Observe runs on
	// the request's goroutine, may run concurrently, and must not block. It is not called for
	// FORGET, RELEASE, RELEASEDIR and FSYNCDIR. Request.AddCall must then be called for each RPC,
	// see kernel.RequestOf.
	Observe func(*kernel.Request)
	// Warn, if not nil, logs a condition that an administrator should know, with key-value
	// pairs. It is called at most once a minute for each condition, may run concurrently, and
	// must not block.
	Warn func(msg string, args ...any)
}

// DefaultOptions returns the defaults of nfs(5).
func DefaultOptions() Options {
	return Options{AcRegMin: 3 * time.Second, AcRegMax: 60 * time.Second, AcDirMin: 30 * time.Second,
		AcDirMax: 60 * time.Second, DirtyExpire: data.DefaultExpire}
}

// An FS is one NFSv3 file system for one mount. FS implements kernel.FileSystem. The kernel calls
// the methods of an FS concurrently.
type FS struct {
	// Counters is safe to read at any time.
	Counters Counters

	server     nfs.Server
	busy       nfs.BusyPolicy
	acl        *acl.Cache // nil: no ACLs, or the server does not support NFSACL
	opts       Options
	state      *State // nil if the mount is not kept
	buffers    *membuf.Pool
	ownBuffers bool
	creds      *credentials
	inodes     inodeTable
	requests   kernel.Requests
	attrs      attr.Cache
	names      name.Table
	users      name.SoleUser
	mountDir   atomic.Pointer[string] // path of the mount point
	busyReads  busyReads
	device     atomic.Pointer[kernel.Device] // nil before the mount
	expireOnly atomic.Bool                   // the kernel can expire names
	expiry     name.Expiry

	handles struct {
		sync.Mutex
		last  uint64
		files map[uint64]*fileHandle
		dirs  map[uint64]*dirHandle
		watch pageWatch
		// files that the kernel has released and whose locks are not released yet
		releasing map[*fileHandle]struct{}
	}
	data     data.Store
	restored []func() // work that an earlier process has left, for resume
	// files that an earlier process has hidden, by hidden name; set before the FS is used
	hiddenBefore map[string]*inode
	draining     atomic.Bool            // each write waits for stable storage
	failure      atomic.Pointer[string] // nil while the FS works

	returned    atomic.Int64 // room of returnedNames
	reopens     reopens
	noPlus      atomic.Bool    // the server does not support READDIRPLUS
	maxFileSize uint64         // the server's limit in bytes; set before the FS is used
	work        sync.WaitGroup // goroutines that write back

	closeOnce sync.Once
	closed    chan struct{} // closed by Close
	abortOnce sync.Once
	aborted   chan struct{}
}

// New returns an FS for the export whose root directory is root. New gets the root's attributes and
// the server's limits as uid 0. New returns an error when either call fails.
func New(ctx context.Context, server nfs.Server, root nfs.Handle, opts Options) (*FS, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, err
	}
	fs := &FS{server: server, opts: opts, state: opts.State,
		buffers: opts.Buffers, aborted: make(chan struct{}),
		closed: make(chan struct{})}
	fs.busy = nfs.BusyPolicy{Timeout: opts.BusyTimeout, Retries: &fs.Counters.JukeboxRetries}
	fs.setCaches()
	fs.creds = newCredentials(&fs.Counters, opts.Warn)
	fs.creds.guest = opts.Guest
	fs.handles.files, fs.handles.dirs = make(map[uint64]*fileHandle), make(map[uint64]*dirHandle)
	fs.handles.releasing = make(map[*fileHandle]struct{})
	fs.requests.Ended = func() { fs.Counters.Interrupts.Add(1) }
	fs.requests.Panicked = fs.fail
	fs.handles.last = fs.state.firstID()
	fs.state.warnOfUsers(opts.Warn)
	rootInode := &inode{id: fuse.FUSE_ROOT_ID, fh: root}
	rootInode.attr.Root = true
	fs.inodes.init(rootInode, fs.state)
	fs.inodes.noRecord = fs.nodeWithoutRecord
	fs.inodes.forgotten = func(ino *inode) { fs.names.Forget(&ino.dir) }
	fs.inodes.shrink = func() { fs.spawn(fs.shrinkTables) }

	cred := fs.creds.encode(0, 0, nil)
	var a nfs.Attr
	if _, err := fs.fetch(ctx, cred, rootInode, &a); err != nil {
		return nil, fmt.Errorf("vfs: get attributes of export root: %w", err)
	}
	if a.Type != nfs.Directory {
		return nil, fmt.Errorf("vfs: export root is a %s, not a directory", a.Type)
	}
	info, err := server.FSInfo(ctx, cred, root)
	if err != nil {
		return nil, fmt.Errorf("vfs: get server limits (FSINFO): %w", err)
	}
	if err := fs.setACLs(ctx, cred, opts.ACL); err != nil {
		return nil, fmt.Errorf("vfs: ask the server for ACLs: %w", err)
	}
	if fs.maxFileSize = info.MaxFileSize; fs.maxFileSize == 0 || fs.maxFileSize > math.MaxInt64 {
		fs.maxFileSize = math.MaxInt64 // not a usable limit: use the kernel's
	}
	fs.opts.RSize = serverLimit(fs.opts.RSize, info.ReadMax)
	fs.opts.WSize = serverLimit(fs.opts.WSize, info.WriteMax)
	if fs.buffers == nil {
		fs.buffers, fs.ownBuffers = membuf.NewPool(BufferPool(fs.opts.DirtyBytes)), true
	}
	fs.opts.WSize = min(fs.opts.WSize, fs.buffers.Size())
	fs.setData()
	if fs.state != nil && fs.state.restored {
		r := &fs.state.mu.mount
		fs.limitWriteback(r.init[:r.initLen])
		if err := fs.restore(); err != nil {
			return nil, fmt.Errorf("vfs: continue the mount of an earlier process: %w", err)
		}
	}
	return fs, nil
}

// BufferPool returns the size and the number of the buffers of an FS with this DirtyBytes.
func BufferPool(dirtyBytes int64) (size, limit int) {
	return MaxIOSize, int((dirtyBytes+MaxIOSize-1)/MaxIOSize) + data.ReadBuffers
}

// serverLimit returns the smaller of own and the server's limit. serverLimit ignores a limit of 0.
func serverLimit(own int, server uint32) int {
	if server == 0 || int64(server) >= int64(own) {
		return own
	}
	return max(int(server), 1)
}

func (o *Options) setDefaults() error {
	for _, size := range []struct {
		name string
		v    *int
	}{{"rsize", &o.RSize}, {"wsize", &o.WSize}} {
		if *size.v == 0 {
			*size.v = MaxIOSize
		}
		if *size.v < MinIOSize || *size.v > MaxIOSize {
			return fmt.Errorf("vfs: %s=%d is out of range; use %d to %d bytes", size.name, *size.v,
				MinIOSize, MaxIOSize)
		}
	}
	for _, ac := range []struct {
		name     string
		min, max time.Duration
	}{{"acreg", o.AcRegMin, o.AcRegMax}, {"acdir", o.AcDirMin, o.AcDirMax}} {
		if ac.min < 0 || ac.max < ac.min {
			return fmt.Errorf("vfs: %[1]smin=%[2]v is negative or larger than %[1]smax=%[3]v", ac.name, ac.min,
				ac.max)
		}
	}
	if o.Writeback && (o.NoAC || o.Guest) {
		return errors.New("vfs: Writeback is not valid with NoAC and with Guest")
	}
	if o.LookupCache > LookupCacheNone {
		return fmt.Errorf("vfs: unknown lookupcache %d", o.LookupCache)
	}
	if o.Buffers != nil && o.Buffers.Size() < MinIOSize {
		return fmt.Errorf("vfs: buffers have %d bytes; use at least %d", o.Buffers.Size(), MinIOSize)
	}
	if o.DirCount == 0 {
		o.DirCount = DefaultDirCount
	}
	if o.MaxWrites <= 0 {
		o.MaxWrites = DefaultMaxWrites
	}
	if o.BusyErrno == 0 {
		o.BusyErrno = syscall.EIO
	}
	if o.DirtyBytes <= 0 {
		o.DirtyBytes = DefaultDirtyBytes
	}
	return nil
}

// IOSizes returns the negotiated sizes of one READ and one WRITE in bytes.
func (fs *FS) IOSizes() (rsize, wsize int) { return fs.opts.RSize, fs.opts.WSize }

// Progress returns a number that grows whenever the server accepts written data.
func (fs *FS) Progress() uint64 { return fs.data.Progress() }

// Inodes returns the number of inodes that the FS keeps for the kernel.
func (fs *FS) Inodes() int { return fs.inodes.len() }

// Abort ends all current and later calls. Data that is not yet written is lost, and its writers get
// an error. Abort does not block.
func (fs *FS) Abort() {
	fs.abortOnce.Do(func() { close(fs.aborted) })
	fs.stopACLs()
	fs.requests.Abort()
}

func (fs *FS) isAborted() bool {
	select {
	case <-fs.aborted:
		return true
	default:
		return false
	}
}

// Close writes the remaining data, stops the FS and frees its memory. The file system must be
// unmounted. When ctx ends, Close discards the remaining data as Abort does.
func (fs *FS) Close(ctx context.Context) {
	fs.closeOnce.Do(func() { close(fs.closed) })
	fs.stopACLs() // do not wait for a server that does not answer
	fs.endWatch()
	fs.data.Flush(ctx, 0) // the writers got their errors from close(2)
	fs.data.StopTimer()
	stop := context.AfterFunc(ctx, fs.Abort)
	fs.work.Wait()
	stop()
	fs.Abort()
	fs.work.Wait()
	fs.requests.Close()
	fs.data.Close()
	if fs.ownBuffers {
		fs.buffers.Close()
	}
}

// Warn implements kernel.FileSystem.
func (fs *FS) Warn(msg string, args ...any) { warner(fs.opts.Warn).Warn(msg, args...) }

// A warner is Options.Warn. It may be nil.
type warner func(msg string, args ...any)

func (w warner) Warn(msg string, args ...any) {
	if w != nil {
		w(msg, args...)
	}
}

// dropAttr makes the kernel discard its cached attributes of the node.
func (fs *FS) dropAttr(ino *inode) {
	if d := fs.device.Load(); d != nil {
		_ = d.InvalInode(ino.id, -1, 0)
	}
}

// Forget releases lookup references of the kernel.
func (fs *FS) Forget(id, nlookup uint64) {
	fs.Counters.Ops[kernel.OpForget].Add(1)
	if ino := fs.inodes.forget(id, nlookup); ino != nil {
		fs.releaseAll(ino)
	}
}

// releaseAll closes the files and directories of a node that the kernel has forgotten. The kernel
// forgets a node after the RELEASEs of its files. A RELEASE can be lost when the process is killed,
// see kernel.DevFuse.KeepRequests.
func (fs *FS) releaseAll(ino *inode) {
	files, dirs := fs.forgottenHandles(ino)
	for _, id := range files {
		fs.releaseFile(id)
	}
	for _, id := range dirs {
		fs.releaseDir(id)
	}
}

// forgottenHandles returns the open files and directories of a node without lookup references. The
// lock of the inode table keeps a new LOOKUP from returning the node meanwhile, and so a new OPEN.
func (fs *FS) forgottenHandles(ino *inode) (files, dirs []uint64) {
	fs.inodes.mu.Lock()
	defer fs.inodes.mu.Unlock()
	if ino.nlookup > 0 {
		return nil, nil
	}
	fs.handles.Lock()
	defer fs.handles.Unlock()
	for id, h := range fs.handles.files {
		if h.ino == ino {
			files = append(files, id)
		}
	}
	for id, d := range fs.handles.dirs {
		if d.ino == ino {
			dirs = append(dirs, id)
		}
	}
	return files, dirs
}

// nextHandle returns a new number for an open file or directory. Numbers are never reused.
func (fs *FS) nextHandle() uint64 {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	fs.handles.last++
	return fs.handles.last
}

func (fs *FS) addFile(h *fileHandle) {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	fs.handles.files[h.id] = h
	if h.watched {
		fs.watchFile()
	}
}

func (fs *FS) file(id uint64) *fileHandle {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	return fs.handles.files[id]
}

// fileOf returns the open file of a SETATTR request, or nil.
func (fs *FS) fileOf(in *fuse.SetAttrIn) *fileHandle {
	id, ok := in.GetFh()
	if !ok || id == math.MaxUint64 {
		return nil
	}
	return fs.file(id)
}
