package fusefs

import (
	"bytes"
	"encoding/binary"
	"os"
	"strconv"
	"sync"
	"time"

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
)

// credentials makes AUTH_SYS credentials (RFC 5531 appendix A) for callers. The kernel supplies uid
// and gid; /proc supplies the supplementary groups. Each encoding is made once, shared, and never
// modified.
type credentials struct {
	machine string

	mu      sync.Mutex
	callers map[callerKey]caller
	encoded map[string][]byte // by the encoding of uid, gid and groups
}

type callerKey struct{ pid, uid, gid uint32 }

type caller struct {
	cred    []byte
	expires time.Time
}

func newCredentials() *credentials {
	machine, err := os.Hostname()
	if err != nil {
		machine = "localhost"
	}
	return &credentials{machine: machine, callers: make(map[callerKey]caller), encoded: make(map[string][]byte)}
}

// of returns the credential of a caller. The groups of a caller with pid 0 are unknown and left
// out.
func (c *credentials) of(uid, gid, pid uint32) []byte {
	key := callerKey{pid, uid, gid}
	now := time.Now()
	c.mu.Lock()
	known, ok := c.callers[key]
	c.mu.Unlock()
	if ok && now.Before(known.expires) {
		return known.cred
	}

	var array [sunrpc.MaxGIDs]uint32
	groups := processGroups(pid, array[:0])

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

// processGroups appends the first 16 supplementary groups of a process, the maximum of AUTH_SYS.
func processGroups(pid uint32, groups []uint32) []uint32 {
	if pid == 0 {
		return groups
	}
	status, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/status")
	if err != nil {
		return groups
	}
	line, _ := statusField(status, "\nGroups:")
	for len(line) > 0 && len(groups) < sunrpc.MaxGIDs {
		var word []byte
		word, line, _ = bytes.Cut(line, []byte(" "))
		if g, err := strconv.ParseUint(string(word), 10, 32); err == nil {
			groups = append(groups, uint32(g))
		}
	}
	return groups
}
