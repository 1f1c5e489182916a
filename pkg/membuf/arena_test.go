package membuf

import (
	"errors"
	"sync"
	"testing"
)

func mustAlloc(t *testing.T, n int) []byte {
	t.Helper()
	b, err := Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestArenaOf(t *testing.T) {
	var all [][]byte
	for _, n := range []int{1, 4096, 100000, 8192, 1} {
		all = append(all, mustAlloc(t, n))
	}
	for i, b := range all {
		a := ArenaOf(b)
		if a == nil || &a.Bytes()[0] != &b[0] || len(a.Bytes()) < len(b) || len(a.Bytes())%4096 != 0 {
			t.Fatalf("arena of buffer %d: %v", i, a)
		}
		if ArenaOf(b[len(b)-1:]) != a || ArenaOf(a.Bytes()) != a {
			t.Errorf("buffer %d: its last octet or its rounded up end is in another arena", i)
		}
		if ArenaOf(b[:0]) != nil {
			t.Errorf("buffer %d: no octets are in an arena", i)
		}
	}
	if ArenaOf(make([]byte, 10)) != nil {
		t.Error("memory of the Go heap is in an arena")
	}
	Free(all[2])
	for i, b := range all {
		if i != 2 && ArenaOf(b) == nil {
			t.Errorf("buffer %d lost its arena to another", i)
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

func TestArenaAttachments(t *testing.T) {
	b := mustAlloc(t, 4096)
	a := ArenaOf(b)
	made := 0
	x := &attachment{}
	attach := func() (Attachment, error) { made++; return x, nil }
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if got, err := a.Attached("one", attach); got != x || err != nil {
				t.Errorf("attached %v, %v", got, err)
			}
		}()
	}
	wg.Wait()
	if made != 1 {
		t.Errorf("made %d times for one owner", made)
	}
	bad := errors.New("no memory")
	if _, err := a.Attached("two", func() (Attachment, error) { return nil, bad }); err != bad {
		t.Errorf("error of the owner: %v", err)
	}
	gone := &attachment{}
	if _, err := a.Attached("three", func() (Attachment, error) { return gone, nil }); err != nil {
		t.Fatal(err)
	}
	if got := a.Forget("three"); got != gone {
		t.Errorf("forgot %v", got)
	}
	Free(b)
	if x.detached != 1 || gone.detached != 0 {
		t.Errorf("detached %d times, and %d times what was forgotten", x.detached, gone.detached)
	}
	if _, err := a.Attached("four", attach); !errors.Is(err, ErrFreed) {
		t.Errorf("attached to freed memory: %v", err)
	}
}
