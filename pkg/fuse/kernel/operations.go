package kernel

// An Op is an operation of the FUSE protocol. Its number is the opcode (include/uapi/linux/fuse.h).
type Op uint32

// The operations that this package knows. The kernel gets ENOSYS for others.
const (
	OpLookup      Op = 1
	OpForget      Op = 2
	OpGetAttr     Op = 3
	OpSetAttr     Op = 4
	OpReadlink    Op = 5
	OpSymlink     Op = 6
	OpMknod       Op = 8
	OpMkdir       Op = 9
	OpUnlink      Op = 10
	OpRmdir       Op = 11
	OpRename      Op = 12
	OpLink        Op = 13
	OpOpen        Op = 14
	OpRead        Op = 15
	OpWrite       Op = 16
	OpStatFs      Op = 17
	OpRelease     Op = 18
	OpFsync       Op = 20
	OpSetXAttr    Op = 21
	OpGetXAttr    Op = 22
	OpListXAttr   Op = 23
	OpRemoveXAttr Op = 24
	OpFlush       Op = 25
	OpInit        Op = 26
	OpOpenDir     Op = 27
	OpReadDir     Op = 28
	OpReleaseDir  Op = 29
	OpFsyncDir    Op = 30
	OpGetLk       Op = 31
	OpSetLk       Op = 32
	OpSetLkw      Op = 33
	OpAccess      Op = 34
	OpCreate      Op = 35
	OpInterrupt   Op = 36
	OpDestroy     Op = 38
	OpBatchForget Op = 42
	OpReadDirPlus Op = 44
	OpRename2     Op = 45
	// NumOps is larger than the number of each operation.
	NumOps Op = 46
)

var opNames = [NumOps]string{
	OpLookup: "lookup", OpForget: "forget", OpBatchForget: "forget", OpGetAttr: "getattr", OpSetAttr: "setattr",
	OpReadlink: "readlink", OpSymlink: "symlink", OpMknod: "mknod", OpMkdir: "mkdir", OpUnlink: "unlink",
	OpRmdir: "rmdir", OpRename: "rename", OpRename2: "rename", OpLink: "link", OpOpen: "open",
	OpCreate: "create", OpRead: "read", OpWrite: "write", OpFlush: "flush", OpFsync: "fsync",
	OpRelease: "release", OpOpenDir: "opendir", OpReadDir: "readdir", OpReadDirPlus: "readdirplus",
	OpFsyncDir: "fsyncdir", OpReleaseDir: "releasedir", OpStatFs: "statfs", OpAccess: "access",
	OpGetXAttr: "getxattr", OpListXAttr: "listxattr", OpSetXAttr: "setxattr", OpRemoveXAttr: "removexattr",
	OpGetLk: "getlk", OpSetLk: "setlk", OpSetLkw: "setlkw", OpInterrupt: "interrupt",
}

// String returns the name of an operation.
func (o Op) String() string {
	if o < NumOps && opNames[o] != "" {
		return opNames[o]
	}
	return "unknown"
}
