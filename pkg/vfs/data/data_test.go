package data

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
	"github.com/nfsrdmad/nfsrdmad/test/kit/memnfs"
)

const unit = 4096 // bytes of a buffer

// A mount is a Store without a file system.
type mount struct {
	Store
	abort context.CancelFunc
	tasks sync.WaitGroup
}

// newMount returns a mount. cfg has the fields that matter for the test.
func newMount(t *testing.T, s nfs.Server, buffers int, cfg Config) *mount {
	pool := membuf.NewPool(unit, buffers)
	t.Cleanup(pool.Close)
	m := &mount{}
	var n atomic.Uint64
	cfg.Server, cfg.Attrs, cfg.Buffers, cfg.WriteSize = s, &attr.Cache{}, pool, unit
	cfg.Busy = &nfs.BusyPolicy{Retries: &n}
	cfg.Counters = &Counters{&n, &n, &n, &n, &n, &n, &n}
	if cfg.Limit == 0 {
		cfg.Limit = 32 << 20
	}
	if cfg.MaxWrites == 0 {
		cfg.MaxWrites = 16
	}
	cfg.Background, m.abort = context.WithCancel(t.Context())
	cfg.Owned = func(ctx context.Context) context.Context { return ctx }
	cfg.Spawn, cfg.Recovered = m.tasks.Go, func() {}
	cfg.Check = func(_ *File, err error) error { return err }
	cfg.Invalid = func(*File, string) error { return syscall.EIO }
	cfg.Written, cfg.Failed = func(*File, *nfs.Change) {}, func(*File, syscall.Errno) {}
	cfg.Restarted, cfg.DropPages = func() {}, func(*File, uint64, uint64) {}
	if cfg.Lost == nil {
		cfg.Lost = func(Loss) {}
	}
	m.Init(cfg)
	return m
}

// end ends the mount. Without abort it first writes all data.
func (m *mount) end(t *testing.T, abort bool) {
	if !abort {
		m.Flush(t.Context(), 0)
	}
	m.StopTimer()
	m.abort()
	m.tasks.Wait()
	m.Close()
}

func (m *mount) file(id uint64) *File { return m.NewFile(id, nfs.Handle{}, new(attr.State)) }

// write writes n bytes at off as a program does. It returns the number of bytes taken.
func write(ctx context.Context, f *File, off uint64, n int) int {
	taken, _ := f.Write(ctx, &Writer{Cred: []byte{0}}, off, Pieces{make([]byte, n)}, n)
	return taken
}

// TestDirtyDataExpires checks that the data of an open file is stable when it is DirtyExpire old,
// and not earlier, for a file that is written once and for one that is always written.
func TestDirtyDataExpires(t *testing.T) {
	const expire = 5 * time.Second
	synctest.Test(t, func(t *testing.T) {
		s := &memnfs.Server{}
		m := newMount(t, s, 16, Config{Expire: expire})
		f := m.file(2)
		for range 2 { // the timer also works for a file that was clean
			start := s.Stable()
			write(t.Context(), f, 0, 100)
			time.Sleep(expire - time.Nanosecond)
			if n := s.Stable() - start; n != 0 {
				t.Errorf("stable bytes before the data expires: got %d, want 0", n)
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if n := s.Stable() - start; n != 100 {
				t.Errorf("stable bytes after the data expired: got %d, want 100", n)
			}
		}
		start := s.Stable()
		for i := range 60 { // one byte per second
			write(t.Context(), f, uint64(i), 1)
			time.Sleep(time.Second)
			synctest.Wait()
			if n := s.Stable() - start; n < i-int(expire/time.Second) {
				t.Errorf("stable bytes after %d s: got %d", i+1, n)
			}
		}
		m.end(t, false)
	})
}

// TestDirtyExpireOff checks that data stays in memory without Expire, and that Flush writes it.
func TestDirtyExpireOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &memnfs.Server{}
		m := newMount(t, s, 16, Config{})
		write(t.Context(), m.file(2), 0, 100)
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := s.Stable(); n != 0 {
			t.Errorf("stable bytes: got %d, want 0", n)
		}
		m.end(t, false)
		if n := s.Stable(); n != 100 {
			t.Errorf("stable bytes after Flush: got %d, want 100", n)
		}
	})
}

// TestExpiryOfHungServer checks that expired files of a server that does not answer have one flush
// each, however long this takes, and that Close reports their data.
func TestExpiryOfHungServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &memnfs.Server{Hangs: true}
		var lost []Loss
		m := newMount(t, s, 16, Config{Expire: time.Second, Lost: func(l Loss) { lost = append(lost, l) }})
		a, b := m.file(2), m.file(3)
		a.attrs.Restore(nfs.Regular, 20)
		b.attrs.Restore(nfs.Regular, 30)
		write(t.Context(), a, 10, 100)
		time.Sleep(time.Minute)
		write(t.Context(), a, 1000, 7) // stays in the filling extent: a flush of the file is running
		write(t.Context(), b, 0, 1)
		time.Sleep(time.Hour)
		synctest.Wait()
		if s.Writes() != 2 {
			t.Errorf("WRITE calls: got %d, want 2", s.Writes())
		}
		if file := m.dirty.files[a]; file == nil || !file.flushing {
			t.Errorf("dirty file: got %+v, want one that is being flushed", file)
		}
		m.end(t, true)
		want := []Loss{{FileID: 20, Offset: 10, End: 1007, Bytes: 107}, {FileID: 30, End: 1, Bytes: 1}}
		if len(lost) != 2 || lost[0] != want[0] || lost[1] != want[1] {
			t.Errorf("lost data: got %+v, want %+v", lost, want)
		}
	})
}

// TestDirtyBytesBoundsWrites checks that a writer waits at the bound of its mount while the server
// does not answer, that the pool has buffers for others, and that the end of the request ends the
// wait.
func TestDirtyBytesBoundsWrites(t *testing.T) {
	const bound = 4
	synctest.Test(t, func(t *testing.T) {
		m := newMount(t, &memnfs.Server{Hangs: true}, 16, Config{Limit: bound * unit})
		pool := m.cfg.Buffers
		ctx, cancel := context.WithCancel(t.Context())
		taken := make(chan int)
		go func() {
			taken <- write(ctx, m.file(2), 0, 10*unit)
		}()
		time.Sleep(time.Minute)
		if n := pool.Out(); n != bound {
			t.Errorf("buffers in use: got %d, want %d", n, bound)
		}
		cancel()
		if n := <-taken; n != bound*unit {
			t.Errorf("bytes taken: got %d, want %d", n, bound*unit)
		}
		m.end(t, true)
		if m.dirty.bytes != 0 || pool.Out() != 0 {
			t.Errorf("after Close: got %d dirty bytes and %d buffers in use, want 0", m.dirty.bytes, pool.Out())
		}
	})
}

// TestStuckMountLeavesOthersWritable checks that a mount whose server does not answer holds not
// more than its own bound and the total, and that the writers of another mount still finish.
func TestStuckMountLeavesOthersWritable(t *testing.T) {
	const total = 4
	for _, c := range []struct {
		name        string
		bound, want int // in buffers
	}{
		{"bound below the total", 3, 3},
		{"bound above the total", 100, total + dirtyReserve},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared := NewTotal(total * unit)
				stuck := newMount(t, &memnfs.Server{Hangs: true}, 16,
					Config{Limit: int64(c.bound) * unit, Total: shared})
				pool := stuck.cfg.Buffers
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					write(ctx, stuck.file(2), 0, 16*unit)
				}()
				time.Sleep(time.Minute)
				if n := pool.Out(); n != c.want {
					t.Errorf("buffers of the stuck mount: got %d, want %d", n, c.want)
				}
				s := &memnfs.Server{}
				works := newMount(t, s, 16, Config{Total: shared})
				if n := write(t.Context(), works.file(2), 0, 100*unit); n != 100*unit {
					t.Errorf("bytes taken on the other mount: got %d, want %d", n, 100*unit)
				}
				works.end(t, false)
				if n := s.Stable(); n != 100*unit {
					t.Errorf("stable bytes of the other mount: got %d, want %d", n, 100*unit)
				}
				cancel()
				<-ended
				stuck.end(t, true)
				if shared.used != 0 {
					t.Errorf("bytes of the total after Close: got %d, want 0", shared.used)
				}
			})
		})
	}
}

// TestFlushStopsWithoutProgress checks when Flush gives up: at the end of its context, and after a
// time without progress.
func TestFlushStopsWithoutProgress(t *testing.T) {
	for _, c := range []struct {
		name    string
		timeout time.Duration
		stall   time.Duration
		want    time.Duration
	}{
		{"no stall limit", time.Minute, 0, time.Minute},
		{"stall limit", time.Minute, 5 * time.Second, 5 * time.Second},
		{"context ends first", time.Second, 5 * time.Second, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMount(t, &memnfs.Server{Hangs: true}, 16, Config{})
				write(t.Context(), m.file(2), 0, 100)
				ctx, cancel := context.WithTimeout(t.Context(), c.timeout)
				defer cancel()
				start := time.Now()
				m.Flush(ctx, c.stall)
				if d := time.Since(start); d != c.want {
					t.Errorf("Flush returned after %v, want %v", d, c.want)
				}
				m.end(t, true)
			})
		})
	}
}

// TestCanceledCallLeavesWriteQueue checks that the end of a request ends its wait for a slot for
// WRITE calls, while the server does not answer the calls in flight.
func TestCanceledCallLeavesWriteQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMount(t, &memnfs.Server{Hangs: true}, 16, Config{MaxWrites: 1, Expire: time.Second})
		write(t.Context(), m.file(2), 0, 1)
		time.Sleep(time.Minute) // the WRITE of the file holds the only slot
		ctx, cancel := context.WithCancel(t.Context())
		returned := make(chan error)
		go func() {
			_, err := m.file(3).writeThrough(ctx, &Writer{Cred: []byte{0}}, 0, make([]byte, 1))
			returned <- err
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		select {
		case err := <-returned:
			if nfs.CallErrno(err) != syscall.EINTR {
				t.Errorf("write of a canceled request: got %v, want EINTR", err)
			}
		default:
			t.Error("the write of a canceled request still waits for a slot")
			m.abort()
			<-returned
		}
		m.end(t, true)
	})
}
