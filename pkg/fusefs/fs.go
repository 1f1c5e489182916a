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

// LookupCache says which directory entries the kernel may keep (nfs(5), lookupcache).
type LookupCache uint8

// Kinds of lookup caching.
const (
	LookupCacheAll      LookupCache = iota // names that exist, and names that do not
	LookupCachePositive                    // names that exist
	LookupCacheNone                        // none: each use of a name asks the server
)

// Limits and defaults of Options.
const (
	// octets, RSize and WSize; the kernel's FUSE makes no larger requests
	MaxIOSize         = 1 << 20
	MinIOSize         = 4096     // octets
	DefaultDirCount   = 64 << 10 // octets
	DefaultMaxWrites  = 16
	defaultPoolBuffer = 32
)

// Options of an FS. The attribute cache times are used as they are; the other fields mean their
// default when zero.
type Options struct {
	// RSize and WSize bound one READ and one WRITE in octets, MinIOSize to MaxIOSize; default
	// MaxIOSize. The server's own limits bound them too.
	RSize, WSize int
	// AcRegMin to AcDirMax are for how long attributes of files and of directories are trusted, at
	// least and at most: the time doubles while they stay the same (nfs(5)).
	AcRegMin, AcRegMax, AcDirMin, AcDirMax time.Duration
	// NoAC turns attribute caching off and makes every write synchronous (nfs(5), noac).
	NoAC bool
	// LookupCache says which names are kept.
	LookupCache LookupCache
	// DirCount bounds one READDIR or READDIRPLUS reply in octets; default DefaultDirCount.
	DirCount uint32
	// MaxWrites bounds the WRITE calls under way at a time; default DefaultMaxWrites.
	MaxWrites int
	// Buffers holds the data of reads and writes. Its buffers must have MinIOSize octets, and bound
	// a request's size. Default: a pool of 32 buffers of MaxIOSize of the FS's own. A pool that is
	// given stays the caller's to close, after FS.Close.
	Buffers *membuf.Pool
	// Observe, if not nil, is called after each request that the kernel waits for, with the time
	// from its arrival to its answer. It runs on the calling path, concurrently, and must not
	// block. FORGET, RELEASE and FSYNCDIR are not among them.
	Observe func(op Op, d time.Duration)
}

// DefaultOptions are nfs(5)'s defaults.
func DefaultOptions() Options {
	return Options{AcRegMin: 3 * time.Second, AcRegMax: 60 * time.Second, AcDirMin: 30 * time.Second,
		AcDirMax: 60 * time.Second}
}

// An FS is one NFSv3 file system for one mount. Its methods are those of fuse.RawFileSystem; the
// kernel calls them concurrently.
type FS struct {
	// answers ENOSYS to what NFSv3 does not have: extended attributes, fallocate, locks (the kernel
	// keeps those itself)
	fuse.RawFileSystem

	// Counters may be read at any time.
	Counters Counters

	client     *nfs3.Client
	opts       Options
	buffers    *membuf.Pool
	ownBuffers bool
	creds      *credentials
	inodes     inodeTable
	interrupts interrupts
	clock      atomic.Uint64 // orders replies and changes: see absorb
	removed    atomic.Uint64 // clock after the last removal of ours
	renamed    atomic.Uint64 // and after the last rename
	server     atomic.Pointer[fuse.Server]

	handlesMu  sync.Mutex
	lastHandle uint64
	files      map[uint64]*fileHandle
	dirs       map[uint64]*dirHandle

	reopens     reopens
	noPlus      atomic.Bool // the server does not have READDIRPLUS
	maxFileSize uint64      // octets, as the server says; set before the FS is used
	writeSlots  chan struct{}
	work        sync.WaitGroup // goroutines that write back
	dirtyMu     sync.Mutex
	dirty       map[*inode]struct{} // files that hold buffers

	abortOnce sync.Once
	aborted   chan struct{}
}

// New returns an FS on the export whose root directory is root. It asks the server for the root's
// attributes and for its limits, as uid 0 with ctx, and returns the error of either.
func New(ctx context.Context, client *nfs3.Client, root nfs3.FH, opts Options) (*FS, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, err
	}
	fs := &FS{RawFileSystem: fuse.NewDefaultRawFileSystem(), client: client, opts: opts, buffers: opts.Buffers,
		creds: newCredentials(),
		files: make(map[uint64]*fileHandle), dirs: make(map[uint64]*dirHandle), writeSlots: make(chan struct{},
			opts.MaxWrites),
		dirty: make(map[*inode]struct{}), aborted: make(chan struct{})}
	fs.interrupts.onInterrupt = func() { fs.Counters.Interrupts.Add(1) }
	rootInode := &inode{id: fuse.FUSE_ROOT_ID, fh: root}
	fs.inodes.init(rootInode)

	cred := fs.creds.of(0, 0, 0)
	var attr nfs3.Attr
	if _, err := fs.fetch(ctx, cred, rootInode, &attr); err != nil {
		return nil, fmt.Errorf("fusefs: read the attributes of the export's root: %w", err)
	}
	if attr.Type != nfs3.NF3DIR {
		return nil, fmt.Errorf("fusefs: the export's root is a %s, not a directory", attr.Type)
	}
	var info nfs3.FSInfoResult
	if err := client.FSInfo(ctx, cred, root, &info); err != nil {
		return nil, fmt.Errorf("fusefs: ask the server for its limits: %w", err)
	}
	if fs.maxFileSize = info.MaxFileSize; fs.maxFileSize == 0 || fs.maxFileSize > math.MaxInt64 {
		fs.maxFileSize = math.MaxInt64 // no limit that makes sense, so the kernel's own
	}
	fs.opts.RSize = serverLimit(fs.opts.RSize, info.ReadMax)
	fs.opts.WSize = serverLimit(fs.opts.WSize, info.WriteMax)
	if fs.buffers == nil {
		fs.buffers, fs.ownBuffers = membuf.NewPool(MaxIOSize, defaultPoolBuffer), true
	}
	fs.opts.WSize = min(fs.opts.WSize, fs.buffers.Size())
	return fs, nil
}

// serverLimit is the lesser of our size and the server's, which counts only when it is sane.
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
			return fmt.Errorf("fusefs: %s=%d is out of range: it must be %d to %d octets", size.name, *size.v,
				MinIOSize, MaxIOSize)
		}
	}
	for _, ac := range []struct {
		name        string
		least, most time.Duration
	}{{"acreg", o.AcRegMin, o.AcRegMax}, {"acdir", o.AcDirMin, o.AcDirMax}} {
		if ac.least < 0 || ac.most < ac.least {
			return fmt.Errorf("fusefs: %[1]smin=%[2]v and %[1]smax=%[3]v contradict each other", ac.name, ac.least,
				ac.most)
		}
	}
	if o.LookupCache > LookupCacheNone {
		return fmt.Errorf("fusefs: unknown lookupcache %d", o.LookupCache)
	}
	if o.Buffers != nil && o.Buffers.Size() < MinIOSize {
		return fmt.Errorf("fusefs: buffers of %d octets are too small: at least %d", o.Buffers.Size(), MinIOSize)
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

// IOSizes are the sizes in octets of one READ and one WRITE, as agreed with the server.
func (fs *FS) IOSizes() (rsize, wsize int) { return fs.opts.RSize, fs.opts.WSize }

// Inodes is the number of objects that the FS keeps for the kernel.
func (fs *FS) Inodes() int { return fs.inodes.len() }

// Abort ends every call under way and to come; data that is not written is lost, and its writers
// are told. It returns at once.
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

// Close writes back what is left, ends the FS and frees what it holds. The mount must be gone. With
// ctx ended the rest is given up as by Abort.
func (fs *FS) Close(ctx context.Context) {
	fs.dirtyMu.Lock()
	left := make([]*inode, 0, len(fs.dirty))
	for ino := range fs.dirty {
		left = append(left, ino)
	}
	fs.dirtyMu.Unlock()
	for _, ino := range left {
		_ = fs.sync(ctx, ino) // who wrote is gone, and heard of it at close(2)
	}
	fs.idle(ctx)
	fs.Abort()
	fs.work.Wait()
	fs.interrupts.stop()
	for _, ino := range left {
		fs.abandon(ino)
	}
	if fs.ownBuffers {
		fs.buffers.Close()
	}
}

// idle waits until nothing is done in the background, or ctx ended.
func (fs *FS) idle(ctx context.Context) {
	stop := context.AfterFunc(ctx, fs.Abort)
	defer stop()
	fs.work.Wait()
}

// abandon frees the buffers of a file when no call is under way any more.
func (fs *FS) abandon(ino *inode) {
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

// String is the name of the file system in go-fuse's messages.
func (fs *FS) String() string { return "nfsrdma" }

// SetDebug does nothing: MountOptions.Debug says it.
func (fs *FS) SetDebug(bool) {}

// Init is called by go-fuse with the first request.
func (fs *FS) Init(s *fuse.Server) { fs.server.Store(s) }

// OnUnmount is called by go-fuse when the mount is gone.
func (fs *FS) OnUnmount() {}

// dropAttr makes the kernel ask for the node's attributes before it uses them again.
func (fs *FS) dropAttr(ino *inode) {
	if s := fs.server.Load(); s != nil {
		s.InodeNotify(ino.id, -1, 0) // a negative offset leaves the pages alone
	}
}

// Forget takes back references of the kernel's.
func (fs *FS) Forget(id, nlookup uint64) {
	fs.Counters.Ops[OpForget].Add(1)
	fs.inodes.forget(id, nlookup)
}

// addHandle gives an open file or directory its number, which is never used again.
func (fs *FS) addFile(h *fileHandle) uint64 {
	fs.handlesMu.Lock()
	defer fs.handlesMu.Unlock()
	fs.lastHandle++
	fs.files[fs.lastHandle] = h
	return fs.lastHandle
}

func (fs *FS) file(id uint64) *fileHandle {
	fs.handlesMu.Lock()
	defer fs.handlesMu.Unlock()
	return fs.files[id]
}

// fileOf is the open file that a SETATTR request came through, or nil.
func (fs *FS) fileOf(in *fuse.SetAttrIn) *fileHandle {
	id, ok := in.GetFh()
	if !ok || id == math.MaxUint64 {
		return nil
	}
	return fs.file(id)
}
