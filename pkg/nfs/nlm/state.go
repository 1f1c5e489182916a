package nlm

import (
	"bytes"
	"cmp"
	"errors"
	"slices"
	"sort"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/rangelock"
)

// Tables of a State.
const (
	clientTable = "lockclient" // one record: the identity of the client
	ownerTable  = "lockowners" // one record for each owner with locks or requests of a file
	rangeTable  = "lockranges" // one record for each range that is locked, lost or requested
)

// extraSlots are the slots above maxLocks, for requests that are not complete: each has its record
// and a spare slot.
const extraSlots = 2 * maxWaiters

// StateTables returns the tables that a State needs in a slotfile. Their names begin with "lock".
func StateTables() []slotfile.TableSpec {
	return []slotfile.TableSpec{
		slotfile.SpecOf[clientRecord](clientTable, 0, 1),
		slotfile.SpecOf[ownerRecord](ownerTable, 0, maxLocks+extraSlots),
		slotfile.SpecOf[rangeRecord](rangeTable, 0, maxLocks+extraSlots),
	}
}

// Errors of a State.
var (
	errStateEnded = errors.New("the client is detached")
	errCredSize   = errors.New("credential is too large to be recorded")
)

// A State keeps the locks of one Client in a file that survives the process. Only one Client may
// use it. A nil *State is valid and keeps nothing.
//
// A record of a held or lost range takes effect with one Put. The records that it replaces are
// shortened or removed afterwards. Until then the record with the higher sequence number is valid.
// So the next process finds the locks before or after each change, and nothing between.
type State struct {
	client slotfile.Records[clientRecord]
	owners slotfile.Records[ownerRecord]
	ranges slotfile.Records[rangeRecord]
	copy   *ownersFile    // of owners; set before the first request
	own    *slotfile.File // closed with the State; nil for none

	mu      sync.Mutex // guards the fields below and the tables
	ended   bool       // the tables must not be used anymore
	named   bool       // the client table has its record
	seq     uint64     // of the last record of a range
	holders map[lockKey]*holder
}

// A holder is an owner with records of one file.
type holder struct {
	ref     slotfile.Ref
	rec     ownerRecord
	rows    []row // held and lost ranges, ordered by start
	partial bool  // rows may differ from the tables: a record has no slot, or the holder is new
	intents int
}

// A row is a record of a range and its place.
type row struct {
	ref slotfile.Ref
	rec rangeRecord
}

// An intent is the record of a request whose result the client does not know yet. A nil *intent is
// valid: nothing is recorded.
type intent struct {
	key   lockKey
	h     *holder
	row   row
	spare slotfile.Ref // for one more record, which the result may need; 0 for none
}

// NewState returns the State in an open file, whose tables must include StateTables. The caller
// closes the file after Client.Close or Client.Detach.
func NewState(f *slotfile.File) *State {
	return &State{client: slotfile.RecordsOf[clientRecord](f, clientTable),
		owners: slotfile.RecordsOf[ownerRecord](f, ownerTable),
		ranges: slotfile.RecordsOf[rangeRecord](f, rangeTable), holders: make(map[lockKey]*holder)}
}

// end makes all later changes fail, so that the file may be closed.
func (s *State) end() {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
}

// close ends the State of a client that has ended.
func (s *State) close() {
	if s == nil {
		return
	}
	s.end()
	s.copy.end(len(s.holders) == 0)
	if s.own != nil {
		s.own.Close()
	}
}

// begin records that a request about a range is about to be sent, and reserves the slots for its
// result. kind is rangeLock or rangeUnlock. An error changes nothing.
func (s *State) begin(key lockKey, o *owner, cred []byte, rec rangeRecord) (_ *intent, err error) {
	if s == nil {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return nil, errStateEnded
	}
	in := &intent{key: key, row: row{rec: rec}}
	if in.row.ref, err = s.ranges.Reserve(); err == nil {
		in.spare, err = s.ranges.Reserve()
	}
	if err == nil {
		in.h, err = s.holder(key, o, cred)
	}
	if err != nil {
		s.drop(in)
		return nil, err
	}
	in.h.intents++
	in.row.rec.owner = in.h.ref
	s.put(&in.row)
	return in, nil
}

// holder returns the holder of key, which it records if necessary. The caller holds mu.
func (s *State) holder(key lockKey, o *owner, cred []byte) (*holder, error) {
	if h := s.holders[key]; h != nil {
		return h, nil
	}
	if !s.named {
		return nil, slotfile.ErrFull
	}
	if len(cred) > maxCred {
		return nil, errCredSize
	}
	h := &holder{rec: newOwnerRecord(key, o.svid), partial: true}
	h.rec.setCredential(cred)
	var err error
	if h.ref, err = s.owners.Add(&h.rec, 0); err != nil {
		return nil, err
	}
	s.copy.put(h.ref, &h.rec)
	s.holders[key] = h
	return h, nil
}

// put writes the record of a row with the next sequence number. The caller holds mu.
func (s *State) put(r *row) {
	s.seq++
	r.rec.seq = s.seq
	s.ranges.Set(r.ref, &r.rec)
}

// drop frees the slots of an intent, and its holder if nothing else is recorded about it. The
// caller holds mu.
func (s *State) drop(in *intent) {
	s.ranges.Remove(&in.row.ref)
	s.ranges.Remove(&in.spare)
	if in.h != nil {
		in.h.intents--
		s.dropHolder(in.key, in.h)
	}
}

func (s *State) dropHolder(key lockKey, h *holder) {
	if s.holders[key] == h && h.intents == 0 && len(h.rows) == 0 {
		s.copy.put(h.ref, &ownerRecord{})
		s.owners.Remove(&h.ref)
		delete(s.holders, key)
	}
}

// withdraw removes an intent: the server has what the records of held ranges say.
func (s *State) withdraw(in *intent) {
	if s == nil || in == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.drop(in)
	}
}

// apply records a change of the tables of f, which have the locks after it. It returns false after
// end. The error means that some records have no slot: the records then are those of before the
// change for a part of the ranges.
func (s *State) apply(f *file, o *owner, c *tableChange) (ok bool, err error) {
	if s == nil {
		return true, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false, nil
	}
	key := keyOf(f, c.id)
	h := s.holders[key]
	if h == nil {
		if !f.has(c.id) {
			return true, nil
		}
		if h, err = s.holder(key, o, c.cred); err != nil {
			return true, err
		}
	}
	if c.cred != nil && len(c.cred) <= maxCred && !bytes.Equal(c.cred, h.rec.credential()) {
		h.rec.setCredential(c.cred)
		s.owners.Set(h.ref, &h.rec)
		s.copy.put(h.ref, &h.rec)
	}
	err = s.rewrite(f, h, c)
	if in := c.in; in != nil {
		if in.row.rec.kind == rangeLock { // rewrite has used or freed its slot
			h.intents--
		} else {
			s.drop(in)
		}
		s.ranges.Remove(&in.spare)
	}
	s.dropHolder(key, h)
	return true, err
}

// rewrite makes the rows of h those of the tables. At each point, the rows in the order of their
// sequence numbers give the ranges of before or after the change. The caller holds mu.
//
// A change can only change rows that overlap its range or are adjacent to it: rewrite compares no
// others, so that its time does not grow with the number of locks.
func (s *State) rewrite(f *file, h *holder, c *tableChange) error {
	start, end := c.start, c.end
	if c.all || h.partial {
		start, end = 0, maxOffset
	}
	from := sort.Search(len(h.rows), func(i int) bool { return h.rows[i].rec.end+1 >= start })
	to := sort.Search(len(h.rows), func(i int) bool { return h.rows[i].rec.start > end+1 })
	target := rangesOf(f, c.id, start, end)
	var old, done, todo []row
	force := func(*rangeRecord) bool { return c.all }
	if c.in != nil && c.in.row.rec.kind == rangeLock {
		// The row of the request comes first: it becomes the new lock, which replaces others.
		old = append(old, c.in.row)
		force = func(r *rangeRecord) bool { return c.all || r.overlaps(&c.in.row.rec) } // a later number
	}
	for _, r := range h.rows[from:to] {
		for len(target) > 0 && target[0].start < r.rec.start {
			todo, target = append(todo, row{rec: target[0]}), target[1:]
		}
		if len(target) > 0 && target[0].same(r.rec) && !force(&r.rec) {
			done, target = append(done, r), target[1:]
		} else {
			old = append(old, r)
		}
	}
	for _, t := range target {
		todo = append(todo, row{rec: t})
	}
	replaced, err := s.replace(h, c.in, old, todo)
	done = append(done, replaced...)
	slices.SortFunc(done, func(a, b row) int { return cmp.Compare(a.rec.start, b.rec.start) })
	h.rows = slices.Replace(h.rows, from, to, done...)
	h.partial = err != nil
	return err
}

// replace gives the slots of old rows to new ones, and frees those that are left. It returns the
// rows that are then recorded.
func (s *State) replace(h *holder, in *intent, old, rows []row) (recorded []row, err error) {
	put := func(r *row, ref slotfile.Ref) {
		if ref == 0 && in != nil {
			ref, in.spare = in.spare, 0
		}
		if ref == 0 {
			if ref, err = s.ranges.Reserve(); err != nil {
				return
			}
		}
		r.ref, r.rec.owner = ref, h.ref
		s.put(r)
	}
	first := 0 // of the new rows without a slot
	for i := range old {
		var last *row // in the range of the old row; it gets the slot after the others have one
		for j := first; j < len(rows) && rows[j].rec.start <= old[i].rec.end && err == nil; j++ {
			if rows[j].ref != 0 || !rows[j].rec.overlaps(&old[i].rec) {
				continue
			}
			if last != nil {
				put(last, 0)
			}
			last = &rows[j]
		}
		switch {
		case err != nil:
			recorded = append(recorded, old[i]) // its range may have no other record
		case last != nil:
			put(last, old[i].ref)
		default:
			s.ranges.Remove(&old[i].ref)
		}
		for first < len(rows) && rows[first].ref != 0 {
			first++
		}
	}
	for i := range rows {
		if rows[i].ref == 0 && err == nil {
			put(&rows[i], 0)
		}
		if rows[i].ref != 0 {
			recorded = append(recorded, rows[i])
		}
	}
	return recorded, err
}

// identity records the identity of the client, or returns the one that the file has.
func (s *State) identity(r *clientRecord) (*clientRecord, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.client.All(func(_ slotfile.Ref, kept *clientRecord) error {
		r, s.named = kept, true
		return nil
	})
	if err == nil && !s.named {
		_, err = s.client.Add(r, 0)
		s.named = err == nil
	}
	return r, err
}

// A keptHolder has the records of a holder that an earlier process left.
type keptHolder struct {
	key  lockKey
	h    *holder
	rows []row // of all kinds, in the order of their sequence numbers
}

// load returns what an earlier process recorded. It removes records that are not valid or not
// complete, and returns the number of invalid ones.
func (s *State) load() (kept []*keptHolder, invalid int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	byRef := make(map[slotfile.Ref]*keptHolder)
	svids, ids := make(map[uint32]Owner), make(map[Owner]uint32)
	err = s.owners.All(func(ref slotfile.Ref, r *ownerRecord) error {
		if r.valid() {
			key := r.key()
			id, svidUsed := svids[r.svid]
			svid, idUsed := ids[key.id]
			if s.holders[key] == nil && (!svidUsed || id == key.id) && (!idUsed || svid == r.svid) {
				svids[r.svid], ids[key.id] = key.id, r.svid
				k := &keptHolder{key: key, h: &holder{ref: ref, rec: *r}}
				byRef[ref], s.holders[key] = k, k.h
				return nil
			}
		}
		invalid++
		s.owners.Remove(&ref)
		return nil
	})
	if err != nil {
		return nil, invalid, err
	}
	err = s.ranges.All(func(ref slotfile.Ref, r *rangeRecord) error {
		if k := byRef[r.owner]; k != nil && r.valid() {
			s.seq = max(s.seq, r.seq)
			k.rows = append(k.rows, row{ref, *r})
			return nil
		}
		invalid++
		s.ranges.Remove(&ref)
		return nil
	})
	for _, k := range byRef {
		slices.SortFunc(k.rows, func(a, b row) int { return cmp.Compare(a.rec.seq, b.rec.seq) })
		for _, r := range k.rows {
			if r.rec.kind.intent() {
				k.h.intents++
			} else {
				k.h.rows = append(k.h.rows, r)
			}
		}
		if len(k.rows) == 0 {
			s.dropHolder(k.key, k.h)
			continue
		}
		slices.SortFunc(k.h.rows, func(a, b row) int { return cmp.Compare(a.rec.start, b.rec.start) })
		s.copy.put(k.h.ref, &k.h.rec)
		kept = append(kept, k)
	}
	return kept, invalid, err
}

// rangesOf returns the records of the locks of an owner of a file, held and lost ones, that overlap
// the bytes start to end or are adjacent to them.
func rangesOf(f *file, id Owner, start, end uint64) []rangeRecord {
	var all []rangeRecord
	add := func(t *rangelock.Table[Owner], kind rangeKind) {
		for _, l := range t.Touching(id, start, end) {
			all = append(all, newRange(kind, &l))
		}
	}
	add(&f.locks, rangeHeld)
	add(&f.lost, rangeLost)
	slices.SortFunc(all, func(a, b rangeRecord) int { return cmp.Compare(a.start, b.start) })
	return all
}

func keyOf(f *file, id Owner) lockKey { return lockKey{f.fh, id} }
