package nfsserve

import (
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// nobody is who a call without an AUTH_SYS credential runs as.
const nobody = 65534

// cred is on whose behalf a call runs.
type cred struct {
	uid, gid uint32
	gids     []uint32
}

func credOf(h *sunrpc.CallHeader) cred {
	if h.CredFlavor == sunrpc.FlavorSys {
		if a, err := sunrpc.ParseAuthSys(h.Cred); err == nil {
			return cred{uid: a.UID, gid: a.GID, gids: a.GIDs}
		}
	}
	return cred{uid: nobody, gid: nobody}
}

var amRoot = os.Geteuid() == 0

// as runs f with the file system identity of c: fsuid, fsgid and supplementary groups, which Linux
// keeps per thread. Without root's rights f runs as the server's own user.
func (c *cred) as(f func() error) error {
	if !amRoot || (c.uid == 0 && c.gid == 0 && len(c.gids) == 0) {
		return f()
	}
	runtime.LockOSThread()
	if !setGroups(c.gids) {
		runtime.UnlockOSThread()
		return os.ErrPermission
	}
	unix.SetfsgidRetGid(int(c.gid))
	unix.SetfsuidRetUid(int(c.uid))
	err := f()
	unix.SetfsuidRetUid(0)
	unix.SetfsgidRetGid(0)
	if setGroups(ownGroups) {
		// else the thread ends with its goroutine, and no other inherits the groups
		runtime.UnlockOSThread()
	}
	return err
}

var ownGroups = func() (gids []uint32) {
	list, _ := unix.Getgroups()
	for _, g := range list {
		gids = append(gids, uint32(g))
	}
	return gids
}()

// setGroups sets this thread's groups. The syscall package would set those of every thread.
func setGroups(gids []uint32) bool {
	var p unsafe.Pointer
	if len(gids) > 0 {
		p = unsafe.Pointer(&gids[0])
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(gids)), uintptr(p), 0)
	return errno == 0
}

// Permission bits of one class, as in a mode and as access(2) names them.
const (
	permRead  = 4
	permWrite = 2
	permExec  = 1
)

// allowed gives the class of permission bits that c has on an object.
func (c *cred) allowed(mode os.FileMode, uid, gid uint32) uint32 {
	bits := uint32(mode.Perm())
	switch {
	case c.uid == 0:
		if bits&0o111 != 0 || mode.IsDir() {
			return permRead | permWrite | permExec
		}
		return permRead | permWrite
	case c.uid == uid:
		return bits >> 6 & 7
	case c.gid == gid || slices.Contains(c.gids, gid):
		return bits >> 3 & 7
	}
	return bits & 7
}
