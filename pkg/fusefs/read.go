package fusefs

import (
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// maxEmptyReads bounds the consecutive READ replies without data and without EOF.
const maxEmptyReads = 8

// A readResult is data in a pool buffer. go-fuse writes the buffer to /dev/fuse, then Done returns
// it to the pool.
type readResult struct {
	fs   *FS
	buf  []byte
	n    int
	vecs [1][]byte
}

var readResults = sync.Pool{New: func() any { return new(readResult) }}

// Bytes returns the data. Bytes does not use go-fuse's buffer.
func (res *readResult) Bytes([]byte) ([]byte, fuse.Status) { return res.buf[:res.n], fuse.OK }

// Size returns the number of bytes.
func (res *readResult) Size() int { return res.n }

// Slices makes go-fuse write the buffer to /dev/fuse with writev(2) rather than through a pipe.
func (res *readResult) Slices() ([][]byte, fuse.Status) { return res.vecs[:], fuse.OK }

// Done releases the buffer after the kernel has the data. go-fuse does not call Done for an empty
// result.
func (res *readResult) Done() {
	if res.buf != nil {
		res.fs.buffers.Put(res.buf)
	}
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
	if err := fs.push(r, h.ino); err != nil {
		return nil, err
	}
	buf := fs.getBuffer(r)
	if buf == nil {
		return nil, syscall.EINTR
	}
	n, err := fs.readFull(r, h, in.Offset, buf[:in.Size])
	if err != nil {
		fs.buffers.Put(buf)
		return nil, err
	}
	if n == 0 { // go-fuse does not call Done for an empty result
		fs.buffers.Put(buf)
		buf = nil
	}
	res := readResults.Get().(*readResult)
	res.fs, res.buf, res.n = fs, buf, n
	res.vecs[0] = buf[:n]
	return res, nil
}

// readFull reads until buf is full or the file ends. readFull returns the number of bytes.
func (fs *FS) readFull(r *request, h *fileHandle, off uint64, buf []byte) (int, error) {
	var res nfs3.ReadResult
	for done, empty, try := 0, 0, 0; ; {
		if done == len(buf) {
			return done, nil
		}
		part := buf[done:min(len(buf), done+fs.opts.RSize)]
		start := fs.callStart()
		err := fs.client.Read(r, h.cred, h.ino.fh, off+uint64(done), part, &res)
		if fs.retryJukebox(r, err, try) {
			try++
			continue
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
			return 0, syscall.EIO
		}
		try = 0
	}
}
