package nfs3

import (
	"bytes"
	"context"
	"math"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// ReadLink reads the path of the symbolic link fh into buf (RFC 1813 §3.3.5). The buffer should
// have [MaxPath] bytes. A path that is longer than the buffer or contains NUL is an error.
func (c *Client) ReadLink(ctx context.Context, cred []byte, fh FH, buf []byte, res *ReadLinkResult) error {
	*res = ReadLinkResult{}
	s := c.begin(ProcReadLink, cred, MaxResultReadLink)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	s.msg.ResultData = buf
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	if s.status == OK {
		n := d.Uint32()
		if int64(n) > int64(len(buf)) {
			d.Fail(errPathLen)
		}
		res.N = d.data(&s.msg, n)
		if bytes.IndexByte(buf[:res.N], 0) >= 0 {
			d.Fail(errPathNUL)
		}
	}
	return s.finish(&d)
}

// Read reads at most len(buf) bytes of fh at offset off into buf (RFC 1813 §3.3.6). A server may
// return fewer bytes without EOF, even none, so a loop must handle this case.
func (c *Client) Read(ctx context.Context, cred []byte, fh FH, off uint64, buf []byte, res *ReadResult) error {
	s := c.begin(ProcRead, cred, MaxResultRead)
	defer c.end(s)
	s.msg.ResultData = buf
	return c.read(ctx, s, &fh, off, res)
}

// ReadPieces is Read into memory in several pieces, none of which is empty. The data fills the
// pieces in their order.
func (c *Client) ReadPieces(ctx context.Context, cred []byte, fh FH, off uint64, pieces [][]byte,
	res *ReadResult) error {
	s := c.begin(ProcRead, cred, MaxResultRead)
	defer c.end(s)
	if s.msg.ResultPieces = pieces; len(pieces) == 1 {
		s.msg.ResultPieces, s.msg.ResultData = nil, pieces[0]
	}
	return c.read(ctx, s, &fh, off, res)
}

// read reads into the buffer of the message.
func (c *Client) read(ctx context.Context, s *scratch, fh *FH, off uint64, res *ReadResult) error {
	*res = ReadResult{}
	room := s.msg.ResultRoom()
	if room > math.MaxInt32 {
		return s.refuse(ErrInval, "READ of more than 2 GiB")
	}
	s.args = appendFH(s.args, fh)
	s.args = sunrpc.AppendUint64(s.args, off)
	s.args = sunrpc.AppendUint32(s.args, uint32(room))
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	if s.status == OK {
		count := d.Uint32()
		res.EOF = d.Bool()
		n := d.Uint32()
		switch {
		case n != count:
			d.Fail(errReadCount)
		case int64(n) > int64(room):
			d.Fail(errReadMore)
		}
		res.N = d.data(&s.msg, n)
	}
	return s.finish(&d)
}

// data reads the opaque of READ or READLINK, whose length n is at most m.ResultRoom(). The
// transport has placed the bytes in the buffer of the message, or data copies them from the reply.
// It returns n, or 0 on an error. It ignores the pad, which is the last item of the reply.
func (d *reader) data(m *sunrpc.Message, n uint32) int {
	if d.Err() != nil {
		return 0
	}
	if m.ResultDataLen < 0 {
		if int64(n) > int64(d.Remaining()) {
			d.Fail(errDataShort)
			return 0
		}
		rest := d.Rest()[:n]
		for _, p := range m.ResultPieces {
			rest = rest[copy(p, rest):]
		}
		copy(m.ResultData, rest)
		return int(n)
	}
	// RFC 8166 §3.4.6.2: the length in the reply must equal the length of the placed data. The data
	// is not valid otherwise.
	if int64(n) != int64(m.ResultDataLen) {
		d.Fail(errPlacedLen)
		return 0
	}
	return int(n)
}

// Write writes data to fh at offset off (RFC 1813 §3.3.7). res.Count may be less than len(data),
// but is 0 only for empty data. res.Committed is the stability that the server reports. The caller
// must check it, because a faulty server may report less than requested.
func (c *Client) Write(ctx context.Context, cred []byte, fh FH, off uint64, data []byte, stable StableHow,
	res *WriteResult) error {
	*res = WriteResult{}
	s := c.begin(ProcWrite, cred, MaxResultWrite)
	defer c.end(s)
	if len(data) > math.MaxInt32 {
		return s.refuse(ErrInval, "WRITE of more than 2 GiB")
	}
	s.args = appendFH(s.args, &fh)
	s.args = sunrpc.AppendUint64(s.args, off)
	s.args = sunrpc.AppendUint32(s.args, uint32(len(data)))
	s.args = sunrpc.AppendUint32(s.args, uint32(stable))
	s.args = sunrpc.AppendUint32(s.args, uint32(len(data)))
	s.msg.ArgData = data
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.wcc(&res.Change)
	if s.status == OK {
		res.Count = d.Uint32()
		res.Committed = d.stableHow()
		res.Verf = d.verifier()
		switch {
		case int64(res.Count) > int64(len(data)):
			d.Fail(errWroteMore)
		case res.Count == 0 && len(data) > 0:
			d.Fail(errWroteNone)
		}
	}
	return s.finish(&d)
}

// Commit writes UNSTABLE data in the range to stable storage (RFC 1813 §3.3.21). A count of 0 means
// up to the end of the file. If res.Verf differs from the verifier of a WRITE, the server may have
// lost the data of this WRITE, and the caller must send it again.
func (c *Client) Commit(ctx context.Context, cred []byte, fh FH, off uint64, count uint32, res *CommitResult) error {
	*res = CommitResult{}
	s := c.begin(ProcCommit, cred, MaxResultCommit)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	s.args = sunrpc.AppendUint64(s.args, off)
	s.args = sunrpc.AppendUint32(s.args, count)
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.wcc(&res.Change)
	if s.status == OK {
		res.Verf = d.verifier()
	}
	return s.finish(&d)
}
