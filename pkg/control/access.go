package control

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"net/http"
	"os"
	"os/user"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Group is a group of users that may use list, status and stats, which also show the processes
// and users that use the mounts. The zero Group is none.
type Group struct {
	name string // as configured; "" for none
	gid  uint32
}

// LookupGroup returns the group with a name or a decimal group ID, and the zero Group for "".
func LookupGroup(name string) (Group, error) {
	if name == "" {
		return Group{}, nil
	}
	if gid, err := strconv.ParseUint(name, 10, 32); err == nil && gid != math.MaxUint32 {
		return Group{name, uint32(gid)}, nil
	}
	g, err := user.LookupGroup(name)
	var unknown user.UnknownGroupError
	switch {
	case errors.As(err, &unknown):
		return Group{}, Errorf(CodeUsage, "unknown group %q; create it with groupadd, or correct the name", name)
	case err != nil:
		return Group{}, Errorf(CodeSystem, "look up group %q: %w", name, err)
	}
	gid, err := strconv.ParseUint(g.Gid, 10, 32)
	if err != nil {
		return Group{}, Errorf(CodeSystem, "look up group %q: group ID %q: %w", name, g.Gid, err)
	}
	return Group{name, uint32(gid)}, nil
}

// Entries of a POSIX ACL in an extended attribute (linux/posix_acl_xattr.h, linux/posix_acl.h).
const (
	aclAttribute = "system.posix_acl_access"
	aclVersion   = 2
	aclUserObj   = 0x01
	aclGroupObj  = 0x04
	aclGroup     = 0x08
	aclMask      = 0x10
	aclOther     = 0x20
	aclReadWrite = 6
	aclNoID      = math.MaxUint32
)

// admit lets the members of g connect to the socket at path. An ACL needs no capability; a change
// of the group of the file would need CAP_CHOWN.
func (g Group) admit(path string) error {
	if g.name == "" {
		return nil
	}
	acl := binary.LittleEndian.AppendUint32(nil, aclVersion)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{aclUserObj, aclReadWrite, aclNoID}, {aclGroupObj, 0, aclNoID}, {aclGroup, aclReadWrite, g.gid},
		{aclMask, aclReadWrite, aclNoID}, {aclOther, 0, aclNoID}} {
		acl = binary.LittleEndian.AppendUint16(acl, e.tag)
		acl = binary.LittleEndian.AppendUint16(acl, e.perm)
		acl = binary.LittleEndian.AppendUint32(acl, e.id)
	}
	if err := unix.Lsetxattr(path, aclAttribute, acl, 0); err != nil {
		return Errorf(CodeSystem, "control socket %s: set ACL for group %s: %w; choose a file system with ACLs for "+
			"--control-socket, or unset control_group", path, g.name, err)
	}
	return nil
}

// A peer is the process at the other end of a connection, with its credentials at the time of
// connect(2).
type peer struct {
	pid    int
	uid    uint32
	groups []uint32 // of the process, the effective group ID included
}

// maxPeerGroups is NGROUPS_MAX (linux/limits.h).
const maxPeerGroups = 65536

// peerOf returns the peer of a connection to a unix socket (SO_PEERCRED and SO_PEERGROUPS,
// unix(7)).
func peerOf(c net.Conn) (p peer, err error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return p, errors.New("not a unix socket")
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return p, err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		p = peer{pid: int(cred.Pid), uid: cred.Uid, groups: []uint32{cred.Gid}}
		// Without supplementary groups the peer has fewer rights, never more.
		p.groups = append(p.groups, peerGroups(fd)...)
	})
	return p, errors.Join(ctlErr, err)
}

// peerGroups returns the supplementary groups of the peer of the socket fd. It returns none before
// Linux 4.13.
func peerGroups(fd uintptr) []uint32 {
	groups := make([]uint32, 32)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch n := int(size / 4); {
		case errno == 0:
			return groups[:n]
		case errno == unix.ERANGE && n > len(groups) && n <= maxPeerGroups: // size is the size needed
			groups = make([]uint32, n)
		default:
			return nil
		}
	}
}

// connKey is the context key of the *peerConn of a request.
type connKey struct{}

// withConn adds the connection to the context of its requests.
func withConn(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*peerConn); ok {
		return context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}

// connOf returns the connection of a request.
func connOf(r *http.Request) (*peerConn, bool) {
	c, ok := r.Context().Value(connKey{}).(*peerConn)
	return c, ok
}

// An access decides which peers may use a verb of the control API. Root and the user of the daemon
// may use every verb.
type access struct {
	group Group // may use the verbs that only read
}

// forOwner serves a verb to root and to the user of the daemon.
func (a access) forOwner(verb string, next http.Handler) http.Handler {
	return a.check(verb, next, func(peer) bool { return false }, "")
}

// forGroup serves a verb to the group too.
func (a access) forGroup(verb string, next http.Handler) http.Handler {
	hint := ", or let the administrator set control_group"
	if a.group.name != "" {
		hint = ", or become a member of the group " + a.group.name
	}
	return a.check(verb, next, func(p peer) bool {
		return a.group.name != "" && slices.Contains(p.groups, a.group.gid)
	}, hint)
}

func (a access) check(verb string, next http.Handler, also func(peer) bool, hint string) http.Handler {
	who := "root"
	if os.Geteuid() != 0 {
		who = "root or as the user of the daemon"
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, known := connOf(r)
		switch {
		case !known:
			writeError(w, Errorf(CodePermission, "control: %s: permission denied; the credentials of the client are "+
				"unknown", verb))
		case c.refused != nil:
			w.Header().Set("Connection", "close")
			writeError(w, Errorf(CodeSystem, "control: %s: %w", verb, c.refused))
		case isOwner(c.peer.uid):
			next.ServeHTTP(w, r)
		case also(c.peer):
			next.ServeHTTP(w, r.WithContext(AsGroup(r.Context())))
		default:
			writeError(w, Errorf(CodePermission, "control: %s: permission denied to uid %d; run as %s%s", verb,
				c.peer.uid, who, hint))
		}
	})
}

// readerKey is the context key that marks requests of the group.
type readerKey struct{}

// AsGroup returns a context for which FromGroup returns true.
func AsGroup(ctx context.Context) context.Context { return context.WithValue(ctx, readerKey{}, true) }

// FromGroup reports whether a request comes from a member of the group who is neither root nor the
// user of the daemon. The daemon must not access files for such a request: it can do more than the
// member, and a file system that hangs would hold a thread.
func FromGroup(ctx context.Context) bool { return ctx.Value(readerKey{}) != nil }

func newAccess(g Group) access { return access{group: g} }
