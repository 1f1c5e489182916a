package nfs3

import (
	"context"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Null makes a round trip without any effect (RFC 1813 §3.3.0).
func (c *Client) Null(ctx context.Context, cred []byte) error {
	s := c.begin(ProcNull, cred, MaxResultNull)
	defer c.end(s)
	return c.roundTrip(ctx, s)
}

// GetAttr reads the attributes of fh (RFC 1813 §3.3.1).
func (c *Client) GetAttr(ctx context.Context, cred []byte, fh FH, res *Attr) error {
	*res = Attr{}
	s := c.begin(ProcGetAttr, cred, MaxResultGetAttr)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	if s.status == OK {
		d.attr(res)
	}
	return s.finish(&d)
}

// SetAttr sets attributes of fh (RFC 1813 §3.3.2). With a guard, the server sets them only if the
// ctime of the object equals the guard. Otherwise the status is ErrNotSync.
func (c *Client) SetAttr(ctx context.Context, cred []byte, fh FH, set *SetAttr, guard *Time3, res *WccData) error {
	*res = WccData{}
	s := c.begin(ProcSetAttr, cred, MaxResultSetAttr)
	defer c.end(s)
	s.args = appendSetAttr(appendFH(s.args, &fh), set)
	s.args = sunrpc.AppendBool(s.args, guard != nil)
	if guard != nil {
		s.args = appendTime(s.args, *guard)
	}
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.wcc(res)
	return s.finish(&d)
}

// Lookup looks up name in dir (RFC 1813 §3.3.3).
func (c *Client) Lookup(ctx context.Context, cred []byte, dir FH, name string, res *LookupResult) error {
	*res = LookupResult{}
	s := c.begin(ProcLookup, cred, MaxResultLookup)
	defer c.end(s)
	if err := s.addDirOp(&dir, name); err != nil {
		return err
	}
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	if s.status == OK {
		d.fh(&res.FH)
		d.postOpAttr(&res.Attr)
	}
	d.postOpAttr(&res.DirAttr)
	return s.finish(&d)
}

// Access returns which of the Access bits in mask the server grants to cred (RFC 1813 §3.3.4).
func (c *Client) Access(ctx context.Context, cred []byte, fh FH, mask uint32, res *AccessResult) error {
	*res = AccessResult{}
	s := c.begin(ProcAccess, cred, MaxResultAccess)
	defer c.end(s)
	s.args = sunrpc.AppendUint32(appendFH(s.args, &fh), mask)
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	if s.status == OK {
		res.Access = d.Uint32() & mask
	}
	return s.finish(&d)
}

// FSStat reads the space and file counts of the file system of fh (RFC 1813 §3.3.18).
func (c *Client) FSStat(ctx context.Context, cred []byte, fh FH, res *FSStatResult) error {
	*res = FSStatResult{}
	s := c.begin(ProcFSStat, cred, MaxResultFSStat)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	if s.status == OK {
		res.TotalBytes, res.FreeBytes, res.AvailBytes = d.Uint64(), d.Uint64(), d.Uint64()
		res.TotalFiles, res.FreeFiles, res.AvailFiles = d.Uint64(), d.Uint64(), d.Uint64()
		res.InvarSec = d.Uint32()
	}
	return s.finish(&d)
}

// FSInfo reads the properties of the file system of fh (RFC 1813 §3.3.19). It does not check the
// sizes from the server: the caller must apply its own limits and must expect 0.
func (c *Client) FSInfo(ctx context.Context, cred []byte, fh FH, res *FSInfoResult) error {
	*res = FSInfoResult{}
	s := c.begin(ProcFSInfo, cred, MaxResultFSInfo)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	if s.status == OK {
		res.ReadMax, res.ReadPref, res.ReadMult = d.Uint32(), d.Uint32(), d.Uint32()
		res.WriteMax, res.WritePref, res.WriteMult = d.Uint32(), d.Uint32(), d.Uint32()
		res.DirPref = d.Uint32()
		res.MaxFileSize = d.Uint64()
		res.TimeDelta = d.time()
		res.Properties = d.Uint32()
	}
	return s.finish(&d)
}

// PathConf reads the POSIX limits of fh (RFC 1813 §3.3.20).
func (c *Client) PathConf(ctx context.Context, cred []byte, fh FH, res *PathConfResult) error {
	*res = PathConfResult{}
	s := c.begin(ProcPathConf, cred, MaxResultPathConf)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	if s.status == OK {
		res.LinkMax, res.NameMax = d.Uint32(), d.Uint32()
		res.NoTrunc, res.ChownRestricted = d.Bool(), d.Bool()
		res.CaseInsensitive, res.CasePreserving = d.Bool(), d.Bool()
	}
	return s.finish(&d)
}
