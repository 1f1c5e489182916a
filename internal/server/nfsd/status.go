package nfsd

import (
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// statusOf maps an error number to a status of RFC 1813 §2.6. Numbers that have no status become
// NFS3ERR_IO.
func statusOf(err error) nfs3.Status {
	if err == nil {
		return nfs3.OK
	}
	switch errno := errnoOf(err); errno {
	case unix.EPERM, unix.ENOENT, unix.EIO, unix.ENXIO, unix.EACCES, unix.EEXIST, unix.EXDEV, unix.ENODEV,
		unix.ENOTDIR, unix.EISDIR, unix.EINVAL, unix.EFBIG, unix.ENOSPC, unix.EROFS, unix.EMLINK:
		return nfs3.Status(errno) // Linux has the same numbers
	case unix.ETXTBSY, unix.EBUSY: // a mount point; a client would repeat the call forever
		return nfs3.ErrAcces
	case unix.EOVERFLOW:
		return nfs3.ErrFBig
	case unix.ENAMETOOLONG:
		return nfs3.ErrNameTooLong
	case unix.ENOTEMPTY:
		return nfs3.ErrNotEmpty
	case unix.EDQUOT:
		return nfs3.ErrDQuot
	case unix.ESTALE:
		return nfs3.ErrStale
	case unix.ELOOP: // a symbolic link where a file or directory is needed
		return nfs3.ErrInval
	case unix.EOPNOTSUPP, unix.ENOSYS:
		return nfs3.ErrNotSupp
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EAGAIN:
		return nfs3.ErrJukebox // the client tries again later
	}
	return nfs3.ErrIO
}
