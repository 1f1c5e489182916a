package nfs3

import (
	"bytes"
	"context"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// ReadDir reads the entries of dir after cookie (RFC 1813 §3.3.16). The first call takes cookie 0
// and the zero Verifier. Each later call takes the cookie of the last entry and the Verifier of the
// last result. count limits the size of the reply in bytes, at most [MaxDirCount].
//
// ReadDir checks the complete reply before it calls each for the first entry, so an invalid reply
// delivers no entry. It calls each for the entries in order until each returns false. The DirEntry
// and its Name are valid only during the call of each.
func (c *Client) ReadDir(ctx context.Context, cred []byte, dir FH, cookie uint64, verf Verifier, count uint32,
	res *ReadDirResult, each func(*DirEntry) bool) error {
	count = min(count, MaxDirCount)
	s := c.begin(ProcReadDir, cred, MaxResultReadDir(count))
	defer c.end(s)
	s.addDirCursor(&dir, cookie, verf)
	s.args = sunrpc.AppendUint32(s.args, count)
	return c.readDir(ctx, s, res, each)
}

// ReadDirPlus is ReadDir with attributes and handles (RFC 1813 §3.3.17). maxCount limits the size
// of the reply in bytes, at most [MaxDirCount]. dirCount limits the size of the fields that READDIR
// returns too.
func (c *Client) ReadDirPlus(ctx context.Context, cred []byte, dir FH, cookie uint64, verf Verifier, dirCount,
	maxCount uint32, res *ReadDirResult, each func(*DirEntry) bool) error {
	maxCount = min(maxCount, MaxDirCount)
	s := c.begin(ProcReadDirPlus, cred, MaxResultReadDir(maxCount))
	defer c.end(s)
	s.addDirCursor(&dir, cookie, verf)
	s.args = sunrpc.AppendUint32(s.args, min(dirCount, maxCount))
	s.args = sunrpc.AppendUint32(s.args, maxCount)
	return c.readDir(ctx, s, res, each)
}

func (s *scratch) addDirCursor(dir *FH, cookie uint64, verf Verifier) {
	s.args = appendFH(s.args, dir)
	s.args = sunrpc.AppendUint64(s.args, cookie)
	s.args = sunrpc.AppendFixed(s.args, verf[:])
}

func (c *Client) readDir(ctx context.Context, s *scratch, res *ReadDirResult, each func(*DirEntry) bool) error {
	*res = ReadDirResult{}
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.DirAttr)
	if s.status != OK {
		return s.finish(&d)
	}
	res.Verf = d.verifier()
	first := d
	for d.nextEntry(s) {
		res.Entries++
	}
	res.EOF = d.Bool()
	if err := s.finish(&d); err != nil {
		return err
	}
	for first.nextEntry(s) {
		if !each(&s.entry) {
			break
		}
	}
	return nil
}

// nextEntry decodes the next entry of the list into s.entry. It returns false at the end of the
// list and on an error. The size of the reply limits the number of entries.
func (d *reader) nextEntry(s *scratch) bool {
	if !d.Bool() {
		return false
	}
	e := &s.entry
	e.FileID = d.Uint64()
	e.Name = d.Opaque(MaxName)
	if d.Err() == nil && !validName(e.Name) {
		d.Fail(errName)
	}
	e.Cookie = d.Uint64()
	if s.proc == ProcReadDirPlus {
		d.postOpAttr(&e.Attr)
		e.HasFH = d.postOpFH(&e.FH)
	}
	return d.Err() == nil
}

func validName(name []byte) bool {
	return len(name) > 0 && bytes.IndexByte(name, '/') < 0 && bytes.IndexByte(name, 0) < 0
}
