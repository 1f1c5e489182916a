package nfs3

import (
	"context"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Create makes the regular file name in dir (RFC 1813 §3.3.8).
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
		return s.refuse(ErrInval, "the create mode is none of UNCHECKED, GUARDED, EXCLUSIVE")
	}
	return c.created(ctx, s, res)
}

// Mkdir makes the directory name in dir (RFC 1813 §3.3.9).
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

// Symlink makes the symbolic link name in dir, which points to target, 1 to [MaxPath] octets
// without NUL (RFC 1813 §3.3.10).
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
		return s.refuse(ErrNameTooLong, "a link's target has at most 4096 octets")
	case target == "" || strings.IndexByte(target, 0) >= 0:
		return s.refuse(ErrInval, "a link's target is not empty and holds no NUL")
	}
	s.args = appendSetAttr(s.args, set)
	s.args = sunrpc.AppendUint32(s.args, uint32(len(target)))
	s.path = append(s.path[:0], target...)
	s.msg.ArgData = s.path
	return c.created(ctx, s, res)
}

// Mknod makes the special file name in dir (RFC 1813 §3.3.11): a device of the given numbers, a
// socket, or a named pipe.
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
		return s.refuse(ErrBadType, "MKNOD makes devices, sockets and named pipes, not a "+typ.String())
	}
	return c.created(ctx, s, res)
}

// created makes the call in s and reads the results that the four procedures above share.
func (c *Client) created(ctx context.Context, s *scratch, res *CreateResult) error {
	d, err := c.call(ctx, s)
	if err != nil {
		return err
	}
	if s.status == OK {
		res.HasFH = d.postOpFH(&res.FH)
		d.postOpAttr(&res.Attr)
	}
	d.wcc(&res.DirWcc)
	return s.finish(&d)
}

// Remove removes name, not a directory, from dir (RFC 1813 §3.3.12). res is about dir.
func (c *Client) Remove(ctx context.Context, cred []byte, dir FH, name string, res *WccData) error {
	return c.removeName(ctx, ProcRemove, cred, &dir, name, res)
}

// Rmdir removes the directory name from dir (RFC 1813 §3.3.13). res is about dir.
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

// Rename moves fromName of fromDir to toName of toDir, which it replaces if it exists (RFC 1813
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

// Link makes name in dir a hard link to fh (RFC 1813 §3.3.15).
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
	d.wcc(&res.DirWcc)
	return s.finish(&d)
}
