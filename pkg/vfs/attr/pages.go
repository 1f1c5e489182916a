package attr

import (
	"math"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// unknownPages is the state of the kernel's pages of a file after a restart.
var unknownPages = nfs.Stamp{Size: math.MaxUint64}

// setPages sets the state of the pages. The caller holds mu.
func (s *State) setPages(now nfs.Stamp) {
	if s.pages == nil {
		s.pages = new(nfs.Stamp)
	}
	*s.pages = now
}

// Buffer records that a file is opened for I/O through the kernel's pages.
func (s *State) Buffer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buffered = true
}

// Revalidate reports whether the kernel's pages match the attributes a, which are new from the
// server, and records a as the state of the pages from now on. If drop is true, the caller must make
// the kernel drop the pages, and then call Dropped.
func (s *State) Revalidate(a *nfs.Attr, cacheable bool) (unchanged, drop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := a.Stamp()
	unchanged = cacheable && s.pagesKnown && s.drops == 0 && *s.pages == now
	drop = !unchanged && s.pages != nil // before the first open there are no pages
	s.setPages(now)
	s.pagesKnown = cacheable
	if drop {
		s.drops++
		s.unsent = s.valid // the kernel also drops the attributes
	}
	return unchanged, drop
}

// BeginDrop must be called before the kernel drops the pages of a file, and Dropped afterwards.
func (s *State) BeginDrop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drops++
}

// Dropped reverses BeginDrop.
func (s *State) Dropped() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drops--
}

// BeginDropOutdated is BeginDrop if another client has changed the file, as far as this client
// knows. It reports whether one has.
func (s *State) BeginDropOutdated() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	outdated := s.attr.Type == nfs.Regular && s.known && s.valid && !s.pagesKnown
	if outdated {
		s.setPages(s.attr.Stamp())
		s.pagesKnown = true
		s.drops++
	}
	return outdated
}

// ForgetPages makes Revalidate drop the pages.
func (s *State) ForgetPages() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pagesKnown = false
}

// NeedsCheck reports whether the pages of an open file must be compared with the server: the
// attributes have expired, or the pages are known to be outdated.
func (c *Cache) NeedsCheck(s *State) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending == 0 && (!c.fresh(s) || !s.pagesKnown)
}
