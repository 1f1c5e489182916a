package nfs3

import "context"

// calls makes a call of each procedure, and keeps the results.
type calls struct {
	ctx                context.Context
	buf                []byte // data of READLINK, READ and WRITE
	dirCount, maxCount uint32 // of READDIR and READDIRPLUS
	each               func(*DirEntry) bool

	set   SetAttr
	how   CreateHow
	guard Time3

	attr Attr
	wcc  WccData
	look LookupResult
	acc  AccessResult
	link ReadLinkResult
	rd   ReadResult
	wr   WriteResult
	made CreateResult
	ren  RenameResult
	lnk  LinkResult
	dir  ReadDirResult
	stat FSStatResult
	info FSInfoResult
	conf PathConfResult
	com  CommitResult
}

func (x *calls) call(c *Client, p Proc) error {
	switch p {
	case ProcNull:
		return c.Null(x.ctx, cred)
	case ProcGetAttr:
		return c.GetAttr(x.ctx, cred, fh1, &x.attr)
	case ProcSetAttr:
		return c.SetAttr(x.ctx, cred, fh1, &x.set, &x.guard, &x.wcc)
	case ProcLookup:
		return c.Lookup(x.ctx, cred, fh1, "n", &x.look)
	case ProcAccess:
		return c.Access(x.ctx, cred, fh1, 0x3f, &x.acc)
	case ProcReadLink:
		return c.ReadLink(x.ctx, cred, fh1, x.buf, &x.link)
	case ProcRead:
		return c.Read(x.ctx, cred, fh1, 0, x.buf, &x.rd)
	case ProcWrite:
		return c.Write(x.ctx, cred, fh1, 0, x.buf, FileSync, &x.wr)
	case ProcCreate:
		return c.Create(x.ctx, cred, fh1, "n", &x.how, &x.made)
	case ProcMkdir:
		return c.Mkdir(x.ctx, cred, fh1, "n", &x.set, &x.made)
	case ProcSymlink:
		return c.Symlink(x.ctx, cred, fh1, "n", "../some/where", &x.set, &x.made)
	case ProcMknod:
		return c.Mknod(x.ctx, cred, fh1, "n", NF3BLK, &x.set, Device{}, &x.made)
	case ProcRemove:
		return c.Remove(x.ctx, cred, fh1, "n", &x.wcc)
	case ProcRmdir:
		return c.Rmdir(x.ctx, cred, fh1, "n", &x.wcc)
	case ProcRename:
		return c.Rename(x.ctx, cred, fh1, "n", fh2, "m", &x.ren)
	case ProcLink:
		return c.Link(x.ctx, cred, fh1, fh2, "m", &x.lnk)
	case ProcReadDir:
		return c.ReadDir(x.ctx, cred, fh1, 0, verf1, x.dirCount, &x.dir, x.each)
	case ProcReadDirPlus:
		return c.ReadDirPlus(x.ctx, cred, fh1, 0, verf1, x.dirCount, x.maxCount, &x.dir, x.each)
	case ProcFSStat:
		return c.FSStat(x.ctx, cred, fh1, &x.stat)
	case ProcFSInfo:
		return c.FSInfo(x.ctx, cred, fh1, &x.info)
	case ProcPathConf:
		return c.PathConf(x.ctx, cred, fh1, &x.conf)
	case ProcCommit:
		return c.Commit(x.ctx, cred, fh1, 0, 0, &x.com)
	}
	panic(p)
}
