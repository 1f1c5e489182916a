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

// An Arena is one allocation of Alloc. A provider that registers memory once and keeps it
// registered attaches its registration to the arena, and Free detaches it before it unmaps the
// memory. An Arena is safe for concurrent use.
type Arena struct {
	mem []byte // whole pages

	mu       sync.Mutex
	attached map[any]Attachment // by owner; guarded by mu
	freed    bool               // guarded by mu
}

// An Attachment is a provider's registration of an arena.
type Attachment interface {
	// Detach releases the registration. Free calls it once, before it unmaps the memory. Detach
	// must not call methods of the arena.
	Detach()
}

// arenas lists the allocated arenas in the order of their addresses. A change replaces the slice,
// so that ArenaOf needs no lock.
var arenas struct {
	mu   sync.Mutex // held while list is replaced
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

// dropArena removes the arena that starts at mem from the list and detaches its attachments.
// Without an arena at mem dropArena does nothing.
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

// findArena returns the index of the arena that starts at addr, or the index to insert it at.
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

// ArenaOf returns the arena that contains all of b, or nil when b is empty or does not lie in
// memory of Alloc. ArenaOf takes no lock.
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

// Bytes returns the arena's memory, which is a whole number of pages. The caller must not use it
// after its Attachment was detached.
func (a *Arena) Bytes() []byte { return a.mem }

// Attached returns owner's attachment. When there is none, it calls attach and keeps the result.
// Attached calls attach with the arena locked, so that only one caller attaches. Attached returns
// ErrFreed when the arena was freed, or the error of attach.
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

// Forget removes owner's attachment from the arena, and returns it without detaching it. Without an
// attachment Forget returns nil.
func (a *Arena) Forget(owner any) Attachment {
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.attached[owner]
	delete(a.attached, owner)
	return x
}
