package membuf

import (
	"errors"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestArenaOfFindsAllocation(t *testing.T) {
	var all [][]byte
	for _, n := range []int{1, 4096, 100000, 8192, 1} {
		b, err := Alloc(n)
		kit.Must(t, err)
		all = append(all, b)
	}
	for i, b := range all {
		a := ArenaOf(b)
		if a == nil || &a.Bytes()[0] != &b[0] || len(a.Bytes()) < len(b) || len(a.Bytes())%4096 != 0 {
			t.Fatalf("arena of buffer %d: got %v, want one of whole pages that starts with the buffer", i, a)
		}
		if ArenaOf(b[len(b)-1:]) != a || ArenaOf(a.Bytes()) != a {
			t.Errorf("buffer %d: its last byte or its page tail lies in another arena", i)
		}
		if ArenaOf(b[:0]) != nil {
			t.Errorf("buffer %d: arena of an empty slice: got one, want nil", i)
		}
	}
	if ArenaOf(make([]byte, 10)) != nil {
		t.Error("arena of memory of the Go heap: got one, want nil")
	}
	Free(all[2])
	for i, b := range all {
		if i != 2 && ArenaOf(b) == nil {
			t.Errorf("arena of buffer %d after another buffer was freed: got nil", i)
		}
	}
	for i, b := range all {
		if i != 2 {
			Free(b)
		}
	}
}

type attachment struct{ detached int }

func (a *attachment) Detach() { a.detached++ }

func TestFreeDetachesAttachments(t *testing.T) {
	b, err := Alloc(4096)
	kit.Must(t, err)
	a := ArenaOf(b)
	calls := 0
	x := &attachment{}
	attach := func() (Attachment, error) { calls++; return x, nil }
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if got, err := a.Attached("one", attach); got != x || err != nil {
				t.Errorf("attachment of owner one: got %v, %v, want %v, nil", got, err, x)
			}
		}()
	}
	wg.Wait()
	if calls != 1 {
		t.Errorf("calls of attach for one owner: got %d, want 1", calls)
	}
	failure := errors.New("no memory")
	if _, err := a.Attached("two", func() (Attachment, error) { return nil, failure }); err != failure {
		t.Errorf("Attached: got error %v, want %v", err, failure)
	}
	forgotten := &attachment{}
	_, err = a.Attached("three", func() (Attachment, error) { return forgotten, nil })
	kit.Must(t, err)
	if got := a.Forget("three"); got != forgotten {
		t.Errorf("Forget: got %v, want %v", got, forgotten)
	}
	Free(b)
	if x.detached != 1 || forgotten.detached != 0 {
		t.Errorf("calls of Detach: got %d, want 1; after Forget: got %d, want 0", x.detached, forgotten.detached)
	}
	if _, err := a.Attached("four", attach); !errors.Is(err, ErrFreed) {
		t.Errorf("Attached after Free: got %v, want ErrFreed", err)
	}
}
