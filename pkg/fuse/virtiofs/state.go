package virtiofs

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
)

// stateSchema is the version of the records below. A change of a record, of a counter, or of what
// they mean, needs a new version: a process leaves shares with a state of another version alone.
const stateSchema = 1

// maxInit bounds an INIT request in a record.
const maxInit = 256

// A shareRecord describes the socket of a share and the VMM that is connected. Numbers of messages
// refer to descriptors. Counter 0 is an answer.
type shareRecord struct {
	listener            uint64 // message of the listening socket; 0 for none
	dev, ino            uint64 // of the file of the listening socket
	conn                uint64 // message of the connection of a VMM; 0 for none
	memory              uint64 // message of the files of the guest's memory; 0 for none
	features, protocols uint64
	regionCount         uint32
	initLen             uint32 // 0 without a FUSE session
	regions             [maxRegions]region
	init                [maxInit]byte
}

// A ringRecord describes a queue. Its counters are the requests in progress, by their first
// descriptors, and two more.
type ringRecord struct {
	index, size   uint32
	enabled, base uint32
	at            addresses
	kick, call    uint64 // messages of the descriptors; 0 for none
}

// Counters of a ringRecord after those of the requests.
const (
	counterNext       = maxRingSize     // index of the next request in the available ring
	counterCompleting = maxRingSize + 1 // a completion, or 0
	ringCounters      = maxRingSize + 2
)

// An answer is the last part of the handling of a message of the VMM: the reply is in the pipe, and
// the message, which is still in the socket, has this many bytes. 0 means that no message is in
// this part.
type answer uint64

// answerEnds means that the connection ends after the answer.
const answerEnds answer = 1 << 32

// atStep, if not nil, is called between the steps of an operation. Tests kill the process there.
var atStep func(what string)

func step(what string) {
	if atStep != nil {
		atStep(what)
	}
}

// A State is what the next process needs to continue a share after this process was killed at any
// instruction. It has one descriptor, which a descriptor store keeps: see descriptors. The first
// message of the descriptors has the file of the records, and a pipe for the reply to the VMM.
type State struct {
	fds      *descriptors
	left     map[uint64][]int // of an earlier process, until resume
	pipe     [2]int           // reading end, writing end
	file     *slotfile.File
	share    slotfile.Records[shareRecord]
	rings    slotfile.Records[ringRecord]
	ref      slotfile.Ref
	ringRefs [maxRings]slotfile.Ref
	restored bool
	kept     [maxRings]ringRecord // by the earlier process
	closed   sync.Once

	mu  sync.Mutex
	rec shareRecord // guarded by mu
}

func stateTables() []slotfile.TableSpec {
	return []slotfile.TableSpec{slotfile.SpecOf[shareRecord]("share", 1, 1),
		slotfile.SpecOf[ringRecord]("rings", ringCounters, maxRings)}
}

func newState(f *slotfile.File) *State {
	return &State{file: f, share: slotfile.RecordsOf[shareRecord](f, "share"),
		rings: slotfile.RecordsOf[ringRecord](f, "rings")}
}

// NewState makes the State of a new share. The caller closes it.
func NewState() (*State, error) {
	f, err := slotfile.Create("nfsrdmad-share", stateSchema, stateTables())
	if err != nil {
		return nil, err
	}
	s := newState(f)
	if err := s.begin(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

func (s *State) begin() (err error) {
	if s.ref, err = s.share.Add(&s.rec, 0); err != nil {
		return err
	}
	for i := range s.ringRefs {
		if s.ringRefs[i], err = s.rings.Add(&ringRecord{index: uint32(i)}, 0); err != nil {
			return err
		}
	}
	file, err := s.file.Descriptor()
	if err != nil {
		return err
	}
	defer file.Close()
	if err := unix.Pipe2(s.pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return os.NewSyscallError("pipe2", err)
	}
	if s.fds, err = newDescriptors(int(file.Fd()), s.pipe[0], s.pipe[1]); err != nil {
		closeAll(s.pipe[:])
	}
	return err
}

// SocketOf returns the path of the socket of a share whose State this process cannot use, or "". f
// comes from a descriptor store.
func SocketOf(f *os.File) (path string) {
	fds, files, err := openKept(f)
	if err != nil {
		return ""
	}
	defer fds.close()
	for _, list := range files {
		for _, fd := range list {
			if listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || listens == 0 {
				continue
			}
			if a, err := unix.Getsockname(fd); err == nil {
				if u, ok := a.(*unix.SockaddrUnix); ok {
					path = u.Name
				}
			}
		}
		closeAll(list)
	}
	return path
}

func openKept(f *os.File) (d *descriptors, files map[uint64][]int, err error) {
	var fd int
	err = withDescriptor(f, func(recv int) (err error) {
		fd, err = duplicate(recv)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return openDescriptors(fd)
}

// OpenState opens the State of an earlier process. f comes from a descriptor store. The errors are
// those of slotfile.Open: slotfile.ErrLocked means that the earlier process has not yet ended. That
// process must have been killed, because it shares the queue of descriptors. The caller closes the
// State.
func OpenState(f *os.File) (_ *State, err error) {
	fds, files, err := openKept(f)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			for _, list := range files {
				closeAll(list)
			}
			fds.close()
		}
	}()
	base := files[baseMessage]
	if len(base) != 3 {
		return nil, fmt.Errorf("virtiofs: %w: %d kept descriptors", slotfile.ErrCorrupt, len(base))
	}
	file := os.NewFile(uintptr(base[0]), "share")
	files[baseMessage] = base[1:]
	defer file.Close()
	records, err := slotfile.Open(file, stateSchema, stateTables())
	if err != nil {
		return nil, err
	}
	s := newState(records)
	if err := s.load(); err != nil {
		return nil, errors.Join(err, records.Close())
	}
	s.fds, s.left, s.pipe, s.restored = fds, files, [2]int{base[1], base[2]}, true
	delete(files, baseMessage)
	s.dropLeft()
	return s, nil
}

// load reads the records.
func (s *State) load() error {
	err := s.share.All(func(ref slotfile.Ref, r *shareRecord) error {
		if r.initLen > maxInit || r.regionCount > maxRegions {
			return damaged("record of the share")
		}
		s.ref, s.rec = ref, *r
		return nil
	})
	if err == nil && s.ref == 0 {
		err = damaged("no record of the share")
	}
	if err != nil {
		return err
	}
	err = s.rings.All(func(ref slotfile.Ref, r *ringRecord) error {
		if r.index >= maxRings || r.size > maxRingSize || r.size&(r.size-1) != 0 {
			return damaged("record of queue %d with %d descriptors", r.index, r.size)
		}
		s.ringRefs[r.index], s.kept[r.index] = ref, *r
		return nil
	})
	for i, ref := range s.ringRefs {
		if err == nil && ref == 0 {
			err = damaged("no record of queue %d", i)
		}
	}
	return err
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("virtiofs: %w: %s", slotfile.ErrCorrupt, fmt.Sprintf(format, args...))
}

// dropLeft removes the descriptors that no record refers to.
func (s *State) dropLeft() {
	used := map[uint64]bool{s.rec.listener: true}
	if s.rec.conn != 0 {
		used[s.rec.conn], used[s.rec.memory] = true, true
		for i := range s.kept {
			used[s.kept[i].kick], used[s.kept[i].call] = true, true
		}
	}
	for id, fds := range s.left {
		if !used[id] {
			closeAll(fds)
			delete(s.left, id)
		}
	}
	s.fds.keepOnly(used)
}

// take returns the descriptors of a message of the earlier process, n of them.
func (s *State) take(id uint64, n int) ([]int, error) {
	fds := s.left[id]
	if len(fds) != n {
		return nil, damaged("%d descriptors in message %d, want %d", len(fds), id, n)
	}
	delete(s.left, id)
	return fds, nil
}

// Descriptor returns a new descriptor for a descriptor store. The caller closes it.
func (s *State) Descriptor() (*os.File, error) { return s.fds.file() }

// Restarts returns how often a process has continued the share.
func (s *State) Restarts() uint32 { return s.file.Restarts() }

// Listening reports whether VMMs can connect to the share.
func (s *State) Listening() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.listener != 0
}

// Close releases the State. The next process can use it as long as a descriptor store has the
// descriptor. Further calls do nothing.
func (s *State) Close() (err error) {
	s.closed.Do(func() {
		s.closeLeft()
		closeAll(s.pipe[:])
		s.fds.close()
		err = s.file.Close()
	})
	return err
}

// closeLeft closes the descriptors of the earlier process that were not taken.
func (s *State) closeLeft() {
	for _, fds := range s.left {
		closeAll(fds)
	}
	s.left = nil
}

// update changes the record of the share.
func (s *State) update(change func(*shareRecord)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.rec)
	s.share.Set(s.ref, &s.rec)
	step("record of the share")
}

func (s *State) answer() answer { return answer(s.share.Counter(s.ref)) }

func (s *State) setAnswer(a answer) {
	s.share.SetCounter(s.ref, uint64(a))
	step("answer")
}

// setListener records the listening socket, or none.
func (s *State) setListener(l *listener) error {
	var id, before uint64
	if l != nil {
		err := withDescriptor(l, func(fd int) (err error) {
			id, err = s.fds.add(fd)
			return err
		})
		if err != nil {
			return err
		}
	}
	s.update(func(r *shareRecord) {
		before, r.listener = r.listener, id
		if l != nil {
			r.dev, r.ino = l.dev, l.ino
		}
	})
	s.fds.drop(0, before)
	return nil
}

// beginConn records the connection of a VMM. There is no other one.
func (s *State) beginConn(socket syscall.Conn) error {
	for i, ref := range s.ringRefs {
		s.rings.Set(ref, &ringRecord{index: uint32(i)})
		p := s.progress(i)
		for j := range ringCounters {
			p.store(j, 0)
		}
	}
	s.setAnswer(0)
	var id uint64
	err := withDescriptor(socket, func(fd int) (err error) {
		id, err = s.fds.add(fd)
		return err
	})
	if err == nil {
		s.update(func(r *shareRecord) {
			*r = shareRecord{listener: r.listener, dev: r.dev, ino: r.ino, conn: id}
		})
	}
	return err
}

// endConn records the end of a connection, and releases its descriptors.
func (s *State) endConn() {
	var listener uint64
	s.update(func(r *shareRecord) {
		listener = r.listener
		*r = shareRecord{listener: listener, dev: r.dev, ino: r.ino}
	})
	s.fds.keepOnly(map[uint64]bool{listener: true})
}

// setSession records the INIT request of a FUSE session, nil for none.
func (s *State) setSession(init []byte) error {
	if len(init) > maxInit {
		return fmt.Errorf("INIT request of %d bytes; maximum is %d", len(init), maxInit)
	}
	s.update(func(r *shareRecord) { r.initLen = uint32(copy(r.init[:], init)) })
	return nil
}

// setMemory records the guest's memory.
func (s *State) setMemory(regions []region, fds []int) error {
	id, err := s.fds.add(fds...)
	if err != nil {
		return err
	}
	var before uint64
	s.update(func(r *shareRecord) {
		before, r.memory = r.memory, id
		r.regionCount = uint32(copy(r.regions[:], regions))
	})
	s.fds.drop(0, before)
	return nil
}

// A progress is the counters of a ringRecord.
type progress struct {
	t    *slotfile.Table
	slot slotfile.Slot
}

func (s *State) progress(ring int) progress {
	return progress{s.rings.Table, slotfile.Slot(s.ringRefs[ring] - 1)}
}

func (p progress) load(i int) uint64     { return p.t.LoadUint64(p.slot, i) }
func (p progress) store(i int, v uint64) { p.t.StoreUint64(p.slot, i, v) }
