package front

import (
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// vectors are the results of FileSystem.Read.
type vectors interface {
	Slices() ([][]byte, fuse.Status)
}

// reads are the READs in progress.
type reads struct {
	sync.Mutex
	active map[uint64]*Call // by the unique number of the request
}

func (r *reads) begin(unique uint64, c *Call) {
	r.Lock()
	defer r.Unlock()
	if r.active == nil {
		r.active = make(map[uint64]*Call)
	}
	r.active[unique] = c
}

// end reverses begin. It renews the channel of a READ that was interrupted.
func (r *reads) end(unique uint64, c *Call) {
	r.Lock()
	defer r.Unlock()
	if r.active[unique] == c {
		delete(r.active, unique)
	} else {
		c.cancel = make(chan struct{})
	}
}

// interrupt closes the channel of a READ, and reports whether the READ is in progress.
func (r *reads) interrupt(unique uint64) bool {
	r.Lock()
	defer r.Unlock()
	c := r.active[unique]
	if c == nil {
		return false
	}
	delete(r.active, unique)
	close(c.cancel)
	return true
}

// read handles a READ.
func (c *Call) read(in *fuse.ReadIn) {
	unique := in.Unique
	c.h.reads.begin(unique, c)
	res, data, status := c.callRead(in)
	c.h.reads.end(unique, c)
	c.writeData(unique, data, status, in.Size)
	c.h.fs.Replied(Unique(&in.InHeader))
	if res != nil {
		res.Done()
	}
}

// callRead calls the file system. After a panic it returns the status of the panic handler.
func (c *Call) callRead(in *fuse.ReadIn) (res fuse.ReadResult, data [][]byte, status fuse.Status) {
	defer func() {
		if v := recover(); v != nil {
			if status = c.h.onPanic(v); status.Ok() {
				status = fuse.EIO
			}
		}
	}()
	if res, status = c.h.fs.Read(c.cancel, in, nil); status.Ok() {
		data, status = res.(vectors).Slices()
	}
	return res, data, status
}

// writeData sends a reply with data.
func (c *Call) writeData(unique uint64, data [][]byte, status fuse.Status, limit uint32) {
	reply := bytesOf(&c.reply)[:headerSize]
	size := 0
	for _, d := range data {
		size += len(d)
	}
	if status.Ok() && size > int(limit) {
		c.h.logger.Printf("READ of %d bytes returned %d", limit, size)
		status = fuse.EIO
	}
	if !status.Ok() {
		c.send(reply[:putError(reply, unique, syscall.Errno(status))], nil)
		return
	}
	putHeader(reply, headerSize+size, 0, unique)
	c.send(reply, data)
}
