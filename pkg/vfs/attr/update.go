package attr

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// Update stores attributes from a reply whose call was sent at the clock start. Update stores
// nothing in three cases: the object was changed or updated after start, so that the newer state is
// unknown; the object has data that the server does not have; or the attributes describe another
// object. foreign is true when the attributes show that another client changed a directory: an epoch
// has then begun. Pages of a file that another client changed become outdated.
func (c *Cache) Update(s *State, a *nfs.Attr, start uint64) (stored, foreign bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.update(s, a, start)
}

func (c *Cache) update(s *State, a *nfs.Attr, start uint64) (stored, foreign bool) {
	if start < s.change || s.pending > 0 || s.isOther(a) {
		return false, false
	}
	next := a.Stamp()
	changed := s.known && s.attr.Stamp() != next
	foreign = a.Type == nfs.Directory && s.known && c.changedByOther(s, s.attr.Stamp(), next)
	if foreign {
		c.newEpoch(s)
	}
	if s.pagesKnown {
		s.pagesKnown = !c.changedByOther(s, *s.pages, next)
		s.setPages(next)
	}
	c.age(s, a, changed)
	s.attr, s.known, s.valid = *a, true, true
	s.received, s.asked = Now(), start
	if s.hidden && s.attr.Nlink > 0 {
		s.attr.Nlink--
	}
	s.size, s.sizeUnknown = a.Size, false
	s.change = c.Tick()
	return true, foreign
}

// age sets how long the new attributes a may be cached, as Linux's NFS client does
// (nfs_update_inode). The time is the minimum after a change, and doubles while the object stays the
// same for that time. The caller holds mu.
func (c *Cache) age(s *State, a *nfs.Attr, changed bool) {
	minAge, maxAge := c.RegMin, c.RegMax
	if a.Type == nfs.Directory {
		minAge, maxAge = c.DirMin, c.DirMax
	}
	at := Now()
	switch {
	case !s.known || changed:
		s.ttl, s.ttlSetAt = minAge, at
	case at.Sub(s.ttlSetAt) >= s.ttl:
		s.ttl, s.ttlSetAt = min(2*max(s.ttl, minAge), maxAge), at
	}
}

// changedByOther reports whether the difference between two states of an object shows a change by
// another client. The ctime alone is no sign when this mount may have changed it since the call that
// returned the attributes. The caller holds mu.
func (c *Cache) changedByOther(s *State, older, newer nfs.Stamp) bool {
	if older.Size != newer.Size || older.Mtime != newer.Mtime {
		return true
	}
	return older.Ctime != newer.Ctime && s.asked >= c.lastUnseen(s)
}

// lastUnseen returns the clock after the last call of this mount that may have changed the ctime of
// the object, although its reply does not contain the attributes of the object. The call is a rename,
// or for a file also the removal of one of its names. The caller holds mu.
func (c *Cache) lastUnseen(s *State) uint64 {
	if s.isDir() {
		return c.LastRename()
	}
	return max(c.LastRename(), c.Removal.At())
}

// newEpoch makes all that is known of the names and rights of the object outdated. Replies to calls
// that were sent before do not count, because the server may have executed these calls before the
// change. The caller holds mu.
func (c *Cache) newEpoch(s *State) {
	s.epochStart = c.Tick()
}

// NewEpoch records a change of the rights of an object.
func (c *Cache) NewEpoch(s *State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.newEpoch(s)
}

// Invalidate marks the attributes as outdated because the object is being changed. Update then
// refuses replies to calls that were sent before.
func (c *Cache) Invalidate(s *State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.invalidate(s)
}

func (c *Cache) invalidate(s *State) {
	s.valid, s.unsent = false, false
	s.change = c.Tick()
}

// Changed stores the attributes in the reply to a change by this mount (RFC 1813 §2.6). alone means
// that this mount had no other change of the object in flight. Only then do the attributes from
// before the call show changes by other clients. A change by this mount alone keeps pages, names,
// and the age of the attributes. foreign is as in Update.
func (c *Cache) Changed(s *State, ch *nfs.Change, start uint64, alone bool) (foreign bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.changed(s, ch, start, alone)
}

func (c *Cache) changed(s *State, ch *nfs.Change, start uint64, alone bool) (foreign bool) {
	own := c.ownChange(s, ch, alone)
	if own && ch.HasAfter {
		s.attr.Size, s.attr.Mtime, s.attr.Ctime = ch.After.Size, ch.After.Mtime, ch.After.Ctime
	}
	if s.pagesKnown {
		s.pagesKnown = own
		if ch.HasAfter {
			s.setPages(ch.After.Stamp())
		}
	}
	stored := false
	if ch.HasAfter {
		stored, foreign = c.update(s, &ch.After, start)
	}
	if s.unsent = stored; !stored {
		c.invalidate(s)
	}
	return foreign
}

// ownChange reports whether the reply to a change by this mount shows no change by another client
// before it. A file without attributes from before the call counts as unchanged, and a directory
// counts as changed, as in Linux's NFS client. The caller holds mu.
func (c *Cache) ownChange(s *State, ch *nfs.Change, alone bool) bool {
	switch {
	case !s.known:
		return false
	case !ch.HasBefore:
		return !s.isDir()
	case !alone:
		return true
	}
	return !c.changedByOther(s, s.attr.Stamp(), ch.Before)
}

// Committed stores the attributes in the reply to a COMMIT, which changes no attribute.
func (c *Cache) Committed(s *State, ch *nfs.Change, start uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stored := false
	if ch.HasAfter {
		stored, _ = c.update(s, &ch.After, start)
	}
	if s.unsent = stored; !stored {
		c.invalidate(s)
	}
}

// SawRenames records that the attributes from the reply to a call sent at start include all renames
// of this mount until the clock seen.
func (s *State) SawRenames(start, seen uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asked == start {
		s.asked = seen
	}
}

// Take returns attributes for a reply to a lookup. The kernel may cache them for the time left.
// unsent is true when the kernel did not have them yet. ok is false when the server must be asked.
func (c *Cache) Take(s *State) (a nfs.Attr, left time.Duration, unsent, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := c.BlindRename.At()
	if !s.isDir() && s.attr.Nlink > 1 {
		changed = max(changed, c.BlindRemoval.At())
	}
	left = s.ttl - Now().Sub(s.received)
	if !s.valid || s.pending > 0 || left <= 0 || s.asked < changed {
		return a, 0, false, false
	}
	unsent, s.unsent = s.unsent, false
	return s.attr, left, unsent, true
}

// TakeUnsent returns attributes that the kernel does not have yet. The kernel requests them because
// of the change by this mount with which they came. left is how long the kernel may cache them. ok is
// false when there are none. TakeUnsent returns attributes once, so that a second request asks the
// server.
func (c *Cache) TakeUnsent(s *State) (a nfs.Attr, left time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := !s.unsent
	s.unsent = false
	left = s.ttl - Now().Sub(s.received)
	if sent || !s.valid || s.pending > 0 || s.asked < c.lastUnseen(s) || left <= 0 || c.Off {
		return a, 0, false
	}
	return s.attr, left, true
}

// TakeChanged returns the attributes after a change by this mount, if they are known. The kernel gets
// them with the reply to the change.
func (s *State) TakeChanged() (a nfs.Attr, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.valid {
		return a, false
	}
	s.unsent = false
	return s.attr, true
}

// Offer lets the kernel get the attributes with its next request for them.
func (s *State) Offer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unsent = s.valid
}

// Sent records that the kernel gets the attributes a.
func (s *State) Sent(a *nfs.Attr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = stampSum(a.Stamp())
}

// OfferNewer is Offer if the attributes a differ from those that the kernel got last. It reports
// whether they do.
func (s *State) OfferNewer(a *nfs.Attr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent == stampSum(a.Stamp()) {
		return false
	}
	s.unsent = s.valid
	return true
}
