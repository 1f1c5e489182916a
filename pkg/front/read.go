package front

import (
	"sync"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// vectors are the results of FileSystem.Read.
type vectors interface {
	Slices() ([][]byte, fuse.Status)
}

// reads are the READs in progress.
type reads struct {
	sync.Mutex
	active map[uint64]*worker // by the unique number of the request
}

func (r *reads) begin(unique uint64, w *worker) {
	r.Lock()
	defer r.Unlock()
	if r.active == nil {
		r.active = make(map[uint64]*worker)
	}
	r.active[unique] = w
}

// end reverses begin. It renews the channel of a READ that was interrupted.
func (r *reads) end(unique uint64, w *worker) {
	r.Lock()
	defer r.Unlock()
	if r.active[unique] == w {
		delete(r.active, unique)
	} else {
		w.cancel = make(chan struct{})
	}
}

// interrupt closes the channel of a READ, and reports whether the READ is in progress.
func (r *reads) interrupt(unique uint64) bool {
	r.Lock()
	defer r.Unlock()
	w := r.active[unique]
	if w == nil {
		return false
	}
	delete(r.active, unique)
	close(w.cancel)
	return true
}

// read handles a READ.
func (w *worker) read(in *fuse.ReadIn) {
	unique := in.Unique
	w.s.reads.begin(unique, w)
	res, data, status := w.callRead(in)
	w.s.reads.end(unique, w)
	w.writeData(unique, data, status, in.Size)
	w.s.fs.Replied(Unique(&in.InHeader))
	if res != nil {
		res.Done()
	}
}

// callRead calls the file system. After a panic it returns the status of the panic handler.
func (w *worker) callRead(in *fuse.ReadIn) (res fuse.ReadResult, data [][]byte, status fuse.Status) {
	defer func() {
		if v := recover(); v != nil {
			if status = w.s.onPanic(v); status.Ok() {
				status = fuse.EIO
			}
		}
	}()
	if res, status = w.s.fs.Read(w.cancel, in, nil); status.Ok() {
		data, status = res.(vectors).Slices()
	}
	return res, data, status
}

// writeData sends a reply with data.
func (w *worker) writeData(unique uint64, data [][]byte, status fuse.Status, limit uint32) {
	reply := bytesOf(&w.reply)[:headerSize]
	size := 0
	for _, d := range data {
		size += len(d)
	}
	if status.Ok() && size > int(limit) {
		w.s.logger.Printf("READ of %d bytes returned %d", limit, size)
		status = fuse.EIO
	}
	if !status.Ok() {
		w.write(reply[:putError(reply, unique, syscall.Errno(status))])
		return
	}
	putHeader(reply, headerSize+size, 0, unique)
	w.iov = appendIovec(w.iov[:0], reply)
	for _, d := range data {
		w.iov = appendIovec(w.iov, d)
	}
	_, _, errno := unix.Syscall(unix.SYS_WRITEV, uintptr(w.s.fd), uintptr(unsafe.Pointer(&w.iov[0])),
		uintptr(len(w.iov)))
	clear(w.iov)
	if errno != 0 {
		w.wrote(errno, reply)
	}
}

func appendIovec(iov []unix.Iovec, b []byte) []unix.Iovec {
	if len(b) == 0 {
		return iov
	}
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	return append(iov, v)
}
