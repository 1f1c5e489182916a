package nfsd

import (
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// readLink handles READLINK (RFC 1813 §3.3.5).
func (c *call) readLink() error {
	if c.obj.kind != unix.S_IFLNK {
		return unix.EINVAL
	}
	var buf [nfs3.MaxPath]byte
	n, err := unix.Readlinkat(c.obj.path, "", buf[:])
	if err != nil {
		return err
	}
	c.appendPostOp(c.obj)
	c.out = sunrpc.AppendOpaque(c.out, buf[:n])
	return nil
}

// readHead is what stands between the status and the data of READ: attributes, count, eof, length.
const readHead = nfs3.SizePostOpAttr + 3*sunrpc.SizeUint32

// read handles READ (RFC 1813 §3.3.6). The data goes from the file to its place in the reply; the
// attributes, by which the permission is checked, are read behind it, and nothing of the data
// leaves when the check fails.
func (c *call) read() error {
	if err := c.notRegular(); err != nil {
		return err
	}
	at := len(c.out)
	room := c.limit - at - readHead - sunrpc.SizeUint32 // the pad
	count := max(0, min(int(min(c.args.Count, MaxIO)), room))
	if need := at + readHead + sunrpc.Pad4(count); need > cap(c.out) {
		c.out = append(make([]byte, 0, need), c.out...)
	}
	data := c.out[at+readHead : at+readHead+count]
	n := 0
	if c.args.Offset <= 1<<63-1-MaxIO && count > 0 { // else it is behind the end of every file
		fd, err := c.obj.reader()
		if err != nil {
			return err
		}
		if n, err = c.readData(fd, data, int64(c.args.Offset)); err != nil {
			return err
		}
		c.between("")
	}
	var st unix.Stat_t
	if err := c.obj.stat(&st); err != nil {
		return err
	}
	if err := c.permitData(c.obj, &st, permRead); err != nil {
		return err
	}
	a := c.attrOf(&st)
	// The file may have grown since it was read. A client treats a reply of no bytes without eof as
	// an error.
	eof := n == 0 && count > 0 || c.args.Offset >= a.Size || c.args.Offset+uint64(n) >= a.Size
	b := nfs3.AppendPostOpAttr(c.out, &a)
	b = sunrpc.AppendUint32(b, uint32(n))
	b = sunrpc.AppendBool(b, eof)
	b = sunrpc.AppendUint32(b, uint32(n))
	b = b[:len(b)+n]
	for len(b)%4 != at%4 {
		b = append(b, 0)
	}
	c.out = b
	return nil
}

// notRegular is the error of a READ, WRITE or COMMIT of what is not a regular file.
func (c *call) notRegular() error {
	switch c.obj.kind {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return unix.EISDIR
	}
	return unix.EINVAL
}

func (c *call) readData(fd int, data []byte, off int64) (int, error) {
	if !c.nowait {
		return readFull(fd, data, off)
	}
	n, err := readNow(fd, data, off)
	if err != nil || n < len(data) && n > 0 { // the rest may need the disk
		return 0, errNotNow
	}
	return n, nil
}

// write handles WRITE (RFC 1813 §3.3.7). It runs as the caller, so that the kernel clears set-id
// bits and applies quotas.
func (c *call) write() error {
	if err := c.notRegular(); err != nil {
		return err
	}
	data := c.args.Data
	if c.args.Offset > 1<<63-1-uint64(len(data)) {
		return unix.EFBIG
	}
	data = data[:min(len(data), MaxIO)]
	var st unix.Stat_t
	if err := c.begin(&c.w, c.obj); err != nil {
		return err
	}
	if err := c.obj.stat(&st); err != nil {
		return err
	}
	if err := c.permitData(c.obj, &st, permWrite); err != nil {
		return err
	}
	// The verifier is read first: when an fsync fails later, the client must see a change.
	verf, n := c.writeVerifier(), 0
	if len(data) > 0 {
		fd, err := c.obj.writer()
		if err != nil {
			return err
		}
		err = c.id.as(&c.who, func() (err error) {
			n, err = writeFull(fd, data, int64(c.args.Offset))
			return err
		})
		// Not before the write: an fsync in between does not cover the data.
		c.obj.dirty.Store(true)
		if err != nil {
			return err
		}
	}
	committed := nfs3.Unstable
	if c.args.Stable != nfs3.Unstable {
		if err := c.syncObject(c.obj); err != nil {
			return err
		}
		committed = nfs3.FileSync
	}
	c.appendWcc(&c.w, c.obj)
	c.out = sunrpc.AppendUint32(c.out, uint32(n))
	c.out = sunrpc.AppendUint32(c.out, uint32(committed))
	c.out = append(c.out, verf[:]...)
	return nil
}

// commit handles COMMIT (RFC 1813 §3.3.21). It syncs the whole file, whatever the range.
func (c *call) commit() error {
	if err := c.notRegular(); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := c.begin(&c.w, c.obj); err != nil {
		return err
	}
	if err := c.obj.stat(&st); err != nil {
		return err
	}
	if err := c.permitData(c.obj, &st, permWrite); err != nil {
		return err
	}
	if err := c.syncObject(c.obj); err != nil {
		return err
	}
	verf := c.writeVerifier()
	c.appendWcc(&c.w, c.obj)
	c.out = append(c.out, verf[:]...)
	return nil
}

// Values of FSINFO and PATHCONF.
const (
	ioUnit  = 4096
	dirPref = 64 << 10
)

// fsStat handles FSSTAT (RFC 1813 §3.3.18).
func (c *call) fsStat() error {
	var v unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(c.obj.path, &v) }); err != nil {
		return err
	}
	size := uint64(v.Frsize)
	c.appendPostOp(c.obj)
	c.out = nfs3.AppendFSStat(c.out, &nfs3.FSStatResult{TotalBytes: v.Blocks * size, FreeBytes: v.Bfree * size,
		AvailBytes: v.Bavail * size, TotalFiles: v.Files, FreeFiles: v.Ffree, AvailFiles: v.Ffree})
	return nil
}

// fsInfo handles FSINFO (RFC 1813 §3.3.19).
func (c *call) fsInfo() error {
	var v unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(c.obj.path, &v) }); err != nil {
		return err
	}
	c.appendPostOp(c.obj)
	c.out = nfs3.AppendFSInfo(c.out, &nfs3.FSInfoResult{ReadMax: MaxIO, ReadPref: MaxIO, ReadMult: ioUnit,
		WriteMax: MaxIO, WritePref: MaxIO, WriteMult: ioUnit, DirPref: dirPref, MaxFileSize: maxFileSize(&v),
		TimeDelta:  nfs3.Time3{Nsec: 1},
		Properties: nfs3.FSFLink | nfs3.FSFSymlink | nfs3.FSFHomogeneous | nfs3.FSFCanSetTime})
	return nil
}

// maxFileSize is the largest file that a file system keeps. ext4 counts blocks in 32 bits; the
// others reach the limit of Linux.
func maxFileSize(v *unix.Statfs_t) uint64 {
	if v.Type == unix.EXT4_SUPER_MAGIC {
		return (1<<32 - 1) * uint64(v.Bsize)
	}
	return 1<<63 - 1
}

// pathConf handles PATHCONF (RFC 1813 §3.3.20).
func (c *call) pathConf() error {
	var v unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(c.obj.path, &v) }); err != nil {
		return err
	}
	c.appendPostOp(c.obj)
	c.out = nfs3.AppendPathConf(c.out, &nfs3.PathConfResult{LinkMax: linkMax(&v), NameMax: uint32(v.Namelen),
		NoTrunc: true, ChownRestricted: true, CasePreserving: true})
	return nil
}

// linkMax is the most hard links of a file, as fpathconf(3) of glibc knows it.
func linkMax(v *unix.Statfs_t) uint32 {
	switch v.Type {
	case unix.EXT4_SUPER_MAGIC:
		return 65000
	case unix.BTRFS_SUPER_MAGIC:
		return 65535
	case unix.XFS_SUPER_MAGIC, unix.TMPFS_MAGIC:
		return 1<<31 - 1
	}
	return 127 // LINUX_LINK_MAX
}
