package fusefs

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// LookupCache selects the directory entries that the kernel may cache (nfs(5), lookupcache).
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
	defaultPoolBuffer = 32
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
	// LookupCache selects the names that the kernel may cache.
	LookupCache LookupCache
	// DirCount bounds one READDIR or READDIRPLUS reply in bytes. The default is DefaultDirCount.
	DirCount uint32
	// MaxWrites bounds the WRITE calls in flight. The default is DefaultMaxWrites.
	MaxWrites int
	// Buffers holds the data of reads and writes. Each buffer must have at least MinIOSize bytes
	// and bounds the size of a request. The default is a private pool of 32 buffers of MaxIOSize. A
	// pool that the caller supplies is closed by the caller, after FS.Close.
	Buffers *membuf.Pool
	// Observe, if not nil, is called after each request that the kernel waits for, with the time
	// that the request took. Observe runs on the request's goroutine, may run concurrently, and
	// must not block. Observe is not called for FORGET, RELEASE and FSYNCDIR.
	Observe func(op Op, d time.Duration)
}

// DefaultOptions returns the defaults of nfs(5).
func DefaultOptions() Options {
	return Options{AcRegMin: 3 * time.Second, AcRegMax: 60 * time.Second, AcDirMin: 30 * time.Second,
		AcDirMax: 60 * time.Second}
}

// An FS is one NFSv3 file system for one mount. FS implements fuse.RawFileSystem. The kernel calls
// the methods of an FS concurrently.
type FS struct {
	// RawFileSystem returns ENOSYS for operations that NFSv3 does not have: extended attributes,
	// fallocate and locks. The kernel then keeps locks itself.
	fuse.RawFileSystem

	// Counters is safe to read at any time.
	Counters Counters

	client      *nfs3.Client
	opts        Options
	buffers     *membuf.Pool
	ownBuffers  bool
	creds       *credentials
	inodes      inodeTable
	interrupts  interrupts
	clock       atomic.Uint64 // orders replies and changes: see updateAttr
	lastRemoval atomic.Uint64 // clock after this mount's last removal
	lastRename  atomic.Uint64 // clock after this mount's last rename
	server      atomic.Pointer[fuse.Server]

	handles struct {
		sync.Mutex
		last  uint64
		files map[uint64]*fileHandle
		dirs  map[uint64]*dirHandle
	}
	dirty struct {
		sync.Mutex
		inodes map[*inode]struct{} // files that hold buffers
	}

	reopens     reopens
	noPlus      atomic.Bool // the server does not support READDIRPLUS
	maxFileSize uint64      // the server's limit in bytes; set before the FS is used
	writeSlots  chan struct{}
	work        sync.WaitGroup // goroutines that write back

	abortOnce sync.Once
	aborted   chan struct{}
}

// New returns an FS for the export whose root directory is root. New gets the root's attributes and
// the server's limits as uid 0. New returns an error when either call fails.
func New(ctx context.Context, client *nfs3.Client, root nfs3.FH, opts Options) (*FS, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, err
	}
	fs := &FS{RawFileSystem: fuse.NewDefaultRawFileSystem(), client: client, opts: opts, buffers: opts.Buffers,
		creds: newCredentials(), writeSlots: make(chan struct{}, opts.MaxWrites), aborted: make(chan struct{})}
	fs.handles.files, fs.handles.dirs = make(map[uint64]*fileHandle), make(map[uint64]*dirHandle)
	fs.dirty.inodes = make(map[*inode]struct{})
	fs.interrupts.onInterrupt = func() { fs.Counters.Interrupts.Add(1) }
	rootInode := &inode{id: fuse.FUSE_ROOT_ID, fh: root}
	fs.inodes.init(rootInode)

	cred := fs.creds.of(0, 0, 0)
	var attr nfs3.Attr
	if _, err := fs.fetch(ctx, cred, rootInode, &attr); err != nil {
		return nil, fmt.Errorf("fusefs: get attributes of export root: %w", err)
	}
	if attr.Type != nfs3.NF3DIR {
		return nil, fmt.Errorf("fusefs: export root is a %s, not a directory", attr.Type)
	}
	var info nfs3.FSInfoResult
	if err := client.FSInfo(ctx, cred, root, &info); err != nil {
		return nil, fmt.Errorf("fusefs: get server limits (FSINFO): %w", err)
	}
	if fs.maxFileSize = info.MaxFileSize; fs.maxFileSize == 0 || fs.maxFileSize > math.MaxInt64 {
		fs.maxFileSize = math.MaxInt64 // not a usable limit: use the kernel's
	}
	fs.opts.RSize = serverLimit(fs.opts.RSize, info.ReadMax)
	fs.opts.WSize = serverLimit(fs.opts.WSize, info.WriteMax)
	if fs.buffers == nil {
		fs.buffers, fs.ownBuffers = membuf.NewPool(MaxIOSize, defaultPoolBuffer), true
	}
	fs.opts.WSize = min(fs.opts.WSize, fs.buffers.Size())
	return fs, nil
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
			return fmt.Errorf("fusefs: %s=%d is out of range; use %d to %d bytes", size.name, *size.v,
				MinIOSize, MaxIOSize)
		}
	}
	for _, ac := range []struct {
		name     string
		min, max time.Duration
	}{{"acreg", o.AcRegMin, o.AcRegMax}, {"acdir", o.AcDirMin, o.AcDirMax}} {
		if ac.min < 0 || ac.max < ac.min {
			return fmt.Errorf("fusefs: %[1]smin=%[2]v is negative or larger than %[1]smax=%[3]v", ac.name, ac.min,
				ac.max)
		}
	}
	if o.LookupCache > LookupCacheNone {
		return fmt.Errorf("fusefs: unknown lookupcache %d", o.LookupCache)
	}
	if o.Buffers != nil && o.Buffers.Size() < MinIOSize {
		return fmt.Errorf("fusefs: buffers have %d bytes; use at least %d", o.Buffers.Size(), MinIOSize)
	}
	if o.DirCount == 0 {
		o.DirCount = DefaultDirCount
	}
	o.DirCount = min(o.DirCount, nfs3.MaxDirCount)
	if o.MaxWrites <= 0 {
		o.MaxWrites = DefaultMaxWrites
	}
	return nil
}

// IOSizes returns the negotiated sizes of one READ and one WRITE in bytes.
func (fs *FS) IOSizes() (rsize, wsize int) { return fs.opts.RSize, fs.opts.WSize }

// Inodes returns the number of inodes that the FS keeps for the kernel.
func (fs *FS) Inodes() int { return fs.inodes.len() }

// Abort ends all current and later calls. Data that is not yet written is lost, and its writers get
// an error. Abort does not block.
func (fs *FS) Abort() {
	fs.abortOnce.Do(func() { close(fs.aborted) })
	fs.interrupts.abort()
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
	fs.dirty.Lock()
	dirty := make([]*inode, 0, len(fs.dirty.inodes))
	for ino := range fs.dirty.inodes {
		dirty = append(dirty, ino)
	}
	fs.dirty.Unlock()
	for _, ino := range dirty {
		_ = fs.sync(ctx, ino) // the writers got their errors from close(2)
	}
	fs.waitBackground(ctx)
	fs.Abort()
	fs.work.Wait()
	fs.interrupts.stop()
	for _, ino := range dirty {
		fs.freeExtents(ino)
	}
	if fs.ownBuffers {
		fs.buffers.Close()
	}
}

// waitBackground waits until background work has finished. When ctx ends, it aborts the FS.
func (fs *FS) waitBackground(ctx context.Context) {
	stop := context.AfterFunc(ctx, fs.Abort)
	defer stop()
	fs.work.Wait()
}

// freeExtents frees the buffers of a file after all calls have ended.
func (fs *FS) freeExtents(ino *inode) {
	w := &ino.wb
	w.mu.Lock()
	defer w.mu.Unlock()
	if e := w.filling; e != nil {
		w.filling = nil
		fs.release(ino, e)
	}
	for len(w.unstable) > 0 {
		e := w.unstable[0]
		w.unstable = w.unstable[1:]
		fs.release(ino, e)
	}
}

// String returns the name of the file system in go-fuse's messages.
func (fs *FS) String() string { return "nfsrdma" }

// SetDebug does nothing. go-fuse requires it.
func (fs *FS) SetDebug(bool) {}

// Init is called by go-fuse with the first request.
func (fs *FS) Init(s *fuse.Server) { fs.server.Store(s) }

// OnUnmount is called by go-fuse after the unmount.
func (fs *FS) OnUnmount() {}

// dropAttr makes the kernel discard its cached attributes of the node.
func (fs *FS) dropAttr(ino *inode) {
	if s := fs.server.Load(); s != nil {
		s.InodeNotify(ino.id, -1, 0) // a negative offset keeps the cached pages
	}
}

// Forget releases lookup references of the kernel.
func (fs *FS) Forget(id, nlookup uint64) {
	fs.Counters.Ops[OpForget].Add(1)
	fs.inodes.forget(id, nlookup)
}

// addFile returns a new handle number for an open file. Numbers are never reused.
func (fs *FS) addFile(h *fileHandle) uint64 {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	fs.handles.last++
	fs.handles.files[fs.handles.last] = h
	return fs.handles.last
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
