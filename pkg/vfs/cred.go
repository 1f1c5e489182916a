package vfs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const (
	// groupsAge is how long the groups of a process stay cached. A setgroups(2) takes effect after
	// this time.
	groupsAge = 500 * time.Millisecond
	// maxCallers and maxCredentials bound the two caches. A full cache is cleared; refilling it is
	// cheap.
	maxCallers     = 4096
	maxCredentials = 1024
	// groupsWarnPause is the shortest time between two warnings of one kind.
	groupsWarnPause = time.Minute
)

// credentials makes AUTH_SYS credentials (RFC 5531 appendix A) for callers. The kernel supplies uid
// and gid; /proc supplies the supplementary groups. Each encoding is made once, shared, and never
// modified.
//
// A credential never has a group that the caller lacks. When the groups cannot be read, the
// credential has none, because an error would break processes that exit and callers in other PID
// namespaces. Such a caller may get EACCES from the server. When the caller has more groups than
// AUTH_SYS allows, the credential has the first 16 in the kernel's order, as that of Linux's NFS
// client. Both cases are counted, and logged once a minute.
//
// The kernel identifies a thread by its number. The number stays in use while the thread waits for
// the reply to a request. A cached entry can outlive its thread: for at most groupsAge, a new
// thread with the same number, uid and gid may get the groups of the old one.
type credentials struct {
	machine  string
	guest    bool // callers are in a virtual machine: their groups are unknown
	counters *Counters
	log      warner

	unknownLimit, cutLimit pace.Limiter // of warnings about unknown groups, and about too many

	mu      sync.Mutex
	callers map[callerKey]caller
	encoded map[string][]byte // by the encoding of uid, gid and groups
}

type callerKey struct{ pid, uid, gid uint32 }

type caller struct {
	cred    []byte
	expires time.Time
}

// newCredentials returns credentials that count in counters.
func newCredentials(counters *Counters, log warner) *credentials {
	machine, err := os.Hostname()
	if err != nil {
		machine = "localhost"
	}
	return &credentials{machine: machine, counters: counters, log: log, callers: make(map[callerKey]caller),
		encoded: make(map[string][]byte), unknownLimit: pace.Limiter{Pause: groupsWarnPause},
		cutLimit: pace.Limiter{Pause: groupsWarnPause}}
}

// of returns the credential of a caller.
func (c *credentials) of(uid, gid, pid uint32) []byte {
	if c.guest {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.encode(uid, gid, nil)
	}
	key := callerKey{pid, uid, gid}
	now := time.Now()
	c.mu.Lock()
	known, ok := c.callers[key]
	c.mu.Unlock()
	if ok && now.Before(known.expires) {
		return known.cred
	}

	var array [sunrpc.MaxGIDs]uint32
	groups, more, err := processGroups(pid, uid, gid, array[:0])
	switch {
	case err != nil:
		groups = nil
		c.counters.GroupsUnknown.Add(1)
		c.unknownLimit.Log(c.log.Warn, "groups of a process are unknown; its calls have none", "pid", pid, "uid", uid,
			"error", err)
	case more > 0:
		c.counters.GroupsCut.Add(1)
		c.cutLimit.Log(c.log.Warn, "process has too many groups for AUTH_SYS; its calls have the first 16", "pid", pid,
			"uid", uid, "groups", len(groups)+more)
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	cred := c.encode(uid, gid, groups)
	if len(c.callers) >= maxCallers {
		clear(c.callers)
	}
	c.callers[key] = caller{cred, now.Add(groupsAge)}
	return cred
}

// encode returns the encoded credential. The caller holds mu.
func (c *credentials) encode(uid, gid uint32, groups []uint32) []byte {
	var keyArray [(2 + sunrpc.MaxGIDs) * 4]byte
	key := binary.BigEndian.AppendUint32(keyArray[:0], uid)
	key = binary.BigEndian.AppendUint32(key, gid)
	for _, g := range groups {
		key = binary.BigEndian.AppendUint32(key, g)
	}
	if cred, ok := c.encoded[string(key)]; ok {
		return cred
	}
	if len(c.encoded) >= maxCredentials {
		clear(c.encoded)
	}
	cred := sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: c.machine, UID: uid, GID: gid, GIDs: groups})
	c.encoded[string(key)] = cred
	return cred
}

// Errors of processGroups.
var (
	errNoPID         = errors.New("the process is in another PID namespace")
	errOtherIdentity = errors.New("the process has another uid or gid now, or acts for another user")
	errBadStatus     = errors.New("invalid /proc/PID/status")
)

// processGroups appends the first 16 supplementary groups of a process, the maximum of AUTH_SYS.
// more is the number of groups left out. uid and gid are those of the request. A process with
// others is not the caller, or the kernel makes the request for another user, as overlayfs does.
func processGroups(pid, uid, gid uint32, groups []uint32) (_ []uint32, more int, err error) {
	if pid == 0 {
		return nil, 0, errNoPID
	}
	status, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/status")
	if err != nil {
		return nil, 0, fmt.Errorf("%w; mount /proc without hidepid, or give the daemon CAP_SYS_PTRACE", err)
	}
	return parseGroups(status, uid, gid, groups)
}

// parseGroups is processGroups for the content of /proc/PID/status.
func parseGroups(status []byte, uid, gid uint32, groups []uint32) (_ []uint32, more int, err error) {
	for name, id := range map[string]uint32{"\nUid:": uid, "\nGid:": gid} {
		line, _ := kernel.StatusField(status, name)
		ids := bytes.Fields(line) // real, effective, saved, file system
		if len(ids) != 4 {
			return nil, 0, errBadStatus
		}
		if fs, err := strconv.ParseUint(string(ids[3]), 10, 32); err != nil || uint32(fs) != id {
			return nil, 0, errOtherIdentity
		}
	}
	line, ok := kernel.StatusField(status, "\nGroups:")
	if !ok {
		return nil, 0, errBadStatus
	}
	for _, word := range bytes.Fields(line) {
		g, err := strconv.ParseUint(string(word), 10, 32)
		switch {
		case err != nil:
			return nil, 0, errBadStatus
		case len(groups) < sunrpc.MaxGIDs:
			groups = append(groups, uint32(g))
		default:
			more++
		}
	}
	return groups, more, nil
}
