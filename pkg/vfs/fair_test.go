package vfs

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
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
			fs := &FS{buffers: membuf.NewPool(MinIOSize, 1)}
			defer fs.buffers.Close()
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

// TestWritersContinueInTurn lets writers of several users and files wait for room, and makes room one
// buffer at a time. A step is "+" and a writer to start: a letter for the user, a digit for the file,
// and perhaps a letter to tell it from others; "-" and a file that gives one buffer back; "x" and a
// writer that is interrupted; "!" and a file with which the server becomes busy; or a writer that
// continues. "w" after such a writer means that it must write without keeping data.
func TestWritersContinueInTurn(t *testing.T) {
	for _, c := range []struct{ name, held, steps string }{
		{"no wait", "11", "+a1 a1 +b2 b2"},
		{"users take turns", "1111", "+a1 +a1 +a1 +b1 +b1 -1 a1 -1 b1 -1 a1 -1 b1 -1 a1"},
		{"a writer with room does not overtake", "1122", "+a1 +b2 +a2 -1 a1 -1 b2 -2 a2"},
		{"a file over its share stops no other", "1112", "+a1 +a1 +b2 -2 b2 -1 a1 -2 -1 a1"},
		{"nor one of the same user", "1112", "+a1 +a1 +a2 -2 a2 -1 a1"},
		{"writers of one user and file keep their order", "11111122",
			"+a1p +a1q +a1r +a1s +a1t +a1u +c2p +c2q +c2r -1 c2p -1 a1p -2 c2q -2 a1q -2 c2r -1 a1r"},
		{"useless waits behind others", "11112222", "+a1 +a2 +a3 +b1 !1 !2 a3w -2 a1"},
		{"an interrupted writer leaves", "1111", "+a1 +b1 xa1 -1 b1"},
		{"the only file has no share", "1111", "-1 +a1 a1"},
		{"the end of the other file", "1112", "+a1 -2 a1"},
		{"all files are busy", "1122", "+a1 +b3 !1 !2 b3w -1 a1"},
		{"a busy file with its share", "1111", "+a1 +b2 !1 b2w -1 +b2 b2 -1 a1"},
	} {
		synctest.Test(t, func(t *testing.T) {
			limit := max(4, int64(len(c.held))) // buffers, of which one of several files may hold 3/4
			fs := bareFS(&memServer{}, testPool(t, 32), Options{DirtyBytes: limit * MinIOSize})
			files := make(map[byte]*inode)
			for i := range byte(4) {
				files['0'+i] = &inode{id: uint64(i)}
			}
			for _, f := range []byte(c.held) {
				fs.takeDirtyAlways(files[f])
				fs.dirty.inodes[files[f]] = &dirtyFile{flushing: true} // a flush that does not end
			}
			var got []string
			cancels := make(map[string][]context.CancelFunc)
			give := func(ino *inode) {
				if ino.wb().held == 1 {
					fs.dirty.Lock()
					delete(fs.dirty.inodes, ino)
					fs.dirty.Unlock()
				}
				fs.giveDirty(ino)
			}
			for _, step := range strings.Fields(c.steps) {
				name := step[1:]
				switch step[0] {
				case '+':
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					cancels[name] = append(cancels[name], cancel)
					cred := sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{UID: uint32(name[0])})
					h := &fileHandle{ino: files[name[1]], cred: cred}
					go func() {
						switch taken, through := fs.getDirty(ctx, h); {
						case taken:
							got = append(got, name)
						case through:
							got = append(got, name+"w")
						}
					}()
				case '-':
					give(files[name[0]])
				case 'x':
					cancels[name][0]()
				case '!':
					fs.dirty.Lock()
					files[name[0]].wb().busy++
					fs.serveWriters()
					fs.dirty.Unlock()
				default:
					if len(got) == 0 || got[0] != step {
						t.Fatalf("%s: writers that continue: got %v, want %s", c.name, got, step)
					}
					got = got[1:]
					continue
				}
				synctest.Wait()
			}
			if len(got) > 0 {
				t.Errorf("%s: further writers that continue: %v, want none", c.name, got)
			}
		})
	}
}

// TestOneReclaimForAllWaits lets requests wait for buffers. However many wait, files are written
// back one at a time, and none after the last request.
func TestOneReclaimForAllWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		var r reclaimer
		reclaim := func() { n++ }
		pass := func(waiting, want int) {
			t.Helper()
			time.Sleep(5*bufferPollInterval + 1)
			synctest.Wait()
			if n != want {
				t.Errorf("files written back while %d requests wait: got %d, want %d", waiting, n, want)
			}
			n = 0
		}
		for _, requests := range []int{1, 1000} {
			for range requests {
				r.begin(reclaim)
			}
			pass(requests, 6) // one at once
			for range requests {
				r.end()
			}
			pass(0, 0)
		}
		for range 1000 { // short waits
			r.begin(reclaim)
			r.end()
		}
		pass(0, 1)
	})
}
