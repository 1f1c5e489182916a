package nfs3

import (
	"context"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Create creates the regular file name in dir (RFC 1813 §3.3.8).
func (c *Client) Create(ctx context.Context, cred []byte, dir FH, name string, how *CreateHow,
	res *CreateResult) error {
	*res = CreateResult{}
	s := c.begin(ProcCreate, cred, MaxResultCreate)
	defer c.end(s)
	if err := s.addDirOp(&dir, name); err != nil {
		return err
	}
	s.args = sunrpc.AppendUint32(s.args, uint32(how.Mode))
	switch how.Mode {
	case Unchecked, Guarded:
		s.args = appendSetAttr(s.args, &how.Attr)
	case Exclusive:
		s.args = sunrpc.AppendFixed(s.args, how.Verf[:])
	default:
		return s.refuse(ErrInval, "create mode is not UNCHECKED, GUARDED or EXCLUSIVE")
	}
	return c.created(ctx, s, res)
}

// Mkdir creates the directory name in dir (RFC 1813 §3.3.9).
func (c *Client) Mkdir(ctx context.Context, cred []byte, dir FH, name string, set *SetAttr, res *CreateResult) error {
	*res = CreateResult{}
	s := c.begin(ProcMkdir, cred, MaxResultCreate)
	defer c.end(s)
	if err := s.addDirOp(&dir, name); err != nil {
		return err
	}
	s.args = appendSetAttr(s.args, set)
	return c.created(ctx, s, res)
}

// Symlink creates the symbolic link name in dir, which points to target (RFC 1813 §3.3.10). The
// target has 1 to [MaxPath] bytes without NUL.
func (c *Client) Symlink(ctx context.Context, cred []byte, dir FH, name, target string, set *SetAttr,
	res *CreateResult) error {
	*res = CreateResult{}
	s := c.begin(ProcSymlink, cred, MaxResultCreate)
	defer c.end(s)
	if err := s.addDirOp(&dir, name); err != nil {
		return err
	}
	switch {
	case len(target) > MaxPath:
		return s.refuse(ErrNameTooLong, "target is longer than 4096 bytes")
	case target == "" || strings.IndexByte(target, 0) >= 0:
		return s.refuse(ErrInval, "target is empty or contains NUL")
	}
	s.args = appendSetAttr(s.args, set)
	s.args = sunrpc.AppendUint32(s.args, uint32(len(target)))
	s.path = append(s.path[:0], target...)
	s.msg.ArgData = s.path
	return c.created(ctx, s, res)
}

// Mknod creates the special file name in dir (RFC 1813 §3.3.11): a device with the numbers in dev,
// a socket, or a named pipe.
func (c *Client) Mknod(ctx context.Context, cred []byte, dir FH, name string, typ FileType, set *SetAttr, dev Device,
	res *CreateResult) error {
	*res = CreateResult{}
	s := c.begin(ProcMknod, cred, MaxResultCreate)
	defer c.end(s)
	if err := s.addDirOp(&dir, name); err != nil {
		return err
	}
	s.args = sunrpc.AppendUint32(s.args, uint32(typ))
	switch typ {
	case NF3CHR, NF3BLK:
		s.args = appendSetAttr(s.args, set)
		s.args = sunrpc.AppendUint32(sunrpc.AppendUint32(s.args, dev.Major), dev.Minor)
	case NF3SOCK, NF3FIFO:
		s.args = appendSetAttr(s.args, set)
	default:
		return s.refuse(ErrBadType, "MKNOD cannot create a "+typ.String())
	}
	return c.created(ctx, s, res)
}

// created makes the call in s and decodes the results of CREATE, MKDIR, SYMLINK and MKNOD.
func (c *Client) created(ctx context.Context, s *scratch, res *CreateResult) error {
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	if s.status == OK {
		res.HasFH = d.postOpFH(&res.FH)
		d.postOpAttr(&res.Attr)
	}
	d.wcc(&res.DirChange)
	return s.finish(&d)
}

// Remove removes name, which is not a directory, from dir (RFC 1813 §3.3.12). res describes dir.
func (c *Client) Remove(ctx context.Context, cred []byte, dir FH, name string, res *WccData) error {
	return c.removeName(ctx, ProcRemove, cred, &dir, name, res)
}

// Rmdir removes the directory name from dir (RFC 1813 §3.3.13). res describes dir.
func (c *Client) Rmdir(ctx context.Context, cred []byte, dir FH, name string, res *WccData) error {
	return c.removeName(ctx, ProcRmdir, cred, &dir, name, res)
}

func (c *Client) removeName(ctx context.Context, p Proc, cred []byte, dir *FH, name string, res *WccData) error {
	*res = WccData{}
	s := c.begin(p, cred, MaxResultRemove)
	defer c.end(s)
	if err := s.addDirOp(dir, name); err != nil {
		return err
	}
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.wcc(res)
	return s.finish(&d)
}

// Rename renames fromName in fromDir to toName in toDir and replaces an existing toName (RFC 1813
// §3.3.14).
func (c *Client) Rename(ctx context.Context, cred []byte, fromDir FH, fromName string, toDir FH, toName string,
	res *RenameResult) error {
	*res = RenameResult{}
	s := c.begin(ProcRename, cred, MaxResultRename)
	defer c.end(s)
	if err := s.addDirOp(&fromDir, fromName); err != nil {
		return err
	}
	if err := s.addDirOp(&toDir, toName); err != nil {
		return err
	}
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.wcc(&res.From)
	d.wcc(&res.To)
	return s.finish(&d)
}

// Link creates name in dir as a hard link to fh (RFC 1813 §3.3.15).
func (c *Client) Link(ctx context.Context, cred []byte, fh, dir FH, name string, res *LinkResult) error {
	*res = LinkResult{}
	s := c.begin(ProcLink, cred, MaxResultLink)
	defer c.end(s)
	s.args = appendFH(s.args, &fh)
	if err := s.addDirOp(&dir, name); err != nil {
		return err
	}
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	d.postOpAttr(&res.Attr)
	d.wcc(&res.DirChange)
	return s.finish(&d)
}
