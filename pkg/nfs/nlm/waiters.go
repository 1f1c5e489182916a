package nlm

import (
	"slices"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/rangelock"
)

// maxTrying bounds the requests of one file that a release of locks makes ask the server at the
// same time. The others follow one by one, so that a request of another program waits behind few of
// them. More than one, so that one is ready when another has ended.
const maxTrying = 2

// A waiter is a request that waits for locks of other owners of the mount.
type waiter struct {
	l    *Lock
	wake chan struct{} // capacity 1

	// Guarded by waiters.mu.
	state waiterState
	told  bool // woken: wake has a token, or the request runs

	holder Owner // asleep: an owner that excludes the request; guarded by waitGraph.mu
}

// A waiterState says what a waiter does.
type waiterState uint8

const (
	away   waiterState = iota // it does not wait for a lock of the mount
	asleep                    // a lock, or a request that is woken, excludes it
	woken                     // nothing excludes it: it asks the server, or will
)

func newWaiter(l *Lock) *waiter { return &waiter{l: l, wake: make(chan struct{}, 1)} }

func (w *waiter) excludes(l *Lock) bool {
	return w.l.Owner != l.Owner && (w.l.Exclusive || l.Exclusive) && w.l.Start <= l.End && l.Start <= w.l.End
}

// waiters are the requests for one file that wait for locks of other owners of the mount. Each one
// that sleeps knows one owner that excludes it: by a lock in the table, or by a request that is
// woken and may get the lock. Only a change of that owner can wake it. So a release wakes those
// requests that can be granted, and each of them once.
//
// The caller has the turn of the file for sleep, run and change, and not for leave.
type waiters struct {
	mu     sync.Mutex // guards the fields below, and changes of the table
	table  *rangelock.Table[Owner]
	graph  *waitGraph
	asleep map[Owner][]*waiter // by the owner that excludes them
	woken  []*waiter           // in order
	trying int                 // those that are told
}

// sleep makes a request wait that a lock of holder excludes. It returns false for a deadlock of
// owners of this mount; the request then is away.
func (ws *waiters) sleep(w *waiter, holder Owner) bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	was := w.state
	ws.remove(w)
	select {
	case <-w.wake: // of an earlier sleep
	default:
	}
	ok := ws.graph.begin(w, holder)
	if ok {
		w.state = asleep
		ws.add(w, holder)
	}
	if was == woken {
		ws.released(w.l.Owner, w.l.Start, w.l.End)
	}
	return ok
}

// run notes that a request that may sleep asks the server: it excludes others.
func (ws *waiters) run(w *waiter) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w.state == asleep {
		ws.remove(w)
		ws.wake(w)
	}
	if w.state == woken && !w.told {
		w.told = true
		ws.trying++
	}
}

// leave ends the wait for locks of the mount. granted means that the table has the lock of the
// request, which excludes what the request has excluded.
func (ws *waiters) leave(w *waiter, granted bool) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	was := w.state
	ws.remove(w)
	if was == woken && !granted {
		ws.released(w.l.Owner, w.l.Start, w.l.End)
	}
	ws.tell()
}

// change runs a change of the table. If it releases or weakens locks of the owner from start to
// end, it wakes the requests that can be granted.
func (ws *waiters) change(do func(), releases bool, owner Owner, start, end uint64) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	do()
	if releases {
		ws.released(owner, start, end)
	}
}

// released looks for requests that the owner has excluded from start to end. The caller holds mu.
func (ws *waiters) released(owner Owner, start, end uint64) {
	all := ws.asleep[owner]
	kept := all[:0]
	for _, w := range all {
		if w.l.End < start || end < w.l.Start {
			kept = append(kept, w)
			continue
		}
		switch holder, excluded := ws.excluderOf(w); {
		case excluded && holder == owner:
			kept = append(kept, w)
		case excluded && ws.graph.begin(w, holder):
			ws.add(w, holder)
		default: // a deadlock is its own to find
			ws.wake(w)
		}
	}
	clear(all[len(kept):])
	if len(kept) > 0 {
		ws.asleep[owner] = kept
	} else {
		delete(ws.asleep, owner)
	}
	ws.tell()
}

// excluderOf returns an owner that excludes a request.
func (ws *waiters) excluderOf(w *waiter) (holder Owner, excluded bool) {
	if l := ws.table.Conflict(w.l); l != nil {
		return l.Owner, true
	}
	for _, other := range ws.woken {
		if other.excludes(w.l) {
			return other.l.Owner, true
		}
	}
	return Owner{}, false
}

func (ws *waiters) add(w *waiter, holder Owner) {
	if ws.asleep == nil {
		ws.asleep = make(map[Owner][]*waiter)
	}
	ws.asleep[holder] = append(ws.asleep[holder], w)
}

// wake lets a request ask the server when its time comes. It is in no list.
func (ws *waiters) wake(w *waiter) {
	ws.graph.end(w)
	w.state = woken
	ws.woken = append(ws.woken, w)
}

// tell gives their time to the next woken requests.
func (ws *waiters) tell() {
	for _, w := range ws.woken {
		if ws.trying >= maxTrying {
			return
		}
		if w.told {
			continue
		}
		w.told = true
		ws.trying++
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// remove makes a request away. The caller holds mu.
func (ws *waiters) remove(w *waiter) {
	switch w.state {
	case asleep:
		holder := ws.graph.end(w)
		rest := ws.asleep[holder]
		i := slices.Index(rest, w)
		ws.asleep[holder] = slices.Delete(rest, i, i+1)
		if len(rest) == 1 {
			delete(ws.asleep, holder)
		}
	case woken:
		i := slices.Index(ws.woken, w)
		ws.woken = slices.Delete(ws.woken, i, i+1)
		if w.told {
			w.told = false
			ws.trying--
		}
	}
	w.state = away
}

// A waitGraph knows for which owner the requests of each owner wait, in all files of a mount. As in
// the kernel, flock(2) has no deadlock detection.
type waitGraph struct {
	mu    sync.Mutex // guards the fields below, and waiter.holder
	waits map[Owner]map[*waiter]struct{}
}

// begin records that a request waits for holder, and no longer for another owner. It returns false,
// and records nothing, for a deadlock of owners of this mount.
func (g *waitGraph) begin(w *waiter, holder Owner) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	id := w.l.Owner
	if id.Kind == Posix {
		if g.reaches(holder, id) {
			return false
		}
		if g.waits[id] == nil {
			if g.waits == nil {
				g.waits = make(map[Owner]map[*waiter]struct{})
			}
			g.waits[id] = make(map[*waiter]struct{})
		}
		g.waits[id][w] = struct{}{}
	}
	w.holder = holder
	return true
}

// reaches reports whether an owner is or waits, perhaps through others, for to.
func (g *waitGraph) reaches(from, to Owner) bool {
	if from == to || len(g.waits[from]) == 0 {
		return from == to
	}
	next, seen := []Owner{from}, map[Owner]struct{}{from: {}}
	for len(next) > 0 {
		at := next[len(next)-1]
		next = next[:len(next)-1]
		if at == to {
			return true
		}
		for w := range g.waits[at] {
			if _, known := seen[w.holder]; !known {
				seen[w.holder] = struct{}{}
				next = append(next, w.holder)
			}
		}
	}
	return false
}

// end records that a request does not wait, and returns the owner that it waited for last.
func (g *waitGraph) end(w *waiter) (holder Owner) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if all := g.waits[w.l.Owner]; all != nil {
		delete(all, w)
		if len(all) == 0 {
			delete(g.waits, w.l.Owner)
		}
	}
	return w.holder
}
