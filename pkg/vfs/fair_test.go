package vfs

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit/memnfs"
)

// TestReadOfOtherUserOvertakes floods a mount with reads of one user. The read of another user gets
// the second buffer that becomes free, and the reads that waited before it the others.
func TestReadOfOtherUserOvertakes(t *testing.T) {
	const buffers, readers = 2, 12
	e := startOwnExport(t)
	openExport(t, e)
	putFile(t, filepath.Join(e.dir, "large"), strings.Repeat("x", 4096), alice, 0o644)
	putFile(t, filepath.Join(e.dir, "small"), "content", bob, 0o644)
	m, s := e.mountScripted(t, mountConfig{buffers: buffers})
	m.severalUsers()
	var mu sync.Mutex
	var users []uint32 // of the READs, in their order
	next := make(chan struct{})
	s.on(func(ctx context.Context, call *sunrpc.Message, pass func() error) error {
		mu.Lock()
		users = append(users, sunrpc.CredUID(call.Cred))
		mu.Unlock()
		select {
		case <-next:
		case <-ctx.Done():
		}
		return pass()
	}, nfs3.ProcRead)
	begun := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(users)
	}
	var fd int
	must(t, alice.do(t, func() (err error) {
		fd, err = unix.Open(m.path("large"), unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		return err
	}))
	defer unix.Close(fd)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(next)
	waiting := func(n int) {
		t.Helper()
		if !eventually(func() bool { return begun() == buffers && m.fs.Counters.BufferWaits.Load() == uint64(n) }) {
			t.Fatalf("got %d READs and %d waits for buffers, want %d and %d", begun(), m.fs.Counters.BufferWaits.Load(),
				buffers, n)
		}
	}
	for range readers {
		wg.Go(func() {
			if n, err := unix.Pread(fd, make([]byte, 4096), 0); n != 4096 || err != nil {
				t.Errorf("read of a large file: got %d, %v", n, err)
			}
		})
	}
	waiting(readers - buffers)
	wg.Go(func() {
		if err := bob.do(t, func() error {
			small, err := unix.Open(m.path("small"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(small)
			_, err = unix.Pread(small, make([]byte, 10), 0)
			return err
		}); err != nil {
			t.Errorf("open and read of another user: %v", err)
		}
	})
	waiting(readers - buffers + 1)
	for i := range 2 {
		next <- struct{}{}
		if !eventually(func() bool { return begun() == buffers+i+1 }) {
			t.Fatalf("READs after %d replies: got %d", i+1, begun())
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if got := users[buffers:]; got[0] != alice.uid || got[1] != bob.uid {
		t.Errorf("users of the next READs: got %v, want %v", got, []uint32{alice.uid, bob.uid})
	}
}

// TestWaitingReadsRaiseKernelBound lets reads wait for a buffer. Buffered reads that wait leave the
// kernel's background requests to others.
func TestWaitingReadsRaiseKernelBound(t *testing.T) {
	const reads = maxBackground + 20
	for _, c := range []struct {
		flags uint32
		least int
	}{{0, reads + maxBackground/2}, {unix.O_DIRECT, maxBackground}} {
		synctest.Test(t, func(t *testing.T) {
			fs := bareFS(&memnfs.Server{}, testPool(t, 1), Options{})
			bound := maxBackground
			fs.busyReads.apply = func(n int) { bound = n }
			buf := fs.buffers.TryGet()
			r, cancel := newRequest(t)
			for range reads {
				go fs.getReadBuffer(r, &fileHandle{}, &fuse.ReadIn{Flags: c.flags})
			}
			synctest.Wait()
			if bound < c.least || c.flags != 0 && bound != c.least {
				t.Errorf("%d reads with flags %#x wait: got a bound of %d, want %d", reads, c.flags, bound, c.least)
			}
			cancel()
			synctest.Wait()
			if bound != maxBackground {
				t.Errorf("bound after the reads: got %d, want %d", bound, maxBackground)
			}
			fs.buffers.Put(buf)
		})
	}
}
