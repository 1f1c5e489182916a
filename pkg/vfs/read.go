package vfs

import (
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// maxEmptyReads bounds the consecutive READ replies without data and without EOF.
const maxEmptyReads = 8

// A readResult is data in a pool buffer. The connection gives the buffer to the kernel, then Done
// returns it to the pool.
type readResult struct {
	fs   *FS
	buf  []byte
	n    int
	vecs [1][]byte
}

var readResults = sync.Pool{New: func() any { return new(readResult) }}

// Bytes returns the data.
func (res *readResult) Bytes([]byte) ([]byte, fuse.Status) { return res.buf[:res.n], fuse.OK }

// Size returns the number of bytes.
func (res *readResult) Size() int { return res.n }

// Slices returns the data.
func (res *readResult) Slices() ([][]byte, fuse.Status) { return res.vecs[:], fuse.OK }

// Done releases the buffer.
func (res *readResult) Done() {
	res.fs.buffers.Put(res.buf)
	*res = readResult{}
	readResults.Put(res)
}

// A target is where the data of a READ or READLINK goes: memory of the connection, or a buffer of the
// pool.
type target struct {
	all  pieces // the memory; empty without any
	buf  []byte // the buffer of the pool, or nil
	one  [1][]byte
	part pieces // memory of one call
}

// useBuffer makes a buffer of the pool the memory.
func (t *target) useBuffer(buf []byte) {
	t.buf, t.one[0] = buf, buf
	t.all = t.one[:]
}

// dropBuffer returns the buffer, if any, to the pool.
func (t *target) dropBuffer(fs *FS) {
	if t.buf != nil {
		fs.buffers.Put(t.buf)
		t.buf, t.one[0], t.all = nil, nil, nil
	}
}

// slice returns the memory of the range from byte from to byte to. It is valid until the next call.
func (t *target) slice(from, to int) pieces {
	clear(t.part)
	t.part = t.all.appendPart(t.part[:0], from, to)
	return t.part
}

// reset forgets the memory. It keeps memory for slice.
func (t *target) reset() {
	clear(t.part)
	*t = target{part: t.part[:0]}
}

// ReadTo handles read(2) and page reads. It returns fewer bytes than requested only at the end of
// the file, because the kernel takes a short reply for the end.
func (fs *FS) ReadTo(k *kernel.Request, in *fuse.ReadIn, place [][]byte) (int, fuse.ReadResult, fuse.Status) {
	r := fs.begin(k)
	t := &r.target
	if fs.opts.ReadInPlace {
		t.all = place
	}
	n, err := fs.read(r, in, t)
	if err != nil {
		t.dropBuffer(fs)
	}
	buf := t.buf
	t.reset()
	if err == nil {
		r.Bytes = n
	}
	status := fs.end(r, err)
	if status != fuse.OK {
		return 0, nil, status
	}
	fs.Counters.ReadBytes.Add(uint64(n))
	if buf == nil {
		return n, nil, status
	}
	res := readResults.Get().(*readResult)
	res.fs, res.buf, res.n = fs, buf, n
	res.vecs[0] = buf[:n]
	return 0, res, status
}

func (fs *FS) read(r *request, in *fuse.ReadIn, t *target) (n int, err error) {
	h := fs.file(in.Fh)
	if h == nil {
		return 0, syscall.EBADF
	}
	if int64(in.Size) > int64(fs.buffers.Size()) {
		return 0, syscall.EIO // Mount bounds the kernel's requests by the buffer size
	}
	if err := fs.lostLock(h); err != nil {
		return 0, err
	}
	if err := fs.push(r, h.ino); err != nil {
		return 0, err
	}
	if len(t.all) == 0 {
		buf := fs.getReadBuffer(r, h, in)
		if buf == nil {
			return 0, syscall.EINTR
		}
		t.useBuffer(buf)
	}
	return fs.readCurrent(r, h, in, t)
}

// getReadBuffer is getBuffer for a READ. A buffered read that waits takes no place among the kernel's
// background requests.
func (fs *FS) getReadBuffer(r *request, h *fileHandle, in *fuse.ReadIn) []byte {
	if b := fs.buffers.TryGet(); b != nil {
		return b
	}
	if in.Flags&syscall.O_DIRECT == 0 {
		fs.busyReads.begin(false, 0)
		defer fs.busyReads.end(false)
	}
	return fs.getBuffer(r, h.cred)
}

// readFull reads in.Size bytes into t, or fewer at the end of the file on the server. After an
// error t may have no memory.
func (fs *FS) readFull(r *request, h *fileHandle, in *fuse.ReadIn, t *target) (done int, err error) {
	for empty, try := 0, 0; ; {
		if done == int(in.Size) {
			return done, nil
		}
		part := t.slice(done, min(int(in.Size), done+fs.opts.RSize))
		start := fs.attrs.Now()
		res, err := fs.server.Read(r, h.cred, h.ino.fh, h.open, in.Offset+uint64(done), part)
		if nfs.IsBusy(err) {
			if done = fs.pauseRead(r, h.cred, &err, t, done, try); err == nil {
				try++
				continue
			}
		}
		if err != nil {
			return 0, fs.checkStale(h.ino, err)
		}
		if res.Attr.Present {
			fs.updateAttr(h.ino, &res.Attr.Attr, start)
		}
		done += res.N
		if res.EOF {
			return done, nil
		}
		if empty++; res.N > 0 {
			empty = 0
		}
		if empty > maxEmptyReads {
			return 0, fs.invalidReply(h.ino, "READ returns neither data nor the end of the file")
		}
		try = 0
	}
}
