package fair

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// take takes n places and returns how many the user got, and the last error.
func take(l *Limit, uid uint32, n int) (got int, err error) {
	for range n {
		if err = l.Take(uid); err != nil {
			return got, err
		}
		got++
	}
	return got, nil
}

// TestUserGetsHalf takes all places that users can get. Each step shows what is left for the next
// user.
func TestUserGetsHalf(t *testing.T) {
	l := NewLimit("test", 64)
	for _, c := range []struct {
		uid  uint32
		want int
		err  error
	}{{1, 32, ErrShare}, {2, 28, ErrFull}, {3, 0, ErrFull}, {0, 4, ErrFull}} {
		if got, err := take(l, c.uid, 65); got != c.want || !errors.Is(err, c.err) {
			t.Errorf("uid %d: got %d places, then error %v; want %d, %v", c.uid, got, err, c.want, c.err)
		}
	}
	l.Release(0)
	l.Add(1, -31)
	if got, err := take(l, 3, 65); got != 28 || !errors.Is(err, ErrFull) {
		t.Errorf("after releases: got %d places, then error %v; want 28, %v", got, err, ErrFull)
	}
	l.Add(1, -1)
	l.Add(2, -28)
	l.Add(3, -28)
	l.Add(0, -3)
	if l.used != 0 || len(l.users) != 0 {
		t.Errorf("after all releases: got %d places, users %v", l.used, l.users)
	}
}

func TestRootGetsWholeTable(t *testing.T) {
	if got, err := take(NewLimit("test", 64), 0, 65); got != 64 || !errors.Is(err, ErrFull) {
		t.Errorf("got %d places, then error %v; want 64, %v", got, err, ErrFull)
	}
}

func TestWarnsOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var uids []any
		l := NewLimit("test", 2)
		l.Warn = func(_ string, args ...any) { uids = append(uids, args[slices.Index(args, any("uid"))+1]) }
		for uid := range uint32(3) {
			_, _ = take(l, uid+1, 3)
			_, _ = take(l, uid+1, 3)
			time.Sleep(warnInterval / 2)
		}
		if !slices.Equal(uids, []any{uint32(1), uint32(3)}) {
			t.Errorf("got warnings for the users %v, want 1 and 3", uids)
		}
	})
}
