package nfs3

import (
	"context"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A Server is a Client as an nfs.Server. NFSv3 has no open files: Open asks for rights.
type Server struct{ c *Client }

var _ nfs.Server = Server{}

// NewServer returns the Server of a Client.
func NewServer(c *Client) Server { return Server{c} }

// GetAttr is GETATTR.
func (s Server) GetAttr(ctx context.Context, cred []byte, fh FH) (res Attr, err error) {
	err = s.c.GetAttr(ctx, cred, fh, &res)
	return res, err
}

// SetAttr is SETATTR without a guard.
func (s Server) SetAttr(ctx context.Context, cred []byte, fh FH, set SetAttr) (res WccData, err error) {
	err = s.c.SetAttr(ctx, cred, fh, &set, nil, &res)
	return res, err
}

// Lookup is LOOKUP.
func (s Server) Lookup(ctx context.Context, cred []byte, dir FH, name string) (res LookupResult, err error) {
	err = s.c.Lookup(ctx, cred, dir, name, &res)
	return res, err
}

// Access is ACCESS.
func (s Server) Access(ctx context.Context, cred []byte, fh FH, mask uint32) (res AccessResult, err error) {
	err = s.c.Access(ctx, cred, fh, mask, &res)
	return res, err
}

// ReadLink is READLINK.
func (s Server) ReadLink(ctx context.Context, cred []byte, fh FH, buf []byte) (res ReadLinkResult, err error) {
	err = s.c.ReadLink(ctx, cred, fh, buf, &res)
	return res, err
}

// Open is ACCESS.
func (s Server) Open(ctx context.Context, cred []byte, fh FH, mask uint32) (res nfs.OpenResult, err error) {
	err = s.c.Access(ctx, cred, fh, mask, &res.AccessResult)
	return res, err
}

// Read is READ.
func (s Server) Read(ctx context.Context, cred []byte, fh FH, _ nfs.OpenState, off uint64,
	pieces [][]byte) (res ReadResult, err error) {
	err = s.c.ReadPieces(ctx, cred, fh, off, pieces, &res)
	return res, err
}

// Write is WRITE.
func (s Server) Write(ctx context.Context, cred []byte, fh FH, _ nfs.OpenState, off uint64, data []byte,
	stable StableHow) (res WriteResult, err error) {
	err = s.c.Write(ctx, cred, fh, off, data, stable, &res)
	return res, err
}

// Commit is COMMIT.
func (s Server) Commit(ctx context.Context, cred []byte, fh FH, off uint64, count uint32) (res CommitResult,
	err error) {
	err = s.c.Commit(ctx, cred, fh, off, count, &res)
	return res, err
}

// Create is CREATE.
func (s Server) Create(ctx context.Context, cred []byte, dir FH, name string, how CreateHow) (res CreateResult,
	err error) {
	err = s.c.Create(ctx, cred, dir, name, &how, &res)
	return res, err
}

// Mkdir is MKDIR.
func (s Server) Mkdir(ctx context.Context, cred []byte, dir FH, name string, set SetAttr) (res CreateResult,
	err error) {
	err = s.c.Mkdir(ctx, cred, dir, name, &set, &res)
	return res, err
}

// Symlink is SYMLINK.
func (s Server) Symlink(ctx context.Context, cred []byte, dir FH, name, target string, set SetAttr) (res CreateResult,
	err error) {
	err = s.c.Symlink(ctx, cred, dir, name, target, &set, &res)
	return res, err
}

// Mknod is MKNOD.
func (s Server) Mknod(ctx context.Context, cred []byte, dir FH, name string, typ FileType, set SetAttr,
	dev Device) (res CreateResult, err error) {
	err = s.c.Mknod(ctx, cred, dir, name, typ, &set, dev, &res)
	return res, err
}

// Remove is REMOVE.
func (s Server) Remove(ctx context.Context, cred []byte, dir FH, name string) (res WccData, err error) {
	err = s.c.Remove(ctx, cred, dir, name, &res)
	return res, err
}

// Rmdir is RMDIR.
func (s Server) Rmdir(ctx context.Context, cred []byte, dir FH, name string) (res WccData, err error) {
	err = s.c.Rmdir(ctx, cred, dir, name, &res)
	return res, err
}

// Rename is RENAME.
func (s Server) Rename(ctx context.Context, cred []byte, fromDir FH, fromName string, toDir FH,
	toName string) (res RenameResult, err error) {
	err = s.c.Rename(ctx, cred, fromDir, fromName, toDir, toName, &res)
	return res, err
}

// Link is LINK.
func (s Server) Link(ctx context.Context, cred []byte, fh, dir FH, name string) (res LinkResult, err error) {
	err = s.c.Link(ctx, cred, fh, dir, name, &res)
	return res, err
}

// FSStat is FSSTAT.
func (s Server) FSStat(ctx context.Context, cred []byte, fh FH) (res FSStatResult, err error) {
	err = s.c.FSStat(ctx, cred, fh, &res)
	return res, err
}

// FSInfo is FSINFO.
func (s Server) FSInfo(ctx context.Context, cred []byte, fh FH) (res FSInfoResult, err error) {
	err = s.c.FSInfo(ctx, cred, fh, &res)
	return res, err
}

// Close does nothing.
func (Server) Close(context.Context, []byte, FH, nfs.OpenState) error { return nil }

// ReadDir is READDIRPLUS with plus, else READDIR.
func (s Server) ReadDir(ctx context.Context, cred []byte, dir FH, cookie uint64, verf Verifier, count uint32,
	plus bool, each func(*DirEntry) bool) (res ReadDirResult, err error) {
	if plus {
		err = s.c.ReadDirPlus(ctx, cred, dir, cookie, verf, count, count, &res, each)
	} else {
		err = s.c.ReadDir(ctx, cred, dir, cookie, verf, count, &res, each)
	}
	return res, err
}
