package membuf

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ErrFreed means that the arena's memory was already freed.
var ErrFreed = errors.New("membuf: arena was freed")

// An Arena is one allocation of Alloc, for providers that register memory as a whole and keep it
// registered: each attaches what it has made of the arena, and is told before the memory goes. Safe
// for concurrent use.
type Arena struct {
	mem []byte // whole pages

	mu       sync.Mutex
	attached map[any]Attachment // guarded by mu; by owner
	freed    bool               // guarded by mu
}

// An Attachment is what a provider has made of an arena.
type Attachment interface {
	// Detach releases it: Free calls it once, before it unmaps the memory. It must not use the
	// arena.
	Detach()
}

// arenas are all that live, in the order of their addresses. The slice is replaced, never changed,
// so that ArenaOf takes no lock.
var arenas struct {
	mu   sync.Mutex // held by those who replace it
	list atomic.Pointer[[]*Arena]
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

func addArena(mem []byte) {
	arenas.mu.Lock()
	defer arenas.mu.Unlock()
	var old []*Arena
	if p := arenas.list.Load(); p != nil {
		old = *p
	}
	i, _ := findArena(old, address(mem))
	list := slices.Insert(slices.Clone(old), i, &Arena{mem: mem})
	arenas.list.Store(&list)
}

// dropArena takes the arena that starts at mem off the list and releases what is attached to it.
// Without such an arena it does nothing.
func dropArena(mem []byte) {
	arenas.mu.Lock()
	var a *Arena
	if p := arenas.list.Load(); p != nil {
		if i, ok := findArena(*p, address(mem)); ok {
			a = (*p)[i]
			list := slices.Delete(slices.Clone(*p), i, i+1)
			arenas.list.Store(&list)
		}
	}
	arenas.mu.Unlock()
	if a == nil {
		return
	}
	a.mu.Lock()
	attached := a.attached
	a.attached, a.freed = nil, true
	a.mu.Unlock()
	for _, x := range attached {
		x.Detach()
	}
}

// findArena is the place of the arena that starts at addr, or where it would be.
func findArena(list []*Arena, addr uintptr) (int, bool) {
	lo, hi := 0, len(list)
	for lo < hi {
		if mid := int(uint(lo+hi) >> 1); address(list[mid].mem) < addr {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(list) && address(list[lo].mem) == addr
}

// ArenaOf returns the arena that all of b lies in, or nil when b is empty or is not memory of
// Alloc. It takes no lock.
func ArenaOf(b []byte) *Arena {
	p := arenas.list.Load()
	if len(b) == 0 || p == nil {
		return nil
	}
	start := address(b)
	i, exact := findArena(*p, start)
	if !exact {
		i--
	}
	if i < 0 {
		return nil
	}
	a := (*p)[i]
	if start-address(a.mem)+uintptr(len(b)) > uintptr(len(a.mem)) {
		return nil
	}
	return a
}

// Bytes is the arena's memory, whole pages. Whoever keeps it must not use it once its Attachment
// was detached.
func (a *Arena) Bytes() []byte { return a.mem }

// Attached returns what owner has attached, or attaches what attach makes. attach runs with the
// arena locked, so that it runs once.
func (a *Arena) Attached(owner any, attach func() (Attachment, error)) (Attachment, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if x := a.attached[owner]; x != nil {
		return x, nil
	}
	if a.freed {
		return nil, ErrFreed
	}
	x, err := attach()
	if err != nil {
		return nil, err
	}
	if a.attached == nil {
		a.attached = make(map[any]Attachment)
	}
	a.attached[owner] = x
	return x, nil
}

// Forget takes what owner has attached off the arena and returns it, without detaching it, or nil.
func (a *Arena) Forget(owner any) Attachment {
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.attached[owner]
	delete(a.attached, owner)
	return x
}
