package vfs

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/crc64"
	"slices"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A process that is killed leaves requests without reply. The kernel sends them again to the next
// process, which executes them again. Most requests may be executed twice. For the others, the
// State has a record from their first effect until the kernel has the reply:
//
//   - The calls that change names or attributes are repeated with the same XID, so that the
//     duplicate request cache of the server recognizes them. All that such a call contains, also a
//     hidden name or a verifier, depends on the request alone.
//   - A server may have lost its cache. NFS3ERR_NOENT for a removal, and NFS3ERR_EXIST for a new
//     name that stands for an object of the same type and owner, then count as success.
//   - A request that failed returns its error again.
//   - An append writes at the same offset again.
//   - A file that the kernel has not got is closed before it is opened again.

// A requestState is the record of a request, for the goroutine that handles the request.
type requestState struct {
	slot     keptSlot
	rec      requestRecord
	earlier  int      // calls that an earlier process has made
	repeated []uint64 // sums of those calls that this process has repeated
	restored bool     // an earlier process has made the record
	uid      uint32   // unless restored: the record counts to this user
	resent   bool     // the kernel has sent the request again; guarded by State.mu
}

var _ sunrpc.CallKeeper = (*request)(nil)

var sumTable = crc64.MakeTable(crc64.ECMA)

// callSum identifies a call of a request by its procedure and arguments.
func callSum(m *sunrpc.Message) uint64 {
	var proc [4]byte
	binary.NativeEndian.PutUint32(proc[:], m.Proc)
	sum := crc64.Update(0, sumTable, proc[:])
	sum = crc64.Update(sum, sumTable, m.Cred)
	sum = crc64.Update(sum, sumTable, m.Args)
	return crc64.Update(sum, sumTable, m.ArgData)
}

// KeptCall implements sunrpc.CallKeeper. It returns each ID once: a request makes the same call
// again because it needs another reply than the first one, for example after NFS3ERR_JUKEBOX.
func (r *request) KeptCall(m *sunrpc.Message) (id sunrpc.CallID, ok bool) {
	k := r.kept
	if k == nil || k.earlier == 0 || !m.Once {
		return id, false
	}
	sum := callSum(m)
	c := k.rec.find(sum)
	if c == nil || slices.Contains(k.repeated, sum) {
		return id, false
	}
	k.repeated = append(k.repeated, sum)
	return sunrpc.CallID{Conn: c.conn, XID: c.xid}, true
}

// KeepCall implements sunrpc.CallKeeper.
func (r *request) KeepCall(m *sunrpc.Message, id sunrpc.CallID) {
	if r.state == nil || !m.Once {
		return
	}
	k := r.record()
	if k == nil {
		return
	}
	sum := callSum(m)
	c := k.rec.find(sum)
	if c == nil {
		if k.rec.nCalls == maxKeptCalls {
			copy(k.rec.calls[:], k.rec.calls[1:])
			k.rec.nCalls--
		}
		c = &k.rec.calls[k.rec.nCalls]
		k.rec.nCalls++
	}
	*c = keptCall{sum: sum, conn: id.Conn, xid: id.XID}
	r.state.requests.Set(k.slot, &k.rec)
}

func (rec *requestRecord) find(sum uint64) *keptCall {
	for i := range rec.calls[:rec.nCalls] {
		if rec.calls[i].sum == sum {
			return &rec.calls[i]
		}
	}
	return nil
}

// record returns the record of the request, and makes it if there is none. It returns nil if the
// mount is not kept, if there is no room, or if the user has its share of the records.
func (r *request) record() *requestState {
	s := r.state
	if r.kept != nil || s == nil {
		return r.kept
	}
	k := &requestState{rec: requestRecord{unique: r.Unique}, uid: r.Header.Uid}
	if s.requestUsers.Take(k.uid) != nil {
		return nil
	}
	var err error
	if k.slot, err = s.requests.Add(&k.rec, 0); err != nil {
		s.requestUsers.Release(k.uid)
		return nil
	}
	s.mu.Lock()
	s.mu.byUnique[r.Unique] = k
	s.active.Store(int64(len(s.mu.byUnique)))
	s.mu.Unlock()
	r.kept = k
	return k
}

// keepHandle records that the request opens a file or directory with this number.
func (r *request) keepHandle(id uint64) {
	if k := r.record(); k != nil {
		k.rec.handle = id
		r.state.requests.Set(k.slot, &k.rec)
	}
}

// keepOffset records the offset of the data of an append.
func (r *request) keepOffset(off uint64) {
	if k := r.record(); k != nil {
		k.rec.offset = off + 1
		r.state.requests.Set(k.slot, &k.rec)
	}
}

// keptOffset returns the offset that keepOffset recorded in an earlier process.
func (r *request) keptOffset() (off uint64, ok bool) {
	if r.kept == nil || r.kept.rec.offset == 0 {
		return 0, false
	}
	return r.kept.rec.offset - 1, true
}

// keepResult records how the request ended, if it has a record.
func (r *request) keepResult(status fuse.Status) {
	if k := r.kept; k != nil {
		k.rec.done, k.rec.errno = 1, uint32(status)
		r.state.requests.Set(k.slot, &k.rec)
	}
}

// keepError records that the request ends with an error that nothing else records. It returns false
// if there is no room.
func (r *request) keepError(errno syscall.Errno) bool {
	if r.state == nil {
		return true
	}
	if r.record() == nil {
		return false
	}
	r.keepResult(fuse.Status(errno))
	return true
}

// earlierError returns the error with which an earlier process ended the request, or nil.
func (r *request) earlierError() error {
	if r.kept == nil || r.kept.rec.done == 0 || r.kept.rec.errno == 0 {
		return nil
	}
	return syscall.Errno(r.kept.rec.errno)
}

// sentBefore reports whether an earlier process has made calls with effects for the request.
func (r *request) sentBefore() bool { return r.kept != nil && r.kept.earlier > 0 }

// claim finds the record of a request that the kernel sends again, and reverses an open.
func (fs *FS) claim(r *request) {
	s := fs.state
	s.mu.Lock()
	k := s.mu.byUnique[r.Unique]
	if k != nil && !k.resent {
		k.resent = true
		s.mu.resent++
	}
	s.mu.Unlock()
	r.kept = k
	if k == nil || k.rec.handle == 0 {
		return
	}
	fs.closeUnknown(k.rec.handle)
	k.rec.handle = 0
	s.requests.Set(k.slot, &k.rec)
}

// closeUnknown closes a file or directory of which the kernel has not got the number.
func (fs *FS) closeUnknown(id uint64) {
	fs.releaseDir(id)
	fs.handles.Lock()
	h := fs.handles.files[id]
	delete(fs.handles.files, id)
	if h != nil {
		h.closed = true
		if h.watched {
			fs.unwatchFile()
		}
	}
	fs.handles.Unlock()
	if h != nil {
		fs.closeFile(h)
	}
}

// replied ends the record of a request, if it has one.
func (s *State) replied(unique uint64) {
	if s == nil || s.active.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.mu.byUnique[unique]; k != nil {
		s.forgetRequest(unique, k)
	}
}

// forgetRequest removes a record. The caller holds mu.
func (s *State) forgetRequest(unique uint64, k *requestState) {
	delete(s.mu.byUnique, unique)
	s.active.Store(int64(len(s.mu.byUnique)))
	if k.resent {
		s.mu.resent--
	}
	s.requests.Remove(&k.slot)
	if !k.restored {
		s.requestUsers.Release(k.uid)
	}
}

// ReservedCalls returns the calls of an earlier process that may be repeated.
func (s *State) ReservedCalls() []sunrpc.CallID {
	var ids []sunrpc.CallID
	_ = s.requests.All(func(_ keptSlot, r *requestRecord) error { // OpenState has checked the records
		for _, c := range r.calls[:min(r.nCalls, maxKeptCalls)] {
			ids = append(ids, sunrpc.CallID{Conn: c.conn, XID: c.xid})
		}
		return nil
	})
	return ids
}

// settleTime is how long the kernel has to send requests again.
const settleTime = 5 * time.Second

// settle removes the records of requests that the kernel did not send again because it has their
// replies. It waits until those that were sent again have ended, and then calls Options.Settled.
func (fs *FS) settle() {
	tick := time.NewTicker(settleTime)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-fs.closed:
			return
		case <-fs.aborted:
			return
		}
		if fs.state.dropUnclaimed() {
			break
		}
	}
	if fs.opts.Settled != nil {
		fs.opts.Settled()
	}
}

// Resume starts the work that an earlier process has left. A connection other than /dev/fuse calls it
// before it handles requests. pending are the numbers of the requests without reply that the connection
// sends again, with kernel.Request.Resent. It calls Repeated for each of them.
func (fs *FS) Resume(pending []uint64) {
	fs.state.claimPending(pending)
	fs.resume()
}

// Repeated ends the record of a request of Resume, which has ended.
func (fs *FS) Repeated(unique uint64) { fs.state.replied(unique) }

// claimPending removes the records of all requests that the connection does not send again.
func (s *State) claimPending(pending []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, unique := range pending {
		if k := s.mu.byUnique[unique]; k != nil && !k.resent {
			k.resent = true
			s.mu.resent++
		}
	}
	for unique, k := range s.mu.byUnique {
		if !k.resent {
			s.forgetRequest(unique, k)
		}
	}
}

// dropUnclaimed removes restored records that no request has claimed. It reports whether all
// claimed requests have ended.
func (s *State) dropUnclaimed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for unique, k := range s.mu.byUnique {
		if k.restored && !k.resent {
			s.forgetRequest(unique, k)
		}
	}
	return s.mu.resent == 0
}

// derive returns 8 bytes that depend on the request and the purpose, and that others cannot guess.
// They are random if the mount is not kept.
func (r *request) derive(purpose string) (b [8]byte) {
	if r.state == nil {
		_, _ = rand.Read(b[:]) // never fails
		return b
	}
	h := sha256.New()
	h.Write(r.state.mu.mount.secret[:])
	_ = binary.Write(h, binary.BigEndian, r.Unique)
	h.Write([]byte(purpose))
	copy(b[:], h.Sum(nil))
	return b
}

// sillyName returns the hidden name for a file that the request removes or replaces.
func (r *request) sillyName() string {
	b := r.derive("hidden name")
	return sillyPrefix + hex.EncodeToString(b[:])
}

// madeBefore reports whether an object with attributes a can be one that an earlier process made
// for the request. The server may have given an object of root to another user.
func (r *request) madeBefore(a *nfs.Attr, typ nfs.FileType) bool {
	return a.Type == typ && (a.UID == r.Header.Uid || r.Header.Uid == 0)
}
