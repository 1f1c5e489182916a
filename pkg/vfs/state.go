package vfs

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

// stateSchema is the version of the records below. A change of a record, or of what it means, needs
// a new version: a daemon leaves mounts with a state of another version alone.
const stateSchema = 3

// Bounds of the records.
const (
	maxCred        = 408 // flavor, length and body of a credential (RFC 5531 §8.2)
	maxInit        = 256 // an INIT request
	maxDescription = 8 << 10
	maxHiddenName  = 32
	maxKeptCalls   = 4 // calls of one request
)

// Maximum numbers of records. Without room for its record, an operation fails (ENFILE, ENOLCK, or
// EMFILE for a user who has its share of the table). Nodes without record are lost at a restart.
const (
	maxKeptNodes    = 4 << 20
	maxKeptFiles    = 1 << 17
	maxKeptDirs     = 1 << 16
	maxKeptHidden   = 1 << 16
	maxKeptRequests = 1 << 14
)

// A keptSlot refers to a record. 0 means that there is no record.
type keptSlot = slotfile.Ref

// A keptCred is a credential in a record.
type keptCred struct {
	n uint32
	b [maxCred]byte
}

func (c *keptCred) set(cred []byte) { c.n = uint32(copy(c.b[:], cred)) }

type mountRecord struct {
	secret       [16]byte // for names and verifiers of calls that may be repeated
	major, minor uint32   // device number of the mount; 0 before the mount
	acl          uint32   // 1: the connection was made with ACLs
	initLen      uint32
	init         [maxInit]byte
	textLen      uint32
	text         [maxDescription]byte // of the owner of the State
}

// Counter 0 of a mountRecord is soleUser.state.

// Counter 0 of a nodeRecord is the number of lookup references of the kernel.
type nodeRecord struct {
	id, fileID uint64
	typ        uint32 // nfs.FileType, 0 if unknown
	fh         keptHandle
}

type keptHandle struct {
	n uint32
	b [nfs.HandleSize]byte
}

func (k *keptHandle) set(fh *nfs.Handle) { k.n = uint32(copy(k.b[:], fh.Bytes())) }

// Counter 0 of a fileRecord is an error of write-behind that the file has not reported.
type fileRecord struct {
	id, node  uint64
	flags     uint32 // of open(2)
	releasing uint32 // 1: the kernel has released the file
	cred      keptCred
	open      nfs.OpenState
}

type dirRecord struct {
	id, node uint64
	verf     nfs.Verifier
	cred     keptCred
}

// A hiddenRecord is made before the RENAME to the hidden name is sent.
type hiddenRecord struct {
	node, dirNode uint64
	dir           keptHandle
	nameLen       uint32
	name          [maxHiddenName]byte
	cred          keptCred
}

// Counter 0 of an extentRecord is the number of bytes in the buffer.
type extentRecord struct {
	node, seq, off uint64
	buffer         uint32
	cred           keptCred
	open           nfs.OpenState
}

// A requestRecord tells what the daemon did for a request without reply.
type requestRecord struct {
	unique uint64
	handle uint64 // of the file or directory that the request opened, or 0
	offset uint64 // of the data of an append plus 1, or 0
	done   uint32 // 1: the request has ended with errno
	errno  uint32
	nCalls uint32
	_      uint32
	calls  [maxKeptCalls]keptCall
}

type keptCall struct {
	sum       uint64 // of the procedure and its arguments
	conn, xid uint32
}

// recordChanged, if not nil, is called after each change of a record. Tests kill the process there.
var recordChanged func()

func stateTables(buffers int) []slotfile.TableSpec {
	return append([]slotfile.TableSpec{
		slotfile.SpecOf[mountRecord]("mount", 1, 1), slotfile.SpecOf[nodeRecord]("nodes", 1, maxKeptNodes),
		slotfile.SpecOf[fileRecord]("files", 1, maxKeptFiles), slotfile.SpecOf[dirRecord]("dirs", 1, maxKeptDirs),
		slotfile.SpecOf[hiddenRecord]("hidden", 1, maxKeptHidden), slotfile.SpecOf[extentRecord]("extents", 1, buffers),
		slotfile.SpecOf[requestRecord]("requests", 1, maxKeptRequests),
	}, nlm.StateTables()...)
}

// A State is what the next process needs to continue the mount of an FS after this process was
// killed at any instruction: nodes, open files, hidden names, written data, requests without reply,
// and locks. It lies in a shared memory file, which a descriptor store keeps. The data itself lies
// in the file of Options.Buffers.
//
// One FS uses a State. A nil *State keeps nothing.
type State struct {
	file     *slotfile.File
	mount    slotfile.Records[mountRecord]
	nodes    slotfile.Records[nodeRecord]
	files    userRecords[fileRecord]
	dirs     userRecords[dirRecord]
	hidden   userRecords[hiddenRecord]
	extents  slotfile.Records[extentRecord]
	requests slotfile.Records[requestRecord]

	requestUsers *fair.Limit // of requests that this process received

	mountSlot keptSlot
	restored  bool
	restarts  uint32        // when the file was opened
	seq       atomic.Uint64 // of the last extent

	mu struct { // guards the requests and the mountRecord
		sync.Mutex
		mount    mountRecord
		byUnique map[uint64]*requestState
		resent   int // restored requests that the kernel sent again and that have no reply yet
	}
	active atomic.Int64 // length of byUnique
}

// NewState makes an empty State. description is text of the caller, at most 8 KiB, that
// Description returns in the next process. buffers is the limit of Options.Buffers. secret should
// be random.
func NewState(description []byte, buffers int, secret [16]byte) (*State, error) {
	if len(description) > maxDescription {
		return nil, fmt.Errorf("vfs: description of %d bytes; maximum is %d", len(description), maxDescription)
	}
	f, err := slotfile.Create("nfsrdmad-state", stateSchema, stateTables(buffers))
	if err != nil {
		return nil, err
	}
	s := newState(f)
	r := &s.mu.mount
	r.secret = secret
	r.textLen = uint32(copy(r.text[:], description))
	if s.mountSlot, err = s.mount.Add(r, 0); err == nil {
		err = s.reserveExtents(buffers)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

// reserveExtents gives the table of extents all its memory, so that later additions do not fail.
func (s *State) reserveExtents(n int) error {
	slots := make([]slotfile.Slot, 0, n)
	defer func() {
		for _, slot := range slots {
			s.extents.Free(slot)
		}
	}()
	for range n {
		slot, err := s.extents.Alloc()
		if err != nil {
			return err
		}
		slots = append(slots, slot)
	}
	return nil
}

// OpenState opens the State of an earlier process. f comes from a descriptor store. An FS with this
// State continues the mount. The errors are those of slotfile.Open.
func OpenState(f *os.File) (*State, error) {
	// The number of buffers is that of the file.
	file, err := slotfile.Open(f, stateSchema, stateTables(1))
	if err != nil {
		return nil, err
	}
	s := newState(file)
	s.restored = true
	err = s.mount.All(func(slot keptSlot, r *mountRecord) error {
		if r.initLen > maxInit || r.textLen > maxDescription {
			return fmt.Errorf("vfs: %w: record of the mount", slotfile.ErrCorrupt)
		}
		s.mountSlot, s.mu.mount = slot, *r
		return nil
	})
	if err == nil && s.mountSlot == 0 {
		err = fmt.Errorf("vfs: %w: no record of the mount", slotfile.ErrCorrupt)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return s, nil
}

func newState(f *slotfile.File) *State {
	f.OnChange(recordChanged)
	s := &State{file: f, restarts: f.Restarts()}
	s.mount, s.nodes = slotfile.RecordsOf[mountRecord](f, "mount"), slotfile.RecordsOf[nodeRecord](f, "nodes")
	s.files = userRecordsOf[fileRecord](f, "files", "open files of a kept mount")
	s.dirs = userRecordsOf[dirRecord](f, "dirs", "open directories of a kept mount")
	s.hidden = userRecordsOf[hiddenRecord](f, "hidden", "removed open files of a kept mount")
	s.extents = slotfile.RecordsOf[extentRecord](f, "extents")
	s.requests = slotfile.RecordsOf[requestRecord](f, "requests")
	s.requestUsers = fair.NewLimit("requests of a kept mount", s.requests.MaxSlots())
	s.mu.byUnique = make(map[uint64]*requestState)
	return s
}

// Descriptor returns a new descriptor of the file, for a descriptor store. The caller closes it.
func (s *State) Descriptor() (*os.File, error) { return s.file.Descriptor() }

// Description returns the description of NewState.
func (s *State) Description() []byte { return s.mu.mount.text[:s.mu.mount.textLen] }

// Buffers returns the limit of the pool of buffers.
func (s *State) Buffers() int { return s.extents.MaxSlots() }

// NewLocks returns the part of the State for a lock client of the mount. An earlier one must be
// detached.
func (s *State) NewLocks() *nlm.State { return nlm.NewState(s.file) }

// Restarts returns how often a process has continued the mount.
func (s *State) Restarts() uint32 { return s.restarts }

// StateStats are the statistics of a State.
type StateStats struct {
	Restarts uint64            // processes that have continued the mount
	Records  map[string]uint64 // records in use, by table
}

// Metrics returns the statistics without Records.
func (s *StateStats) Metrics() []stats.Metric {
	return []stats.Metric{
		stats.New("mount_restores_total", "Daemons that have continued the mount of an earlier daemon.", &s.Restarts),
	}
}

// Stats returns current statistics. It may be called concurrently, also after Close.
func (s *State) Stats() *StateStats {
	st := &StateStats{Restarts: uint64(s.restarts), Records: make(map[string]uint64)}
	for _, spec := range stateTables(1) {
		st.Records[spec.Name] = uint64(s.file.Table(spec.Name).Len())
	}
	return st
}

// UnwrittenBytes returns the number of bytes that are not known to be on stable storage.
func (s *State) UnwrittenBytes() (n uint64) {
	_ = s.extents.All(func(slot keptSlot, _ *extentRecord) error { // OpenState has checked the records
		n += s.extents.Counter(slot)
		return nil
	})
	return n
}

// Mounted reports whether an earlier process has mounted the file system.
func (s *State) Mounted() bool { return s.mu.mount.initLen > 0 }

// IsMountedAt reports whether the mount of the earlier process is still at dir. It may have been
// detached while files are open.
func (s *State) IsMountedAt(dir string) bool {
	there, err := mountpoint.MountedAt(dir, mountpoint.Device{Major: s.mu.mount.major, Minor: s.mu.mount.minor})
	return err != nil || there
}

// Close unmaps the State. No FS may use it any more. The records remain while a process has a
// descriptor of the file.
func (s *State) Close() error { return s.file.Close() }

// setMounted records a new mount.
func (s *State) setMounted(dev mountpoint.Device, init []byte, acl bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(init) > maxInit {
		return fmt.Errorf("INIT request of %d bytes; maximum is %d", len(init), maxInit)
	}
	r := &s.mu.mount
	r.major, r.minor, r.acl = dev.Major, dev.Minor, 0
	if acl {
		r.acl = 1
	}
	r.initLen = uint32(copy(r.init[:], init))
	s.mount.Set(s.mountSlot, r)
	return nil
}

// guestACL returns whether the connections of guests have ACLs: what the first process has decided.
func (s *State) guestACL(acl bool) bool {
	if s == nil {
		return acl
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &s.mu.mount
	if s.restored {
		return r.acl == 1
	}
	if acl {
		r.acl = 1
	}
	s.mount.Set(s.mountSlot, r)
	return acl
}

// firstID returns a number that is larger than all numbers of nodes and open files that earlier
// processes gave to the kernel.
func (s *State) firstID() uint64 {
	if s == nil {
		return 0
	}
	return uint64(s.Restarts()) << 40
}

// addNode records a new node with its lookup references. The error means that the table is full.
// The caller holds inodeTable.mu.
func (s *State) addNode(ino *inode, attr *nfs.Attr) (err error) {
	if s == nil {
		return nil
	}
	r := nodeRecord{id: ino.id}
	r.fh.set(&ino.fh)
	if attr != nil {
		r.typ, r.fileID = uint32(attr.Type), attr.FileID
	}
	ino.kept, err = s.nodes.Add(&r, ino.nlookup)
	return err
}

// setLookups records the number of lookup references. The caller holds inodeTable.mu.
func (s *State) setLookups(ino *inode) {
	if s != nil {
		s.nodes.SetCounter(ino.kept, ino.nlookup)
	}
}

func (s *State) freeNode(ino *inode) {
	if s != nil {
		s.nodes.Remove(&ino.kept)
	}
}

// addFile records an open file. The errors are those of userRecords.add.
func (s *State) addFile(h *fileHandle) (err error) {
	if s == nil {
		return nil
	}
	r := h.record()
	h.kept, err = s.files.add(&r, h.cred)
	return err
}

func (h *fileHandle) record() fileRecord {
	r := fileRecord{id: h.id, node: h.ino.id, flags: h.flags, open: h.open}
	r.cred.set(h.cred)
	return r
}

// setReleasing records that the kernel has released an open file.
func (s *State) setReleasing(h *fileHandle) {
	if s != nil && h.kept != 0 {
		r := h.record()
		r.releasing = 1
		s.files.Set(h.kept, &r)
	}
}

// setFileError records an error that the file has to report, or 0.
func (s *State) setFileError(h *fileHandle, errno syscall.Errno) {
	if s != nil {
		s.files.SetCounter(h.kept, uint64(errno))
	}
}

func (s *State) freeFile(h *fileHandle) {
	if s != nil {
		s.files.remove(&h.kept, h.cred)
	}
}

// addDir records an open directory. The errors are those of userRecords.add.
func (s *State) addDir(d *dirHandle) (err error) {
	if s == nil {
		return nil
	}
	r := d.record()
	d.kept, err = s.dirs.add(&r, d.cred)
	return err
}

func (d *dirHandle) record() dirRecord {
	r := dirRecord{id: d.id, node: d.ino.id, verf: d.verf}
	r.cred.set(d.cred)
	return r
}

// setVerf records the cookie verifier of an open directory. The caller holds d.mu.
func (s *State) setVerf(d *dirHandle, verf nfs.Verifier) {
	changed := d.verf != verf
	d.verf = verf
	if s != nil && changed && d.kept != 0 {
		r := d.record()
		s.dirs.Set(d.kept, &r)
	}
}

func (s *State) freeDir(d *dirHandle) {
	if s != nil {
		s.dirs.remove(&d.kept, d.cred)
	}
}

// addHidden records a hidden name before it is made. The errors are those of userRecords.add.
func (s *State) addHidden(ino *inode, silly *sillyName) (err error) {
	if s == nil {
		return nil
	}
	r := hiddenRecord{node: ino.id, dirNode: silly.dir.id}
	r.dir.set(&silly.dir.fh)
	r.nameLen = uint32(copy(r.name[:], silly.name))
	r.cred.set(silly.cred)
	silly.kept, err = s.hidden.add(&r, silly.cred)
	return err
}

func (s *State) freeHidden(silly *sillyName) {
	if s != nil {
		s.hidden.remove(&silly.kept, silly.cred)
	}
}

// dataRecords keeps the extents of written data.
type dataRecords struct {
	*State
	fs *FS
}

func (fs *FS) dataRecords() data.Records {
	if fs.state == nil {
		return nil
	}
	return dataRecords{fs.state, fs}
}

// AddExtent implements data.Records. There are as many records as buffers, and they have memory.
func (s dataRecords) AddExtent(f *data.File, cred []byte, open nfs.OpenState, off uint64,
	buf []byte) (data.Record, bool) {
	i, ok := s.fs.buffers.Index(buf)
	if !ok {
		return 0, false
	}
	r := extentRecord{node: f.ID, seq: s.seq.Add(1), off: off, buffer: uint32(i), open: open}
	r.cred.set(cred)
	ref, err := s.extents.Add(&r, 0)
	return data.Record(ref), err == nil
}

// SetLength implements data.Records.
func (s dataRecords) SetLength(ref data.Record, n int) {
	s.extents.SetCounter(keptSlot(ref), uint64(n))
}

// FreeExtent implements data.Records.
func (s dataRecords) FreeExtent(ref data.Record) {
	slot := keptSlot(ref)
	s.extents.Remove(&slot)
}

// setSoleUser records the state of a soleUser.
func (s *State) setSoleUser(state uint64) {
	if s != nil {
		s.mount.SetCounter(s.mountSlot, state)
	}
}
