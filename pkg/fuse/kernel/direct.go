package kernel

import (
	"bytes"
	"math"
	"sync"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// The operations of this file are handled without go-fuse, which allocates memory for each request.
// The replies are the same.

// A directOp is an operation that is handled without go-fuse.
type directOp struct {
	in  int // size of the request without names and data
	out int // size of the reply without data
	do  func(c *Call, in []byte, payload [][]byte) fuse.Status
}

const (
	inHeaderSize = int(unsafe.Sizeof(fuse.InHeader{}))
	entryOutSize = headerSize + int(unsafe.Sizeof(fuse.EntryOut{}))
	attrOutSize  = headerSize + int(unsafe.Sizeof(fuse.AttrOut{}))
	openOutSize  = headerSize + int(unsafe.Sizeof(fuse.OpenOut{}))
	writeOutSize = headerSize + int(unsafe.Sizeof(fuse.WriteOut{}))
)

var directOps = [...]directOp{
	opLookup:  {inHeaderSize, entryOutSize, (*Call).lookup},
	opGetAttr: {int(unsafe.Sizeof(fuse.GetAttrIn{})), attrOutSize, (*Call).getAttr},
	opOpen:    {int(unsafe.Sizeof(fuse.OpenIn{})), openOutSize, (*Call).open},
	opRead:    {int(unsafe.Sizeof(fuse.ReadIn{})), headerSize, (*Call).read},
	opWrite:   {int(unsafe.Sizeof(fuse.WriteIn{})), writeOutSize, (*Call).write},
	opRelease: {int(unsafe.Sizeof(fuse.ReleaseIn{})), headerSize, (*Call).release},
	opFlush:   {int(unsafe.Sizeof(fuse.FlushIn{})), headerSize, (*Call).flush},
}

// pollNode and pollName are what go-fuse answers without the file system (fuse/poll.go).
const (
	pollNode = math.MaxUint64
	pollName = ".go-fuse-epoll-hack"
)

// directOpOf returns the operation of a request, or nil if go-fuse must handle it.
func directOpOf(in []byte) *directOp {
	h := header(in)
	if int(h.Opcode) >= len(directOps) {
		return nil
	}
	op := &directOps[h.Opcode]
	if op.do == nil || len(in) < op.in || h.TotalExtlen != 0 || h.NodeId == pollNode {
		return nil
	}
	if h.Opcode == opLookup && h.NodeId == fuse.FUSE_ROOT_ID && string(nameIn(in[op.in:])) == pollName {
		return nil
	}
	return op
}

// nameIn returns the name at the start of b, which ends with a NUL or with b.
func nameIn(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// A directCall is the state of a Call while it handles a request without go-fuse.
type directCall struct {
	cancel      chan struct{} // closed by an INTERRUPT
	unique      uint64        // guarded by active
	index       int           // guarded by active: in calls
	interrupted bool          // guarded by active: cancel is closed

	// The results of read.
	placed int
	res    fuse.ReadResult
	data   [][]byte
}

// active are the Calls that handle a request without go-fuse.
type active struct {
	sync.Mutex
	calls []*Call
}

func (a *active) begin(c *Call, unique uint64) {
	a.Lock()
	defer a.Unlock()
	c.direct.unique, c.direct.index = unique, len(a.calls)
	a.calls = append(a.calls, c)
}

// end reverses begin. It renews the channel of a request that was interrupted.
func (a *active) end(c *Call) {
	a.Lock()
	defer a.Unlock()
	last := len(a.calls) - 1
	moved := a.calls[last]
	a.calls[c.direct.index], moved.direct.index = moved, c.direct.index
	a.calls[last] = nil
	a.calls = a.calls[:last]
	if c.direct.interrupted {
		c.direct.cancel, c.direct.interrupted = make(chan struct{}), false
	}
}

// interrupt closes the channel of a request. It reports false if the request is not in progress or
// was interrupted before.
func (a *active) interrupt(unique uint64) bool {
	a.Lock()
	defer a.Unlock()
	for _, c := range a.calls { // INTERRUPTs are rare
		if d := &c.direct; d.unique == unique && !d.interrupted {
			d.interrupted = true
			close(d.cancel)
			return true
		}
	}
	return false
}

// handleDirect handles a request without go-fuse. payload follows in.
func (c *Call) handleDirect(op *directOp, in []byte, payload [][]byte) {
	h, d := header(in), &c.direct
	unique, out := h.Unique, bytesOf(&c.reply)[:op.out]
	clear(out)
	c.h.active.begin(c, unique)
	status := c.run(op, in, payload)
	c.h.active.end(c)
	switch {
	case status > fuse.OK:
		c.t.Send(out[:putError(out, unique, syscall.Errno(status))], nil)
	case d.placed > 0:
		putHeader(out, headerSize+d.placed, 0, unique)
		c.t.SendPlaced(out, d.placed)
	default:
		size := op.out
		for _, b := range d.data {
			size += len(b)
		}
		putHeader(out, size, -int32(status), unique)
		c.t.Send(out, d.data)
	}
	c.h.fs.Replied(Unique(h), c.received)
	if d.res != nil {
		d.res.Done()
	}
	d.placed, d.res, d.data = 0, nil, nil
}

// run calls the file system. After a panic it returns the status of the panic handler.
func (c *Call) run(op *directOp, in []byte, payload [][]byte) (status fuse.Status) {
	defer func() {
		if v := recover(); v != nil {
			if status = c.h.opts.Panicked(v); status.Ok() {
				status = fuse.EIO
			}
		}
	}()
	return op.do(c, in, payload)
}

// outData returns the memory for the reply after its header.
func (c *Call) outData() unsafe.Pointer { return unsafe.Add(unsafe.Pointer(&c.reply), headerSize) }

func (c *Call) lookup(in []byte, payload [][]byte) fuse.Status {
	name := c.h.names.get(nameIn(payload[0]))
	return c.h.fs.Lookup(c.direct.cancel, header(in), name, (*fuse.EntryOut)(c.outData()))
}

func (c *Call) getAttr(in []byte, _ [][]byte) fuse.Status {
	return c.h.fs.GetAttr(c.direct.cancel, (*fuse.GetAttrIn)(unsafe.Pointer(&in[0])), (*fuse.AttrOut)(c.outData()))
}

func (c *Call) open(in []byte, _ [][]byte) fuse.Status {
	return c.h.fs.Open(c.direct.cancel, (*fuse.OpenIn)(unsafe.Pointer(&in[0])), (*fuse.OpenOut)(c.outData()))
}

func (c *Call) release(in []byte, _ [][]byte) fuse.Status {
	c.h.fs.Release(c.direct.cancel, (*fuse.ReleaseIn)(unsafe.Pointer(&in[0])))
	return fuse.OK
}

func (c *Call) flush(in []byte, _ [][]byte) fuse.Status {
	return c.h.fs.Flush(c.direct.cancel, (*fuse.FlushIn)(unsafe.Pointer(&in[0])))
}

func (c *Call) write(in []byte, data [][]byte) (status fuse.Status) {
	w, out := (*fuse.WriteIn)(unsafe.Pointer(&in[0])), (*fuse.WriteOut)(c.outData())
	if len(data) == 1 {
		out.Size, status = c.h.fs.Write(c.direct.cancel, w, data[0])
	} else {
		out.Size, status = c.h.fs.Writev(c.direct.cancel, w, data)
	}
	return status
}

// vectors are the results of FileSystem.ReadTo.
type vectors interface {
	Slices() ([][]byte, fuse.Status)
}

func (c *Call) read(in []byte, _ [][]byte) (status fuse.Status) {
	r, d := (*fuse.ReadIn)(unsafe.Pointer(&in[0])), &c.direct
	d.placed, d.res, status = c.h.fs.ReadTo(d.cancel, r, c.t.Place(int(r.Size)))
	if d.res != nil && status.Ok() {
		d.data, status = d.res.(vectors).Slices()
	}
	size := d.placed
	for _, b := range d.data {
		size += len(b)
	}
	if status.Ok() && size > int(r.Size) {
		c.h.opts.Logger.Printf("READ of %d bytes returned %d", r.Size, size)
		return fuse.EIO
	}
	return status
}
