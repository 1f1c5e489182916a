package vfs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

// maxEmptyReads bounds the consecutive READ replies without data and without EOF.
const maxEmptyReads = 8

// A target is where the data of a READ or READLINK goes: memory of the connection, or a buffer of the
// pool.
type target struct {
	all  data.Pieces // the memory; empty without any
	buf  []byte      // the buffer of the pool, or nil
	one  [1][]byte
	part data.Pieces // memory of one call
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
func (t *target) slice(from, to int) data.Pieces {
	clear(t.part)
	t.part = t.all.AppendPart(t.part[:0], from, to)
	return t.part
}

// give returns the first n bytes of the buffer. The caller gives them to the kernel, and then calls
// reset.
func (t *target) give(n int) [][]byte {
	t.one[0], t.all = t.buf[:n], nil
	return t.one[:]
}

// reset forgets the memory, and returns a buffer of give to the pool. Calls may still use another
// buffer after a panic. reset keeps memory for slice.
func (t *target) reset(fs *FS) {
	if t.buf != nil && t.all == nil {
		fs.buffers.Put(t.buf)
	}
	clear(t.part)
	*t = target{part: t.part[:0]}
}

// Read handles read(2) and page reads. It returns fewer bytes than requested only at the end of
// the file, because the kernel takes a short reply for the end.
func (fs *FS) Read(k *kernel.Request, in *fuse.ReadIn, place [][]byte) (placed int, data [][]byte, s fuse.Status) {
	r := fs.begin(k)
	t := &r.target
	if fs.opts.ReadInPlace {
		t.all = place
	}
	n, err := fs.read(r, in, t)
	if err != nil {
		t.dropBuffer(fs)
		return 0, nil, fs.end(r, err)
	}
	r.Bytes = n
	fs.Counters.ReadBytes.Add(uint64(n))
	if t.buf == nil {
		return n, nil, fs.end(r, nil)
	}
	return 0, t.give(n), fs.end(r, nil)
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
	return fs.data.Buffer(r, h.cred)
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

// maxRereads bounds the READs of one request while replays of the file end.
const maxRereads = 64

// readCurrent is readFull with the data of the extents. When a replayed extent was released during
// the READ, the server may have executed the READ before the replay: readCurrent then reads again.
func (fs *FS) readCurrent(r *request, h *fileHandle, in *fuse.ReadIn, t *target) (n int, err error) {
	for range maxRereads {
		before := h.ino.data.Load().Replayed()
		if n, err = fs.readFull(r, h, in, t); err != nil {
			return 0, err
		}
		var ok bool
		if n, ok = h.ino.data.Load().Overlay(t.all, int(in.Size), n, in.Offset, before); ok {
			return n, nil
		}
	}
	return 0, fs.invalidReply(h.ino, "the write verifier keeps changing during a READ")
}
