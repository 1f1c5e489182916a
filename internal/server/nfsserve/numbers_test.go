package nfsserve

import (
	"os"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// Numbers of the protocols beside NFS (RFC 1813 §5, RFC 1833 §3).
const (
	versMount    = 3
	mountNull    = 0
	mountMnt     = 1
	mountDump    = 2
	mountUmntAll = 4
	mountExport  = 5

	pmapGetPort = 3
	ipprotoTCP  = 6
)

// Names that the tests share with the results of raw calls.
const (
	stOK     = uint32(nfs3.OK)
	stNoEnt  = uint32(nfs3.ErrNoEnt)
	stNotDir = uint32(nfs3.ErrNotDir)
	stInval  = uint32(nfs3.ErrInval)

	ioSize = nfsd.MaxIO
	fattr  = nfs3.SizeAttr
)

func ownerOf(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }
