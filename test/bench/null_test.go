package bench

import (
	"fmt"
	"log"
	"maps"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

const (
	chunkSize   = 1 << 20
	nullTimeout = time.Second // of names and attributes, as for P
)

// A nullFS is a file system in memory, without permissions and times.
type nullFS struct {
	kernel.FileSystem // nil: the workloads do not need the other operations
	requests          kernel.Requests

	tree struct {
		sync.RWMutex
		nodes    map[uint64]*nullNode
		last     uint64 // node or handle
		listings map[uint64][]string
	}
	free struct {
		sync.Mutex
		chunks [][]byte
	}
}

// A nullNode is a file or a directory. The lock of the tree guards all but the data.
type nullNode struct {
	id       uint64
	children map[string]*nullNode // nil for a file
	lookups  uint64               // references of the kernel
	linked   bool

	data struct {
		sync.RWMutex
		size   int64
		chunks [][]byte // of chunkSize; the last one may be shorter
	}
}

func newNullFS() *nullFS {
	fs := &nullFS{}
	root := &nullNode{id: fuse.FUSE_ROOT_ID, children: make(map[string]*nullNode), linked: true}
	fs.tree.nodes, fs.tree.last = map[uint64]*nullNode{root.id: root}, root.id
	fs.tree.listings = make(map[uint64][]string)
	return fs
}

// serveNull mounts a nullFS at dir and serves it until it is unmounted.
func serveNull(dir string) error {
	dev, err := kernel.OpenDevice()
	if err != nil {
		return err
	}
	if used := dev.Use(func(fd int) {
		err = unix.Mount("null", dir, "fuse.null", unix.MS_NOSUID|unix.MS_NODEV,
			fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=%d", fd, chunkSize))
	}); used != nil || err != nil {
		return fmt.Errorf("mount %s: %v, %w", dir, used, err)
	}
	// The options are those of a mount of nfsrdmad.
	conn, err := kernel.NewDevFuse(dev, newNullFS(), kernel.Options{MaxBackground: 64, MaxWrite: chunkSize,
		MaxReadAhead: chunkSize, Capabilities: fuse.CAP_EXPLICIT_INVAL_DATA,
		Panicked: func(v any) fuse.Status { log.Print(v); return fuse.EIO }})
	if err != nil {
		return err
	}
	go exitWithInput()
	fmt.Println("ready")
	conn.Serve()
	return dev.Close()
}

func (fs *nullFS) Requests() *kernel.Requests { return &fs.requests }
func (fs *nullFS) Replied(*kernel.Request)    {}
func (fs *nullFS) Warn(string, ...any)        {}

// node returns a node that the kernel knows.
func (fs *nullFS) node(id uint64) *nullNode {
	fs.tree.RLock()
	defer fs.tree.RUnlock()
	return fs.tree.nodes[id]
}

func (n *nullNode) attr(a *fuse.Attr) {
	n.data.RLock()
	defer n.data.RUnlock()
	*a = fuse.Attr{Ino: n.id, Nlink: 1, Blksize: 4096, Mode: unix.S_IFREG | 0o644, Size: uint64(n.data.size),
		Blocks: uint64(n.data.size+511) / 512}
	if n.children != nil {
		a.Mode = unix.S_IFDIR | 0o755
	}
}

// entry fills the reply to a LOOKUP. The caller holds the lock of the tree.
func (n *nullNode) entry(out *fuse.EntryOut) {
	n.lookups++
	out.NodeId = n.id
	out.SetEntryTimeout(nullTimeout)
	out.SetAttrTimeout(nullTimeout)
	n.attr(&out.Attr)
}

// add makes a new node. The caller holds the lock of the tree.
func (fs *nullFS) add(dir *nullNode, name string, children map[string]*nullNode) *nullNode {
	fs.tree.last++
	n := &nullNode{id: fs.tree.last, children: children, linked: true}
	fs.tree.nodes[n.id], dir.children[name] = n, n
	return n
}

// remove removes a name. The caller holds the lock of the tree.
func (fs *nullFS) remove(dir *nullNode, name string) fuse.Status {
	n := dir.children[name]
	switch {
	case n == nil:
		return fuse.ENOENT
	case len(n.children) > 0:
		return fuse.Status(unix.ENOTEMPTY)
	}
	delete(dir.children, name)
	n.linked = false
	fs.drop(n)
	return fuse.OK
}

// drop forgets a node that has neither a name nor a reference of the kernel. The caller holds the
// lock of the tree.
func (fs *nullFS) drop(n *nullNode) {
	if !n.linked && n.lookups == 0 {
		delete(fs.tree.nodes, n.id)
		n.data.Lock()
		defer n.data.Unlock()
		fs.truncate(n, 0)
	}
}

func (fs *nullFS) Lookup(r *kernel.Request, name string, out *fuse.EntryOut) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	n := fs.tree.nodes[r.Header.NodeId].children[name]
	if n == nil {
		return fuse.ENOENT
	}
	n.entry(out)
	return fuse.OK
}

func (fs *nullFS) Forget(id, lookups uint64) {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	if n := fs.tree.nodes[id]; n != nil && id != fuse.FUSE_ROOT_ID {
		n.lookups -= lookups
		fs.drop(n)
	}
}

func (fs *nullFS) GetAttr(_ *kernel.Request, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	out.SetTimeout(nullTimeout)
	fs.node(in.NodeId).attr(&out.Attr)
	return fuse.OK
}

func (fs *nullFS) SetAttr(_ *kernel.Request, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := fs.node(in.NodeId)
	if size, ok := in.GetSize(); ok {
		n.data.Lock()
		fs.truncate(n, min(int64(size), n.data.size))
		n.data.Unlock()
	}
	out.SetTimeout(nullTimeout)
	n.attr(&out.Attr)
	return fuse.OK
}

func (fs *nullFS) Mkdir(_ *kernel.Request, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	fs.add(fs.tree.nodes[in.NodeId], name, make(map[string]*nullNode)).entry(out)
	return fuse.OK
}

func (fs *nullFS) Create(_ *kernel.Request, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	fs.add(fs.tree.nodes[in.NodeId], name, nil).entry(&out.EntryOut)
	return fuse.OK
}

func (fs *nullFS) Unlink(r *kernel.Request, name string) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	return fs.remove(fs.tree.nodes[r.Header.NodeId], name)
}

func (fs *nullFS) Rmdir(r *kernel.Request, name string) fuse.Status { return fs.Unlink(r, name) }

func (fs *nullFS) Rename(r *kernel.Request, oldName string, newDir uint64, newName string, _ uint32) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	from, to := fs.tree.nodes[r.Header.NodeId], fs.tree.nodes[newDir]
	n := from.children[oldName]
	if n == nil {
		return fuse.ENOENT
	}
	if to.children[newName] != nil {
		if status := fs.remove(to, newName); !status.Ok() {
			return status
		}
	}
	delete(from.children, oldName)
	to.children[newName] = n
	return fuse.OK
}

func (fs *nullFS) Open(*kernel.Request, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.OK }
func (fs *nullFS) Flush(*kernel.Request, *fuse.FlushIn) fuse.Status              { return fuse.OK }
func (fs *nullFS) Fsync(*kernel.Request, *fuse.FsyncIn) fuse.Status              { return fuse.OK }
func (fs *nullFS) Release(*kernel.Request, *fuse.ReleaseIn) fuse.Status          { return fuse.OK }
func (fs *nullFS) FsyncDir(*kernel.Request, *fuse.FsyncIn) fuse.Status           { return fuse.OK }

func (fs *nullFS) OpenDir(_ *kernel.Request, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	fs.tree.last++
	out.Fh = fs.tree.last
	fs.tree.listings[out.Fh] = slices.Collect(maps.Keys(fs.tree.nodes[in.NodeId].children))
	return fuse.OK
}

func (fs *nullFS) ReleaseDir(_ *kernel.Request, in *fuse.ReleaseIn) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	delete(fs.tree.listings, in.Fh)
	return fuse.OK
}

// list calls add with the names from an offset until add returns false.
func (fs *nullFS) list(in *fuse.ReadIn, add func(e fuse.DirEntry, n *nullNode) bool) fuse.Status {
	fs.tree.Lock()
	defer fs.tree.Unlock()
	names := fs.tree.listings[in.Fh]
	for off := in.Offset; off < uint64(len(names)); off++ {
		n := fs.tree.nodes[in.NodeId].children[names[off]]
		if n == nil { // removed since OpenDir
			continue
		}
		var a fuse.Attr
		n.attr(&a)
		if !add(fuse.DirEntry{Name: names[off], Mode: a.Mode, Ino: a.Ino, Off: off + 1}, n) {
			break
		}
	}
	return fuse.OK
}

func (fs *nullFS) ReadDir(_ *kernel.Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return fs.list(in, func(e fuse.DirEntry, _ *nullNode) bool { return out.AddDirEntry(e) })
}

func (fs *nullFS) ReadDirPlus(_ *kernel.Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return fs.list(in, func(e fuse.DirEntry, n *nullNode) bool {
		entry := out.AddDirLookupEntry(e)
		if entry != nil {
			n.entry(entry)
		}
		return entry != nil
	})
}

// chunk returns memory for a chunk. The memory of removed files is used again, so that the kernel
// need not clear pages.
func (fs *nullFS) chunk(size int) []byte {
	fs.free.Lock()
	defer fs.free.Unlock()
	if last := len(fs.free.chunks) - 1; size == chunkSize && last >= 0 {
		c := fs.free.chunks[last]
		fs.free.chunks = fs.free.chunks[:last]
		return c
	}
	return make([]byte, size)
}

// truncate shortens a file. The caller holds the lock of its data.
func (fs *nullFS) truncate(n *nullNode, size int64) {
	keep := int((size + chunkSize - 1) / chunkSize)
	fs.free.Lock()
	defer fs.free.Unlock()
	for _, c := range n.data.chunks[min(keep, len(n.data.chunks)):] {
		if len(c) == chunkSize {
			fs.free.chunks = append(fs.free.chunks, c)
		}
	}
	n.data.chunks, n.data.size = n.data.chunks[:min(keep, len(n.data.chunks))], size
}

func (fs *nullFS) Write(_ *kernel.Request, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	n := fs.node(in.NodeId)
	n.data.Lock()
	defer n.data.Unlock()
	if in.Offset > math.MaxInt32*chunkSize {
		return 0, fuse.Status(unix.EFBIG)
	}
	off, rest := int64(in.Offset), data[0] // /dev/fuse has it in one piece
	for len(rest) > 0 {
		i, at := int(off/chunkSize), int(off%chunkSize)
		for len(n.data.chunks) <= i {
			n.data.chunks = append(n.data.chunks, nil)
		}
		end := min(at+len(rest), chunkSize)
		if c := n.data.chunks[i]; len(c) < end {
			larger := fs.chunk(min(chunkSize, max(end, 2*len(c))))
			copy(larger, c)
			n.data.chunks[i] = larger
		}
		copied := copy(n.data.chunks[i][at:], rest)
		off, rest = off+int64(copied), rest[copied:]
	}
	n.data.size = max(n.data.size, off)
	return in.Size, fuse.OK
}

func (fs *nullFS) Read(_ *kernel.Request, in *fuse.ReadIn, _ [][]byte) (_ int, data [][]byte, _ fuse.Status) {
	n := fs.node(in.NodeId)
	n.data.RLock()
	defer n.data.RUnlock()
	end := min(int64(in.Offset)+int64(in.Size), n.data.size)
	for off := int64(in.Offset); off < end; {
		i, at := int(off/chunkSize), int(off%chunkSize)
		c := n.data.chunks[i]
		if len(c) <= at {
			return 0, nil, fuse.EIO // a hole; the workloads make none
		}
		s := c[at:min(int64(len(c)), int64(at)+end-off)]
		data = append(data, s)
		off += int64(len(s))
	}
	return 0, data, fuse.OK
}

// raiseReadAhead sets the read-ahead of a FUSE mount to 1 MiB, as nfsrdmad does.
func raiseReadAhead(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return err
	}
	return os.WriteFile(fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", unix.Major(st.Dev), unix.Minor(st.Dev)),
		[]byte("1024"), 0)
}
