package restart

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Files that a worker has locked while the daemon restarts. The bytes from 0 to lockedBytes of the
// first are locked by fcntl(2), the second by flock(2).
const (
	lockedRange, lockedFile = "locked-range", "locked-file"
	lockedBytes             = 100
)

// flocks lets three owners increment a number in a file under flock(2). Each owner has an open
// file.
func (l *load) flocks(dir string, _ *rand.Rand) error {
	path := filepath.Join(dir, "file")
	var inside, total atomic.Int64
	errs := make([]error, 3)
	var group sync.WaitGroup
	for w := range errs {
		group.Go(func() {
			f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
			if err != nil {
				errs[w] = err
				return
			}
			for range l.each("flock") {
				if err := increment(f, &inside); err != nil {
					errs[w] = fmt.Errorf("owner %d: %w", w, err)
					l.stop.Store(true)
					break
				}
				total.Add(1)
			}
			errs[w] = errors.Join(errs[w], f.Close())
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	want := fmt.Appendf(nil, "%010d", total.Load())
	return errors.Join(compare(path, want), l.keep(path, want))
}

// ignoringSignals repeats a call that a signal of Go's runtime has interrupted.
func ignoringSignals(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// increment increments the number in a file under flock(2). inside counts the owners of the lock.
func increment(f *os.File, inside *atomic.Int64) error {
	lock := func(how int) error { return ignoringSignals(func() error { return unix.Flock(int(f.Fd()), how) }) }
	if err := lock(unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if n := inside.Add(1); n != 1 {
		return fmt.Errorf("%d owners have the lock", n)
	}
	b := make([]byte, 10)
	n, _ := f.ReadAt(b, 0)
	k, err := strconv.Atoi(strings.TrimLeft(string(b[:n]), "0"))
	if err != nil && strings.Trim(string(b[:n]), "0") != "" {
		return err
	}
	time.Sleep(time.Millisecond)
	if _, err := f.WriteAt(fmt.Appendf(nil, "%010d", k+1), 0); err != nil {
		return err
	}
	inside.Add(-1)
	if err := lock(unix.LOCK_UN); err != nil {
		return fmt.Errorf("unlock: %w", err)
	}
	return nil
}

// probe tries to lock what another worker has locked.
func (l *load) probe(string, *rand.Rand) error {
	a, err := os.OpenFile(filepath.Join(l.dir, lockedRange), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := os.OpenFile(filepath.Join(l.dir, lockedFile), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer b.Close()
	for k := range l.each("probe") {
		fl := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(k % lockedBytes), Len: 1}
		err := ignoringSignals(func() error { return unix.FcntlFlock(a.Fd(), unix.F_SETLK, &fl) })
		if err != unix.EAGAIN {
			return fmt.Errorf("lock of a locked range: got %w, want EAGAIN", err)
		}
		err = ignoringSignals(func() error { return unix.Flock(int(b.Fd()), unix.LOCK_SH|unix.LOCK_NB) })
		if err != unix.EAGAIN {
			return fmt.Errorf("flock of a locked file: got %w, want EAGAIN", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}
