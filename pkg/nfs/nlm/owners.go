package nlm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
)

// Names, layout and limits of the files of owners. Another format has another prefix.
const (
	ownersPrefix = "locks-1-"
	ownersMagic  = "nfsrdmad owners\n"
	ownersHead   = 2048 // bytes before the records
	ownersSlot   = 512  // bytes of a record, which is in one page: a killed process writes all or nothing
	maxOwners    = maxLocks + extraSlots
	maxStale     = 1 << 12 // files of earlier processes
)

// staleRetry is the time between attempts to release the locks of a killed daemon.
const staleRetry = time.Minute

// An ownersHeader is the beginning of a file of owners: all that UNLOCK needs besides the owner.
type ownersHeader struct {
	magic           [len(ownersMagic)]byte
	client          clientRecord
	host            [64]byte // an IP address, padded with NUL
	port, mountPort uint16
	mountFirst      uint8
}

func (h *ownersHeader) valid() bool {
	_, err := netip.ParseAddr(text(h.host[:]))
	return err == nil && string(h.magic[:]) == ownersMagic
}

// An ownersFile is the copy of the owner records of a State in the state directory, in the slots
// that they have in the State. Errors are logged. A nil *ownersFile is valid and keeps nothing.
type ownersFile struct {
	*os.File
	service *Service
}

func ownersOffset(ref slotfile.Ref) int64 { return ownersHead + int64(ref-1)*ownersSlot }

func (o *ownersFile) put(ref slotfile.Ref, r *ownerRecord) {
	if o == nil {
		return
	}
	if _, err := o.WriteAt(slotfile.Bytes(r), ownersOffset(ref)); err != nil {
		o.service.notRecorded(err)
	}
}

// end closes the file of a client that has ended. Without owners it removes the file. Otherwise
// their locks stay for releaseStale, or for the next process.
func (o *ownersFile) end(empty bool) {
	if o == nil {
		return
	}
	if empty {
		_ = os.Remove(o.Name())
	} else {
		o.service.mu.Lock()
		o.service.mu.stale[o.Name()] = struct{}{}
		o.service.mu.Unlock()
	}
	o.Close()
}

// openStateDir locks the state directory, so that one process has its files. The files that are
// there are stale until a client claims them.
func (s *Service) openStateDir() error {
	if err := os.MkdirAll(s.cfg.StateDir, 0o700); err != nil {
		return err
	}
	dir, err := os.Open(s.cfg.StateDir)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		dir.Close()
		return fmt.Errorf("%s: in use by another process: %w", dir.Name(), err)
	}
	s.dir = dir
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		if strings.HasPrefix(name, ownersPrefix) && len(s.mu.stale) < maxStale {
			s.mu.stale[filepath.Join(dir.Name(), name)] = struct{}{}
		}
	}
	return err
}

// notRecorded logs the first failure to keep owners for the next process.
func (s *Service) notRecorded(err error) {
	if !s.logged.Swap(true) {
		s.log.Warn("locks may stay at servers if this daemon is killed: cannot record their owners; check state_dir",
			"error", err)
	}
}

// claimOwners returns the file of owners of a client, nil for none. An earlier file of the client is
// then not stale.
func (s *Service) claimOwners(cfg *Config, client *clientRecord) *ownersFile {
	if s == nil || s.dir == nil {
		return nil
	}
	path := filepath.Join(s.dir.Name(), fmt.Sprintf("%s%x", ownersPrefix, client.instance))
	s.mu.Lock()
	delete(s.mu.stale, path)
	s.mu.Unlock()
	h := ownersHeader{client: *client, port: uint16(cfg.Port), mountPort: uint16(cfg.MountPort),
		mountFirst: asByte(cfg.MountPortFirst)}
	copy(h.magic[:], ownersMagic)
	copy(h.host[:], cfg.Host)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		_, err = f.WriteAt(slotfile.Bytes(&h), 0)
	}
	if err != nil {
		s.notRecorded(err)
	}
	if f == nil {
		return nil
	}
	return &ownersFile{f, s}
}

// newState returns a State for a client that no process continues, so that its owners have a file.
// It is nil if there is none.
func (s *Service) newState() *State {
	if s == nil || s.dir == nil {
		return nil
	}
	f, err := slotfile.Create("nfsrdmad-locks", 1, StateTables())
	if err != nil {
		s.notRecorded(err)
		return nil
	}
	state := NewState(f)
	state.own = f
	return state
}

// Restored tells a service with the option Restore that all clients that restore locks exist. It
// releases the other locks of the earlier daemon in the background. It precedes Close.
func (s *Service) Restored() {
	if s == nil {
		return
	}
	s.release.Do(func() {
		if n := len(s.stale()); n > 0 {
			s.log.Info("releasing the locks of an earlier daemon", "mounts", n)
			s.work.Go(s.releaseStale)
		}
	})
}

// stale returns the files of an earlier process that no client has claimed.
func (s *Service) stale() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.mu.stale))
}

// releaseStale releases what an earlier daemon left, until every server has answered.
func (s *Service) releaseStale() {
	for {
		down := make(map[string]bool) // servers that do not answer
		for _, path := range s.stale() {
			if s.ctx.Err() == nil && s.releaseFile(path, down) {
				s.mu.Lock()
				delete(s.mu.stale, path)
				s.mu.Unlock()
			}
		}
		if len(s.stale()) == 0 || !sleep(s.ctx, s.cfg.staleRetry) {
			return
		}
	}
}

// releaseFile releases the locks of the owners in a file, and removes the file. It returns false to
// try again.
func (s *Service) releaseFile(path string, down map[string]bool) bool {
	f, h, slots, err := readOwners(path)
	if err != nil {
		s.log.Warn("locks may stay at a server: the file of an earlier daemon is ignored", "file", path, "error", err)
		return true
	}
	defer f.Close()
	host := text(h.host[:])
	if down[host] {
		return false
	}
	l := newLink(&Config{Host: host, Port: int(h.port), MountPort: int(h.mountPort),
		MountPortFirst: h.mountFirst != 0}, nil)
	defer l.close()
	o, invalid := &ownersFile{f, s}, 0
	first := rand.IntN(slots + 1) // so that an owner that always fails does not exclude the same others
	for i := range slots {
		ref := slotfile.Ref((first+i)%slots + 1)
		var r ownerRecord
		if _, err = f.ReadAt(slotfile.Bytes(&r), ownersOffset(ref)); err != nil || !r.valid() {
			if r != (ownerRecord{}) {
				invalid++
			}
			continue
		}
		if err = s.unlockStale(l, &h.client, &r); err != nil {
			s.log.Debug("locks of an earlier daemon not released", "server", host, "error", err)
			down[host] = true
			return false
		}
		o.put(ref, &ownerRecord{})
	}
	if invalid > 0 {
		s.log.Warn("locks may stay at a server: records of an earlier daemon are ignored", "records", invalid)
	}
	_ = os.Remove(path)
	return true
}

// readOwners opens a file of owners and returns its header and the number of its slots.
func readOwners(path string) (f *os.File, h ownersHeader, slots int, err error) {
	if f, err = os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0); err != nil {
		return nil, h, 0, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() > 0 { // 0: the process was killed before it wrote the header
		_, err = f.ReadAt(slotfile.Bytes(&h), 0)
	}
	if err == nil && (!st.Mode().IsRegular() || st.Size() > ownersOffset(maxOwners+1) || st.Size() > 0 && !h.valid()) {
		err = errors.New("no file of owners")
	}
	if err != nil {
		f.Close()
		return nil, h, 0, err
	}
	return f, h, max(0, int(st.Size()-ownersHead+ownersSlot-1)/ownersSlot), nil
}

// unlockStale releases all locks of one owner of a file.
func (s *Service) unlockStale(l *link, client *clientRecord, r *ownerRecord) error {
	args := nlmwire.AppendArgs(nil, nlmwire.ProcUnlock, &nlmwire.Args{Cookie: []byte{0},
		Region: nlmwire.Region{Caller: text(client.caller[:]), FH: r.fh[:r.fhLen],
			OH: ownerHandle(client.instance, r.svid), SVID: r.svid}})
	_, err := l.try(s.ctx, nlmwire.ProcUnlock, r.credential(), args, func(b []byte) error {
		var res nlmwire.Res
		err := nlmwire.ParseRes(nlmwire.ProcUnlock, b, &res)
		if err == nil && res.Stat == nlmwire.DeniedGracePeriod {
			err = errors.New(res.Stat.String())
		}
		return err
	})
	return err
}

// ownerHandle returns the owner handle of an owner of a client.
func ownerHandle(instance [8]byte, svid uint32) []byte {
	return binary.BigEndian.AppendUint32(instance[:], svid)
}
