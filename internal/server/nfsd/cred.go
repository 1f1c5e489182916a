package nfsd

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// anonymous is the uid and gid of callers without a credential and of squashed root.
const anonymous = 65534

// badID is the uid and gid that no user has; setfsuid(2) ignores it.
const badID = ^uint32(0)

// A cred is the identity of a caller. It is comparable, so that permissions can be cached by it.
type cred struct {
	uid, gid uint32
	n        uint32
	gids     [sunrpc.MaxGIDs]uint32
}

// credOf returns the identity of a call. It squashes root unless keepRoot is set. ok is false where
// the credential cannot be used at all.
func credOf(h *sunrpc.CallHeader, keepRoot bool) (c cred, ok bool) {
	switch h.CredFlavor {
	case sunrpc.FlavorNone:
		return cred{uid: anonymous, gid: anonymous}, true
	case sunrpc.FlavorSys:
	default:
		return c, false
	}
	d := sunrpc.NewDecoder(h.Cred)
	d.Uint32() // stamp
	d.Opaque(sunrpc.MaxMachineName)
	c.uid, c.gid, c.n = d.Uint32(), d.Uint32(), d.Uint32()
	if c.n > sunrpc.MaxGIDs {
		return c, false
	}
	for i := range c.gids[:c.n] {
		c.gids[i] = d.Uint32()
	}
	if d.Err() != nil || d.Remaining() != 0 {
		return c, false
	}
	if !keepRoot {
		c.squash()
	}
	return c, true
}

// squash replaces uid 0 and every gid 0 by the anonymous ones.
func (c *cred) squash() {
	if c.uid == 0 {
		c.uid = anonymous
	}
	if c.gid == 0 {
		c.gid = anonymous
	}
	for i := range c.gids[:c.n] {
		if c.gids[i] == 0 {
			c.gids[i] = anonymous
		}
	}
}

// An identity switches threads between the server's own identity and that of callers.
type identity struct {
	switches bool // false: the server is not root and does everything as its own user
	uid      uint32
	gid      uint32
	groups   []uint32
	caps     capData
	noCaps   capData // caps without those that bypass permissions, quotas and reserved blocks
	stuck    bool    // the kernel does not permit changes of groups: only root's calls can run
}

type (
	capHeader struct {
		version uint32
		pid     int32
	}
	capData [2]struct{ effective, permitted, inheritable uint32 }
)

// callerCaps are the capabilities that a caller must not have, as in the kernel's CAP_NFSD_SET.
var callerCaps = []uint{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_FOWNER,
	unix.CAP_FSETID, unix.CAP_LINUX_IMMUTABLE, unix.CAP_MKNOD, unix.CAP_MAC_OVERRIDE, unix.CAP_SYS_RESOURCE}

// ownIdentity reads the identity of this process.
func ownIdentity() (*identity, error) {
	id := &identity{switches: os.Geteuid() == 0, uid: uint32(os.Geteuid()), gid: uint32(os.Getegid())}
	if !id.switches {
		return id, nil
	}
	groups, err := os.Getgroups()
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	for _, g := range groups {
		id.groups = append(id.groups, uint32(g))
	}
	hdr := capHeader{version: unix.LINUX_CAPABILITY_VERSION_3}
	if _, _, errno := unix.RawSyscall(unix.SYS_CAPGET, uintptr(unsafe.Pointer(&hdr)),
		uintptr(unsafe.Pointer(&id.caps[0])), 0); errno != 0 {
		return nil, fmt.Errorf("read capabilities: %w", errno)
	}
	id.noCaps = id.caps
	for _, c := range callerCaps {
		id.noCaps[c/32].effective &^= 1 << (c % 32)
	}
	runtime.LockOSThread()
	id.stuck = !setGroups(id.groups)
	runtime.UnlockOSThread()
	return id, nil
}

// canBe reports whether the kernel takes the whole identity of c.
func (id *identity) canBe(c *cred) bool { return id.as(c, func() error { return nil }) == nil }

// as runs f with the file system identity of c: fsuid, fsgid and supplementary groups, which Linux
// keeps per thread, and without the capabilities that bypass permissions when c is not root. It
// returns EACCES without running f when the kernel does not take the whole identity: uid
// 0xffffffff, ids outside the user namespace, no CAP_SETUID or CAP_SETGID.
func (id *identity) as(c *cred, f func() error) error {
	if !id.switches || c.uid == 0 && c.gid == 0 && id.uid == 0 && id.gid == 0 {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if c.uid == badID || c.gid == badID || id.stuck || !setGroups(c.gids[:c.n]) {
		return unix.EACCES
	}
	err := error(unix.EACCES)
	if id.assume(c) {
		err = f()
	}
	id.restore()
	return err
}

// assume sets what setGroups left.
func (id *identity) assume(c *cred) bool {
	setFSID(unix.SYS_SETFSGID, c.gid)
	setFSID(unix.SYS_SETFSUID, c.uid)
	if setFSID(unix.SYS_SETFSGID, badID) != c.gid || setFSID(unix.SYS_SETFSUID, badID) != c.uid {
		return false
	}
	return c.uid == 0 || setCaps(&id.noCaps)
}

// restore gives the thread its own identity back. The effective uid is 0 all the time, so the
// kernel permits each step; a thread that cannot go back must not run anything else.
func (id *identity) restore() {
	setFSID(unix.SYS_SETFSUID, id.uid)
	setFSID(unix.SYS_SETFSGID, id.gid)
	if !setCaps(&id.caps) || !setGroups(id.groups) ||
		setFSID(unix.SYS_SETFSUID, badID) != id.uid || setFSID(unix.SYS_SETFSGID, badID) != id.gid {
		panic("nfsd: cannot restore the identity of the server on this thread")
	}
}

// setFSID sets the fsuid or fsgid of this thread and returns the one before. badID sets nothing.
func setFSID(call uintptr, v uint32) uint32 {
	before, _, _ := unix.RawSyscall(call, uintptr(v), 0, 0)
	return uint32(before)
}

// setGroups sets the groups of this thread. The syscall package would set those of every thread.
func setGroups(gids []uint32) bool {
	var p unsafe.Pointer
	if len(gids) > 0 {
		p = unsafe.Pointer(&gids[0])
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(gids)), uintptr(p), 0)
	return errno == 0
}

// setCaps sets the capabilities of this thread.
func setCaps(caps *capData) bool {
	hdr := capHeader{version: unix.LINUX_CAPABILITY_VERSION_3}
	_, _, errno := unix.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&caps[0])), 0)
	return errno == 0
}
