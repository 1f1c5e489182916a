package vfs

import (
	"context"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

// setData prepares the store of written data.
func (fs *FS) setData() {
	fs.data.Init(data.Config{Server: fs.server, Attrs: &fs.attrs, Busy: &fs.busy, Buffers: fs.buffers,
		BusyErrno: fs.opts.BusyErrno, WriteSize: fs.opts.WSize, MaxWrites: fs.opts.MaxWrites,
		Expire: fs.opts.DirtyExpire, Limit: fs.opts.DirtyBytes, Total: fs.opts.DirtyTotal,
		Counters: &data.Counters{SentBytes: &fs.Counters.SentBytes, Commits: &fs.Counters.Commits,
			Replays: &fs.Counters.Replays, ReplayedBytes: &fs.Counters.ReplayedBytes,
			WriteErrors: &fs.Counters.WriteErrors, BufferWaits: &fs.Counters.BufferWaits,
			WriteThroughs: &fs.Counters.WriteThroughs},
		Records: fs.dataRecords(), Background: background{fs},
		Owned: func(ctx context.Context) context.Context {
			return context.WithValue(ctx, backgroundKey{}, background{fs})
		},
		Spawn: fs.spawn, Recovered: fs.recovered,
		Check:     func(f *data.File, err error) error { return fs.checkStale(nodeOf(f), err) },
		Invalid:   func(f *data.File, reason string) error { return fs.invalidReply(nodeOf(f), reason) },
		Written:   func(f *data.File, ch *nfs.Change) { nodeOf(f).acls.Load().Keep(ch) },
		Failed:    fs.keepFileError,
		Restarted: fs.serverRestarted, DropPages: fs.dropRange, Lost: fs.reportLoss})
}

func nodeOf(f *data.File) *inode { return f.Owner.(*inode) }

// written returns the written data of a file. It makes an empty one when there is none.
func (fs *FS) written(ino *inode) *data.File {
	if f := ino.data.Load(); f != nil {
		return f
	}
	f := fs.data.NewFile(ino.id, ino.fh, &ino.attr)
	f.Owner = ino
	ino.data.CompareAndSwap(nil, f)
	return ino.data.Load()
}

// serverRestarted makes the lock client reclaim the locks of the mount.
func (fs *FS) serverRestarted() {
	if fs.opts.Locks != nil {
		fs.opts.Locks.Restarted("write verifier changed")
	}
}

// push sends the unsent data of a file and waits until the server has all of it, so that the server's
// replies include the data.
func (fs *FS) push(ctx context.Context, ino *inode) error { return ino.data.Load().Push(ctx) }

// sync writes the data of a file to stable storage, see data.File.Sync.
func (fs *FS) sync(ctx context.Context, ino *inode) error { return ino.data.Load().Sync(ctx) }

// report returns the file's last error if h has not reported it, else nil. The request r returns
// the error again if the kernel sends the request again.
func (h *fileHandle) report(r *request) error {
	return h.ino.data.Load().Report(&h.errors, func(e syscall.Errno) {
		if r.keepError(e) {
			h.state.setFileError(h, 0)
		}
	})
}

// reportedBefore returns the error with which an earlier process ended r, or nil. The file has then
// reported the error.
func (h *fileHandle) reportedBefore(r *request) error {
	err := r.earlierError()
	if err != nil && h.ino.data.Load().Reported(&h.errors, err) {
		h.state.setFileError(h, 0)
	}
	return err
}

// Write takes data from the kernel: from write(2), and from pages written through a mapping.
func (fs *FS) Write(k *kernel.Request, in *fuse.WriteIn, mem [][]byte) (uint32, fuse.Status) {
	r := fs.begin(k)
	n, err := fs.write(r, in, mem)
	r.Bytes = n
	fs.Counters.WrittenBytes.Add(uint64(n))
	return uint32(n), fs.end(r, err)
}

func (fs *FS) write(r *request, in *fuse.WriteIn, mem data.Pieces) (int, error) {
	h := fs.file(in.Fh)
	if h == nil || !h.writable {
		return 0, syscall.EBADF
	}
	if err := h.reportedBefore(r); err != nil {
		return 0, err
	}
	if err := fs.lostLock(h); err != nil {
		return 0, err
	}
	if fs.reportsErrors(in) {
		if err := h.report(r); err != nil {
			return 0, err
		}
	}
	off := in.Offset
	if in.Flags&syscall.O_APPEND != 0 && in.WriteFlags&fuse.WRITE_CACHE == 0 && !fs.opts.Writeback {
		var err error
		if off, err = fs.appendOffset(r, h); err != nil {
			return 0, err
		}
	}
	size := mem.Size()
	if size > 0 && off >= fs.maxFileSize {
		return 0, syscall.EFBIG // return the error now: close(2) could not say which write failed
	}
	size = int(min(uint64(size), fs.maxFileSize-min(off, fs.maxFileSize)))
	n, err := fs.written(h.ino).Write(r, &data.Writer{Cred: h.cred, State: h.open}, off, mem, size)
	// A program repeats the rest of a short write. The kernel does not repeat the rest of its
	// pages.
	if err != nil && (n == 0 || in.WriteFlags&fuse.WRITE_CACHE != 0) {
		return 0, err
	}
	if h.ino.attr.MayHaveSetID() {
		h.setID.Store(true)
	}
	if h.direct && in.WriteFlags&fuse.WRITE_CACHE == 0 && n > 0 {
		fs.dropWritten(r, h, in.Flags, off, off+uint64(n))
	}
	// Check draining after the data is in an extent. Drain then either writes the data or is seen
	// here. The kernel sends dirty pages with WRITE_CACHE. No program waits for these.
	drains := fs.draining.Load() && in.WriteFlags&fuse.WRITE_CACHE == 0
	if drains || fs.opts.NoAC || in.Flags&(syscall.O_SYNC|syscall.O_DSYNC|syscall.O_DIRECT) != 0 {
		if err := fs.sync(r, h.ino); err != nil {
			return 0, err
		}
		if err := h.report(r); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// appendOffset returns the offset for data of a file opened with O_APPEND. A request that the
// kernel sends again has the same offset again.
func (fs *FS) appendOffset(r *request, h *fileHandle) (off uint64, err error) {
	if off, ok := r.keptOffset(); ok {
		return off, nil
	}
	if off, err = fs.endOfFile(r, h); err == nil {
		r.keepOffset(off)
	}
	return off, err
}

// endOfFile returns the offset for data of a file opened with O_APPEND: the end of the file on the
// server, or of the data that the server does not have yet. NFSv3 has no append, so appends of two
// clients can overwrite each other unless the clients use locks.
func (fs *FS) endOfFile(r *request, h *fileHandle) (uint64, error) {
	ino, f := h.ino, fs.written(h.ino)
	pending, end := f.HasUnsent(), f.End() // the server may have lost data up to end
	if v := fs.attrs.View(&ino.attr); pending && v.SizeKnown {
		return max(v.Written, end), nil
	}
	if err := fs.push(r, ino); err != nil {
		return 0, err
	}
	end = f.End() // without rejected data; before the GETATTR, because a replay may end meanwhile
	var a nfs.Attr
	if _, err := fs.fetch(r, h.cred, ino, &a); err != nil {
		return 0, err
	}
	return max(a.Size, end), nil
}

// dropWritten makes the kernel drop its cached pages of data that was written past them. Kernels
// since 6.6 drop these pages before the write, but a reader can fill them again meanwhile.
//
// After a write with O_DIRECT, dropWritten does not wait for the drop. The write can be one of the
// kernel's background requests, and a READ that holds the pages can wait for these requests.
func (fs *FS) dropWritten(r *request, h *fileHandle, flags uint32, off, end uint64) {
	ino, f := h.ino, fs.written(h.ino)
	if !fs.explicitPages() || !fs.attrs.View(&ino.attr).Buffered {
		return
	}
	f.DropPages(off, end)
	if flags&syscall.O_DIRECT == 0 {
		_ = f.AwaitDropped(r) // the data is written nevertheless
	}
}

// dropRange makes the kernel drop its pages of a range.
func (fs *FS) dropRange(f *data.File, off, n uint64) {
	if d := fs.device.Load(); d != nil {
		_ = d.InvalInode(f.ID, int64(off), int64(n))
	}
}
