package fusefs

import (
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// maxEmptyReads bounds the consecutive READ replies without data and without EOF.
const maxEmptyReads = 8

// A readResult is data in a pool buffer. The front gives the buffer to the kernel, then Done
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

// Read handles read(2) and page reads. Read returns fewer bytes than requested only at the end of
// the file, because the kernel takes a short reply for the end.
func (fs *FS) Read(cancel <-chan struct{}, in *fuse.ReadIn, _ []byte) (fuse.ReadResult, fuse.Status) {
	r := fs.begin(OpRead, cancel, &in.InHeader)
	res, err := fs.read(r, in)
	status := fs.end(OpRead, r, err)
	if status != fuse.OK {
		return nil, status
	}
	fs.Counters.ReadBytes.Add(uint64(res.n))
	return res, status
}

func (fs *FS) read(r *request, in *fuse.ReadIn) (*readResult, error) {
	h := fs.file(in.Fh)
	if h == nil {
		return nil, syscall.EBADF
	}
	if int64(in.Size) > int64(fs.buffers.Size()) {
		return nil, syscall.EIO // Mount bounds the kernel's requests by the buffer size
	}
	if err := fs.lostLock(h); err != nil {
		return nil, err
	}
	if err := fs.push(r, h.ino); err != nil {
		return nil, err
	}
	buf := fs.getBuffer(r)
	if buf == nil {
		return nil, syscall.EINTR
	}
	buf, n, err := fs.readCurrent(r, h, in, buf)
	if err != nil {
		if buf != nil {
			fs.buffers.Put(buf)
		}
		return nil, err
	}
	res := readResults.Get().(*readResult)
	res.fs, res.buf, res.n = fs, buf, n
	res.vecs[0] = buf[:n]
	return res, nil
}

// readFull reads in.Size bytes into buf, or fewer at the end of the file on the server. readFull
// returns a buffer, which may be another one or nil, and the number of bytes in it.
func (fs *FS) readFull(r *request, h *fileHandle, in *fuse.ReadIn, buf []byte) (_ []byte, done int, err error) {
	var res nfs3.ReadResult
	for empty, try := 0, 0; ; {
		if done == int(in.Size) {
			return buf, done, nil
		}
		part := buf[done:min(int(in.Size), done+fs.opts.RSize)]
		start := fs.callStart()
		err := fs.client.Read(r, h.cred, h.ino.fh, in.Offset+uint64(done), part, &res)
		if isBusy(err) {
			if buf, done = fs.pauseRead(r, &err, buf, done, try); err == nil {
				try++
				continue
			}
		}
		if err != nil {
			return buf, 0, fs.checkStale(h.ino, err)
		}
		if res.Attr.Present {
			fs.updateAttr(h.ino, &res.Attr.Attr, start)
		}
		done += res.N
		if res.EOF {
			return buf, done, nil
		}
		if empty++; res.N > 0 {
			empty = 0
		}
		if empty > maxEmptyReads {
			return buf, 0, fs.invalidReply(h.ino, "READ returns neither data nor the end of the file")
		}
		try = 0
	}
}
