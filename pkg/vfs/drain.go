package vfs

import (
	"context"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

// mappedFlushes is the number of files whose mapped pages the kernel writes at the same time.
const mappedFlushes = 8

// Drain makes all later writes synchronous and writes the data of all files to stable storage. It
// returns true when the data that was written before is stable or rejected. It returns false when
// ctx ends, and when the server accepts nothing during the time stall. A stall of 0 is no limit.
func (fs *FS) Drain(ctx context.Context, stall time.Duration) (complete bool) {
	fs.draining.Store(true)
	return fs.data.Flush(ctx, stall) && fs.flushMapped(ctx, stall) &&
		fs.data.Flush(ctx, stall) // data of mappings
}

// flushMapped makes the kernel send the data that programs stored in shared mappings of open files.
// The kernel sends this data as WRITEs before it drops the pages. flushMapped ends as Drain does.
func (fs *FS) flushMapped(ctx context.Context, stall time.Duration) (complete bool) {
	d := fs.device.Load()
	if d == nil {
		return true
	}
	files := fs.writableFiles()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return fs.data.InParallel(ctx, len(files), mappedFlushes, stall, func(i int) {
		// A process that is killed during a notification cannot exit before the kernel has locked
		// the pages. Send none to a server that does not answer.
		h := files[i]
		var a nfs.Attr
		if fs.getAttr(ctx, h.cred, h.ino, &a) == nil {
			_ = d.InvalInode(h.ino.id, 0, 0)
			fs.data.Progressed()
		}
	})
}

// writableFiles returns one open file of each inode that is open for writing.
func (fs *FS) writableFiles() []*fileHandle {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	var all []*fileHandle
	seen := make(map[*inode]bool)
	for _, h := range fs.handles.files {
		if h.writable && !seen[h.ino] {
			seen[h.ino] = true
			all = append(all, h)
		}
	}
	return all
}

// keepFileError records the error of a file for its open files.
func (fs *FS) keepFileError(f *data.File, err syscall.Errno) {
	if fs.state == nil {
		return
	}
	fs.handles.Lock()
	defer fs.handles.Unlock()
	for _, h := range fs.handles.files {
		if h.ino.id == f.ID {
			fs.state.setFileError(h, err)
		}
	}
}

func (fs *FS) reportLoss(l data.Loss) {
	if fs.opts.Lost != nil {
		fs.opts.Lost(l)
	}
}
