package fair

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestQueueServesUsersInTurn adds, takes and removes entries. A step is the name of an entry to
// add, whose first letter is its user; "-" and a name to remove; or ">" and the names to be taken.
func TestQueueServesUsersInTurn(t *testing.T) {
	for _, c := range []struct{ name, steps string }{
		{"one user, first come first served", "a1 a2 a3 >a1 a4 >a2 >a3 >a4"},
		{"a late user is next but one", "a1 a2 a3 a4 b1 >a1 >b1 >a2 >a3 >a4"},
		{"users alternate", "a1 a2 a3 b1 b2 c1 >a1 >b1 >c1 >a2 >b2 >a3"},
		{"one entry at a time", "a1 a2 a3 a4 >a1 b1 >a2 >b1 b2 >a3 >b2 >a4"},
		{"a user who leaves loses the turn", "a1 b1 c1 -a1 >b1 a2 >c1 >a2"},
		{"the turn stays with a user who removes one entry", "a1 a2 b1 -a1 >a2 >b1"},
		{"removal in the middle", "a1 a2 a3 b1 -a2 >a1 >b1 >a3"},
		{"removal at the end", "a1 a2 -a2 a3 >a1 >a3"},
		{"removal of the last user of the ring", "a1 b1 c1 -c1 d1 >a1 >b1 >d1"},
		{"empty and used again", "a1 >a1 b1 a2 >b1 >a2"},
	} {
		var q Queue[string]
		entries := make(map[string]*Entry[string])
		n := 0
		for _, step := range strings.Fields(c.steps) {
			switch step[0] {
			case '-':
				q.Remove(entries[step[1:]])
				q.Remove(entries[step[1:]])
				n--
			case '>':
				first, e := q.First(), q.Take()
				if e == nil || e != first || e.Value != step[1:] || e.Queued() {
					t.Fatalf("%s: taken: got %+v, want %s", c.name, e, step[1:])
				}
				n--
			default:
				e := &Entry[string]{Value: step}
				entries[step] = e
				q.Add(e, uint32(step[0]))
				n++
			}
			if q.Len() != n {
				t.Fatalf("%s: entries after %s: got %d, want %d", c.name, step, q.Len(), n)
			}
		}
		if e := q.Take(); e != nil || len(q.classes) != 0 {
			t.Errorf("%s: left at the end: %+v, %d classes, want none", c.name, e, len(q.classes))
		}
	}
}

// TestQueueServesUserWithinOneRound makes random changes. An entry that is the only one of its user
// waits for at most one entry of each other user. The entries of one user keep their order.
func TestQueueServesUserWithinOneRound(t *testing.T) {
	const users = 5
	rnd := rand.New(rand.NewPCG(1, 2))
	var q Queue[[2]int] // user and number of entries of other users taken since it was first
	var queued [users][]*Entry[[2]int]
	for range 100_000 {
		user := rnd.IntN(users)
		switch l := queued[user]; {
		case rnd.IntN(3) == 0:
			e := &Entry[[2]int]{Value: [2]int{user, 0}}
			q.Add(e, uint32(user))
			queued[user] = append(l, e)
		case rnd.IntN(3) == 0 && len(l) > 0:
			i := rnd.IntN(len(l))
			q.Remove(l[i])
			queued[user] = slices.Delete(l, i, i+1)
		default:
			e := q.Take()
			if e == nil {
				continue
			}
			u := e.Value[0]
			if e != queued[u][0] {
				t.Fatal("an entry was taken before an older one of its user")
			}
			queued[u] = queued[u][1:]
			for _, l := range queued {
				if len(l) > 0 && l[0].Value[0] != u {
					if l[0].Value[1]++; l[0].Value[1] >= users {
						t.Fatalf("the first entry of a user waited for %d entries of %d users", l[0].Value[1], users-1)
					}
				}
			}
		}
	}
}

func TestQueueDoesNotAllocate(t *testing.T) {
	var q Queue[int]
	entries := make([]Entry[int], 64)
	if n := testing.AllocsPerRun(100, func() {
		for i := range entries {
			q.Add(&entries[i], uint32(i%8))
		}
		for q.Take() != nil {
		}
	}); n != 0 {
		t.Errorf("allocations of 64 entries: got %v, want 0", n)
	}
}
