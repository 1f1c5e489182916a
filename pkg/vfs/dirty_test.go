package vfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A memServer answers WRITE and COMMIT in memory. It counts the bytes that are stable.
type memServer struct {
	mu       sync.Mutex
	stable   int
	unstable int
	writes   int
	space    int       // bytes that fit; 0 is no limit
	hangs    bool      // calls wait for the end of their context
	busy     nfs3.Proc // NFS3ERR_JUKEBOX for these calls of the handle "busy"; NULL for none
}

func (s *memServer) setBusy(p nfs3.Proc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = p
}

func (s *memServer) Call(ctx context.Context, m *sunrpc.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if nfs3.Proc(m.Proc) == nfs3.ProcWrite {
		s.writes++
	}
	if s.hangs {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return ctx.Err()
	}
	if p := nfs3.Proc(m.Proc); p != 0 && p == s.busy && bytes.Contains(m.Args, []byte("busy")) {
		return status(nfs.ErrJukebox)(ctx, m, nil)
	}
	if nfs3.Proc(m.Proc) == nfs3.ProcRead {
		setReadResult(m, make([]byte, 4), 1, true)
		return nil
	}
	if s.space > 0 && s.stable+s.unstable+len(m.ArgData) > s.space {
		m.Result = append(sunrpc.AppendUint32(m.Result[:0], uint32(nfs.ErrNoSpc)), make([]byte, 8)...)
		return nil
	}
	m.Result = append(sunrpc.AppendUint32(m.Result[:0], uint32(nfs.OK)), make([]byte, 8)...) // no attributes
	switch nfs3.Proc(m.Proc) {
	case nfs3.ProcWrite:
		how := binary.BigEndian.Uint32(m.Args[len(m.Args)-8:])
		if nfs.Stability(how) == nfs.Unstable {
			s.unstable += len(m.ArgData)
		} else {
			s.stable += len(m.ArgData)
		}
		m.Result = sunrpc.AppendUint32(sunrpc.AppendUint32(m.Result, uint32(len(m.ArgData))), how)
	case nfs3.ProcCommit:
		s.stable, s.unstable = s.stable+s.unstable, 0
	}
	m.Result = append(m.Result, make([]byte, 8)...) // verifier
	return nil
}

func (s *memServer) stableBytes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stable
}

// bareFS returns an FS without a mount. The test ends it with Close.
func bareFS(s *memServer, pool *membuf.Pool, opts Options) *FS {
	_ = opts.setDefaults()
	opts.WSize = pool.Size()
	fs := &FS{server: nfs3.NewServer(nfs3.NewClient(s, nfs3.Options{})), opts: opts, buffers: pool,
		writeSlots: make(chan struct{}, opts.MaxWrites), aborted: make(chan struct{}),
		closed: make(chan struct{})}
	fs.setCaches()
	fs.busy.Retries = &fs.Counters.JukeboxRetries
	fs.dirty.inodes = make(map[*inode]*dirtyFile)
	return fs
}

// openFile returns an open file of a bare FS.
func openFile(id uint64) *fileHandle {
	return &fileHandle{ino: &inode{id: id}, cred: []byte{0}, writable: true}
}

// writeTo writes n bytes at off as a program does. It returns the number of bytes taken.
func writeTo(fs *FS, h *fileHandle, off uint64, n int) int {
	taken, _ := fs.buffer(&request{Request: new(kernel.Request)}, h, off, make([]byte, n))
	return taken
}

// testPool returns a pool for a synctest bubble.
func testPool(t *testing.T, buffers int) *membuf.Pool {
	pool := membuf.NewPool(MinIOSize, buffers)
	t.Cleanup(pool.Close)
	return pool
}

// TestDirtyDataExpires checks that the data of an open file is stable when it is DirtyExpire old,
// and not earlier, for a file that is written once and for one that is always written.
func TestDirtyDataExpires(t *testing.T) {
	const expire = 5 * time.Second
	synctest.Test(t, func(t *testing.T) {
		s := &memServer{}
		fs := bareFS(s, testPool(t, 16), Options{DirtyExpire: expire})
		h := openFile(2)
		for range 2 { // the timer also works for a file that was clean
			start := s.stableBytes()
			writeTo(fs, h, 0, 100)
			time.Sleep(expire - time.Nanosecond)
			if n := s.stableBytes() - start; n != 0 {
				t.Errorf("stable bytes before the data expires: got %d, want 0", n)
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if n := s.stableBytes() - start; n != 100 {
				t.Errorf("stable bytes after the data expired: got %d, want 100", n)
			}
		}
		start := s.stableBytes()
		for i := range 60 { // one byte per second
			writeTo(fs, h, uint64(i), 1)
			time.Sleep(time.Second)
			synctest.Wait()
			if n := s.stableBytes() - start; n < i-int(expire/time.Second) {
				t.Errorf("stable bytes after %d s: got %d", i+1, n)
			}
		}
		fs.Close(t.Context())
	})
}

// TestDirtyExpireOff checks that data stays in memory without DirtyExpire, and that Close writes
// it.
func TestDirtyExpireOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &memServer{}
		fs := bareFS(s, testPool(t, 16), Options{})
		writeTo(fs, openFile(2), 0, 100)
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := s.stableBytes(); n != 0 {
			t.Errorf("stable bytes: got %d, want 0", n)
		}
		fs.Close(t.Context())
		if n := s.stableBytes(); n != 100 {
			t.Errorf("stable bytes after Close: got %d, want 100", n)
		}
	})
}

// TestExpiryOfHungServer checks that expired files of a server that does not answer have one flush
// each, however long this takes, and that Close reports their data.
func TestExpiryOfHungServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &memServer{hangs: true}
		var lost []Loss
		fs := bareFS(s, testPool(t, 16),
			Options{DirtyExpire: time.Second, Lost: func(l Loss) { lost = append(lost, l) }})
		a, b := openFile(2), openFile(3)
		a.ino.attr.Restore(nfs.Regular, 20)
		b.ino.attr.Restore(nfs.Regular, 30)
		writeTo(fs, a, 10, 100)
		time.Sleep(time.Minute)
		writeTo(fs, a, 1000, 7) // stays in the filling extent: a flush of the file is running
		writeTo(fs, b, 0, 1)
		time.Sleep(time.Hour)
		synctest.Wait()
		if s.writes != 2 {
			t.Errorf("WRITE calls: got %d, want 2", s.writes)
		}
		if file := fs.dirty.inodes[a.ino]; file == nil || !file.flushing {
			t.Errorf("dirty file: got %+v, want one that is being flushed", file)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		fs.Close(ctx)
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
		pool := testPool(t, 16)
		fs := bareFS(&memServer{hangs: true}, pool, Options{DirtyBytes: bound * MinIOSize})
		r, cancelRequest := newRequest(t)
		taken := make(chan int)
		go func() {
			n, _ := fs.buffer(r, openFile(2), 0, make([]byte, 10*MinIOSize))
			taken <- n
		}()
		time.Sleep(time.Minute)
		if n := pool.Out(); n != bound {
			t.Errorf("buffers in use: got %d, want %d", n, bound)
		}
		cancelRequest()
		if n := <-taken; n != bound*MinIOSize {
			t.Errorf("bytes taken: got %d, want %d", n, bound*MinIOSize)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		fs.Close(ctx)
		if fs.dirty.bytes != 0 || pool.Out() != 0 {
			t.Errorf("after Close: got %d dirty bytes and %d buffers in use, want 0", fs.dirty.bytes, pool.Out())
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
				shared := NewDirtyTotal(total * MinIOSize)
				pool := testPool(t, 16)
				stuck := bareFS(&memServer{hangs: true}, pool,
					Options{DirtyBytes: int64(c.bound) * MinIOSize, DirtyTotal: shared})
				r, cancelRequest := newRequest(t)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_, _ = stuck.buffer(r, openFile(2), 0, make([]byte, 16*MinIOSize))
				}()
				time.Sleep(time.Minute)
				if n := pool.Out(); n != c.want {
					t.Errorf("buffers of the stuck mount: got %d, want %d", n, c.want)
				}
				s := &memServer{}
				works := bareFS(s, testPool(t, 16), Options{DirtyTotal: shared})
				h := openFile(2)
				if n := writeTo(works, h, 0, 100*MinIOSize); n != 100*MinIOSize {
					t.Errorf("bytes taken on the other mount: got %d, want %d", n, 100*MinIOSize)
				}
				works.Close(t.Context())
				if n := s.stableBytes(); n != 100*MinIOSize {
					t.Errorf("stable bytes of the other mount: got %d, want %d", n, 100*MinIOSize)
				}
				cancelRequest()
				<-ended
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				stuck.Close(ctx)
				if shared.used != 0 {
					t.Errorf("bytes of the total after Close: got %d, want 0", shared.used)
				}
			})
		})
	}
}

// TestDrainStopsWithoutProgress checks when Drain gives up: at the end of its context, and after a
// time without progress.
func TestDrainStopsWithoutProgress(t *testing.T) {
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
				fs := bareFS(&memServer{hangs: true}, testPool(t, 16), Options{})
				writeTo(fs, openFile(2), 0, 100)
				ctx, cancel := context.WithTimeout(t.Context(), c.timeout)
				defer cancel()
				start := time.Now()
				fs.Drain(ctx, c.stall)
				if d := time.Since(start); d != c.want {
					t.Errorf("Drain returned after %v, want %v", d, c.want)
				}
				fs.Abort()
				fs.Close(t.Context())
			})
		})
	}
}

// TestPagesReportErrorOfAnyPart writes more than one WRITE carries, and the server accepts only the
// first WRITE. The FS keeps no data, because its pool has a single buffer. A program gets the
// number of accepted bytes. The kernel ignores this number when it writes pages, so it must get the
// error.
func TestPagesReportErrorOfAnyPart(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags uint32
		n     uint32
		want  fuse.Status
	}{
		{"write of a program", 0, MinIOSize, fuse.OK},
		{"pages of a mapping", fuse.WRITE_CACHE, 0, fuse.Status(syscall.ENOSPC)},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fs := bareFS(&memServer{space: MinIOSize}, testPool(t, 1), Options{})
				fs.maxFileSize = math.MaxInt64
				fs.handles.files = map[uint64]*fileHandle{1: openFile(2)}
				var out fuse.WriteOut
				status := call(fs, kernel.OpWrite, fuse.WriteIn{Fh: 1, WriteFlags: c.flags, Size: 2 * MinIOSize},
					string(make([]byte, 2*MinIOSize)), &out)
				if out.Size != c.n || status != c.want {
					t.Errorf("got %d bytes, %v, want %d, %v", out.Size, status, c.n, c.want)
				}
				fs.Close(t.Context())
			})
		})
	}
}

// TestCanceledCallLeavesWriteQueue checks that the end of a request ends its wait for a slot for
// WRITE calls, while the server does not answer the calls in flight.
func TestCanceledCallLeavesWriteQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := bareFS(&memServer{hangs: true}, testPool(t, 16), Options{MaxWrites: 1, DirtyExpire: time.Second})
		writeTo(fs, openFile(2), 0, 1)
		time.Sleep(time.Minute) // the WRITE of the file holds the only slot
		r, cancelRequest := newRequest(t)
		returned := make(chan error)
		go func() {
			_, err := fs.writeThrough(r, openFile(3), 0, make([]byte, 1))
			returned <- err
		}()
		synctest.Wait()
		cancelRequest()
		synctest.Wait()
		select {
		case err := <-returned:
			if nfs.CallErrno(err) != syscall.EINTR {
				t.Errorf("write of a canceled request: got %v, want EINTR", err)
			}
		default:
			t.Error("the write of a canceled request still waits for a slot")
			fs.Abort()
			<-returned
		}
		fs.Abort()
		fs.Close(t.Context())
	})
}

// TestWriteThroughKeepsPages checks that data that this mount wrote without keeping it is read from
// the kernel's pages.
func TestWriteThroughKeepsPages(t *testing.T) {
	m, s := startOwnExport(t).mountScripted(t, mountConfig{buffers: 1, bufSize: 64 << 10})
	keepsPages(t, func(i int) int {
		before, throughs := s.count(nfs3.ProcRead), m.fs.Counters.WriteThroughs.Load()
		data := randomBytes(uint64(i), 256<<10) // whole pages
		must(t, os.WriteFile(m.path("file"), data, 0o644))
		if m.fs.Counters.WriteThroughs.Load() == throughs {
			t.Error("writes without keeping data: got 0, want at least 1")
		}
		wantContent(t, m.path("file"), data)
		return s.count(nfs3.ProcRead) - before
	})
}
