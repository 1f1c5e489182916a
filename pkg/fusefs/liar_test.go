package fusefs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Positions in WRITE's arguments, from the end of what goes before the data (RFC 1813 §3.3.7):
// count, stable, length of the data.
const (
	argCount  = 12
	argLength = 4
)

// shortWrite has the real server write only the first octets, a different number each time.
func shortWrite(most int) answer {
	n := 0
	var mu sync.Mutex
	return func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		mu.Lock()
		n++
		keep := min(len(m.ArgData), 1+n*7919%most)
		mu.Unlock()
		binary.BigEndian.PutUint32(m.Args[len(m.Args)-argCount:], uint32(keep))
		binary.BigEndian.PutUint32(m.Args[len(m.Args)-argLength:], uint32(keep))
		m.ArgData = m.ArgData[:keep]
		return pass()
	}
}

// TestShortWrites writes through a server that takes a part of each WRITE.
func TestShortWrites(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	s.on(shortWrite(50_000), nfs3.ProcWrite)
	want := noise(3, 2<<20+5)
	must(t, os.WriteFile(m.path("file"), want, 0o644))
	wantContent(t, filepath.Join(e.dir, "file"), want)
	if n := s.count(nfs3.ProcWrite); n < 40 {
		t.Errorf("%d WRITE calls: the test tests nothing", n)
	}
}

// claimCount makes a WRITE's reply say another count; the count stands before committed and the
// verifier.
func claimCount(change func(asked uint32) uint32) answer {
	return func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		asked := uint32(len(m.ArgData))
		if err := pass(); err != nil {
			return err
		}
		binary.BigEndian.PutUint32(m.Result[len(m.Result)-16:], change(asked))
		return nil
	}
}

// TestWriteCountLies has a server claim more than it was given, and nothing at all: the writer
// hears of it at close, and nothing hangs.
func TestWriteCountLies(t *testing.T) {
	e := startExport(t)
	for name, change := range map[string]func(uint32) uint32{
		"one more":  func(asked uint32) uint32 { return asked + 1 },
		"very many": func(uint32) uint32 { return 1<<32 - 1 },
		"nothing":   func(uint32) uint32 { return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			f, err := os.Create(m.path("file"))
			must(t, err)
			s.on(claimCount(change), nfs3.ProcWrite)
			_, err = f.Write([]byte("data"))
			must(t, err)
			if err := f.Close(); !errors.Is(err, syscall.EIO) {
				t.Errorf("close: %v, want EIO", err)
			}
			s.on(nil, nfs3.ProcWrite)
			must(t, os.WriteFile(m.path("file"), []byte("more"), 0o644))
			wantContent(t, filepath.Join(e.dir, "file"), []byte("more"))
		})
	}
}

// putRead is the result of READ with data of its own, and with a count that need not be true.
func putRead(m *sunrpc.Message, data []byte, count uint32, eof bool) {
	b := sunrpc.AppendUint32(m.Result[:0], uint32(nfs3.OK))
	b = sunrpc.AppendBool(b, false)
	b = sunrpc.AppendUint32(b, count)
	b = sunrpc.AppendBool(b, eof)
	b = sunrpc.AppendUint32(b, count)
	m.Result, m.ResultDataLen = append(b, data...), -1
}

// TestReadLies reads from servers that say what cannot be: EIO, in bounded time.
func TestReadLies(t *testing.T) {
	e := startExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), noise(4, 100_000), 0o644))
	for _, c := range []struct {
		name string
		a    answer
	}{
		{"more than asked", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putRead(m, make([]byte, len(m.ResultData)+8), uint32(len(m.ResultData)+8), true)
			return nil
		}},
		{"a count of 4 GiB", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putRead(m, []byte("data"), 1<<32-4, true)
			return nil
		}},
		{"more than it sends", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putRead(m, []byte("data"), 8, true)
			return nil
		}},
		{"nothing, and no end", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			putRead(m, nil, 0, false)
			return nil
		}},
		{"a reply cut short", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			m.Result, m.ResultDataLen = m.Result[:6], -1
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			s.on(c.a, nfs3.ProcRead)
			if _, err := os.ReadFile(m.path("file")); !errors.Is(err, syscall.EIO) {
				t.Errorf("%v, want EIO", err)
			}
			s.on(nil, nfs3.ProcRead)
			wantContent(t, m.path("file"), noise(4, 100_000))
		})
	}
}

// TestShortReads reads through a server that returns a part of each READ.
func TestShortReads(t *testing.T) {
	e := startExport(t)
	want := noise(5, 1<<20+3)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), want, 0o644))
	m, s := e.mountScripted(t, mountConfig{})
	s.on(func(_ context.Context, msg *sunrpc.Message, pass func() error) error {
		keep := min(len(msg.ResultData), 30_011)
		binary.BigEndian.PutUint32(msg.Args[len(msg.Args)-4:], uint32(keep))
		msg.ResultData = msg.ResultData[:keep]
		return pass()
	}, nfs3.ProcRead)
	wantContent(t, m.path("file"), want)
}

// TestWriteErrors has WRITE and COMMIT fail in every way that matters: who closes or syncs hears of
// it, once, whatever else happened meanwhile.
func TestWriteErrors(t *testing.T) {
	e := startExport(t)
	for _, proc := range []nfs3.Proc{nfs3.ProcWrite, nfs3.ProcCommit} {
		for st, want := range map[nfs3.Status]syscall.Errno{nfs3.ErrNoSpc: syscall.ENOSPC,
			nfs3.ErrDQuot: syscall.EDQUOT, nfs3.ErrIO: syscall.EIO,
			nfs3.ErrFBig: syscall.EFBIG, nfs3.ErrStale: syscall.ESTALE} {
			for name, end := range map[string]func(*os.File) error{"close": (*os.File).Close,
				"fsync": (*os.File).Sync} {
				t.Run(fmt.Sprintf("%v %v %s", proc, st, name), func(t *testing.T) {
					m, s := e.mountScripted(t, mountConfig{opts: Options{WSize: 16 << 10}})
					f, err := os.Create(m.path("file"))
					must(t, err)
					defer f.Close()
					s.on(times(1, status(st)), proc)
					_, err = f.Write(noise(6, 40_000)) // several WRITEs, so that there is a COMMIT
					if err != nil && !errors.Is(err, want) {
						t.Errorf("write: %v", err)
					}
					if err == nil {
						err = end(f)
					}
					if !errors.Is(err, want) {
						t.Errorf("%v, want %v", err, want)
					}
				})
			}
		}
	}
}

// TestJukebox has the server ask for time (RFC 1813 §2.6, NFS3ERR_JUKEBOX): calls are made again,
// and a deadly signal ends the waiting.
func TestJukebox(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true}})
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("old"), 0o644))
	busy := []nfs3.Proc{nfs3.ProcGetAttr, nfs3.ProcSetAttr, nfs3.ProcLookup, nfs3.ProcAccess, nfs3.ProcReadLink,
		nfs3.ProcRead, nfs3.ProcWrite, nfs3.ProcCreate,
		nfs3.ProcMkdir, nfs3.ProcSymlink, nfs3.ProcMknod, nfs3.ProcRemove, nfs3.ProcRmdir, nfs3.ProcRename, nfs3.ProcLink, nfs3.ProcReadDir, nfs3.ProcReadDirPlus,
		nfs3.ProcFSStat, nfs3.ProcCommit}
	for _, p := range busy {
		s.on(times(1, status(nfs3.ErrJukebox)), p)
	}
	run(t, m.dir, "sh", "-ec", `cat file; echo new >file; chmod 600 file; mkdir d; ln -s file l; readlink l; ln file h; mkfifo p; mv file d/f; ls d; df . >&2
		head -c 40000 /dev/zero | dd of=big bs=16384 2>/dev/null; rm big p l h d/f; rmdir d`)
	for _, p := range busy {
		if p != nfs3.ProcCommit && p != nfs3.ProcReadDir && s.count(p) < 2 {
			t.Errorf("%v was called %d times: the test tests nothing", p, s.count(p))
		}
	}
	if list, err := os.ReadDir(e.dir); err != nil || len(list) != 0 {
		t.Errorf("left on the server: %v, %v", list, err)
	}

	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	waiting := make(chan struct{}, 1)
	s.on(func(ctx context.Context, m *sunrpc.Message, pass func() error) error {
		select {
		case waiting <- struct{}{}:
		default:
		}
		return status(nfs3.ErrJukebox)(ctx, m, pass)
	}, nfs3.ProcLookup)
	killed(t, syscall.SIGKILL, waiting, exec.Command("cat", m.path("file")))
	s.on(nil, nfs3.ProcLookup)
	wantContent(t, m.path("file"), []byte("x"))
}

// TestNoAC sees what other clients do at once, and has writes on the server when write(2) returns
// (nfs(5), noac).
func TestNoAC(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true}})
	behind := filepath.Join(e.dir, "file")
	must(t, os.WriteFile(behind, []byte("1"), 0o644))
	for i := range 5 {
		must(t, os.Truncate(behind, int64(10+i)))
		st, err := os.Stat(m.path("file"))
		must(t, err)
		if st.Size() != int64(10+i) {
			t.Fatalf("size %d, want %d", st.Size(), 10+i)
		}
	}
	f, err := os.OpenFile(m.path("file"), os.O_WRONLY|os.O_TRUNC, 0)
	must(t, err)
	defer f.Close()
	for i := range 5 {
		_, err := f.Write([]byte{byte('a' + i)})
		must(t, err)
		if got, err := os.ReadFile(behind); err != nil || !bytes.Equal(got, []byte("abcde")[:i+1]) {
			t.Fatalf("the server has %q, %v", got, err)
		}
	}
	if n := s.count(nfs3.ProcWrite); n != 5 {
		t.Errorf("%d WRITE calls, want 5", n)
	}
}

// TestLookupCache counts the LOOKUP calls that names cost, and sees which changes on the server are
// noticed at once (nfs(5), lookupcache).
func TestLookupCache(t *testing.T) {
	e := startExport(t)
	for _, c := range []struct {
		name               string
		cache              LookupCache
		keepsNew, keepsOld bool // a missing name, a name that exists, may be cached
	}{{"all", LookupCacheAll, true, true}, {"positive", LookupCachePositive, false, true}, {"none", LookupCacheNone,
		false, false}} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{opts: Options{LookupCache: c.cache}})
			must(t, os.WriteFile(filepath.Join(e.dir, "old"), nil, 0o644))
			defer os.Remove(filepath.Join(e.dir, "old"))
			defer os.Remove(filepath.Join(e.dir, "new"))
			lookups := func(name string) int {
				before := s.count(nfs3.ProcLookup)
				for range 3 {
					_, _ = os.Lstat(m.path(name))
				}
				return s.count(nfs3.ProcLookup) - before
			}
			for name, keeps := range map[string]bool{"new": c.keepsNew, "old": c.keepsOld} {
				want := 3
				if keeps {
					want = 1
				}
				if n := lookups(name); n != want {
					t.Errorf("%s: %d LOOKUP calls for three uses, want %d", name, n, want)
				}
			}
			must(t, os.WriteFile(filepath.Join(e.dir, "new"), nil, 0o644))
			must(t, os.Remove(filepath.Join(e.dir, "old")))
			if _, err := os.Lstat(m.path("new")); (err != nil) != c.keepsNew {
				t.Errorf("a name that another client made: %v", err)
			}
			if _, err := os.Lstat(m.path("old")); (err == nil) != c.keepsOld {
				t.Errorf("a name that another client removed: %v", err)
			}
		})
	}
}

// TestStale has files go away on the server: who has one open gets ESTALE, who comes by its name
// gets what is there now.
func TestStale(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	behind := filepath.Join(e.dir, "file")
	must(t, os.WriteFile(behind, []byte("old"), 0o644))
	f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
	must(t, err)
	// while the old one is there, so that its handle is another
	must(t, os.WriteFile(behind+".new", []byte("new content"), 0o644))
	must(t, os.Rename(behind+".new", behind))
	if _, err := f.ReadAt(make([]byte, 3), 0); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("read: %v, want ESTALE", err)
	}
	_, _ = f.Write([]byte("lost"))
	if err := f.Close(); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("close: %v, want ESTALE", err)
	}
	wantContent(t, m.path("file"), []byte("new content")) // by the kernel's second try
	must(t, os.WriteFile(behind+".gone", nil, 0o644))
	_, err = os.Lstat(m.path("file.gone"))
	must(t, err)
	must(t, os.Remove(behind+".gone"))
	if _, err := os.ReadFile(m.path("file.gone")); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("open of a name that is gone: %v, want ENOENT", err)
	}
	if m.fs.Counters.Stale.Load() == 0 {
		t.Error("no node was dropped")
	}
	must(t, os.WriteFile(m.path("file.gone"), []byte("again"), 0o644))
	wantContent(t, behind+".gone", []byte("again"))
}

// TestTypeLies has a server give attributes of another kind of object for a handle: it is taken as
// a handle used for something else, as stale.
func TestTypeLies(t *testing.T) {
	e := startExport(t)
	for name, lie := range map[string]func(attr []byte){
		"a directory now":  func(attr []byte) { binary.BigEndian.PutUint32(attr, uint32(nfs3.NF3DIR)) },
		"another fileid":   func(attr []byte) { attr[59] ^= 1 },
		"a type of no RFC": func(attr []byte) { binary.BigEndian.PutUint32(attr, 99) },
	} {
		t.Run(name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true}})
			must(t, os.WriteFile(m.path("file"), []byte("x"), 0o644))
			f, err := os.Open(m.path("file"))
			must(t, err)
			defer f.Close()
			s.on(func(_ context.Context, m *sunrpc.Message, pass func() error) error {
				err := pass()
				if err == nil && len(m.Result) == 4+84 { // status and fattr3 (RFC 1813 §2.6)
					lie(m.Result[4:])
				}
				return err
			}, nfs3.ProcGetAttr)
			if _, err := f.Stat(); !errors.Is(err, syscall.ESTALE) && !errors.Is(err, syscall.EIO) {
				t.Errorf("fstat: %v, want ESTALE or EIO", err)
			}
			s.on(nil, nfs3.ProcGetAttr)
			if st, err := os.Stat(m.path("file")); err != nil || !st.Mode().IsRegular() {
				t.Errorf("the file by its name: %v", err)
			}
		})
	}
}

// TestForceUnmountHung unmounts by force while every call hangs: whoever waits gets an error, and
// nothing stays behind.
func TestForceUnmountHung(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{buffers: 4})
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
	must(t, err)
	s.on(hang, allProcs()...)
	calls := map[string]func() error{
		"read":   func() error { _, err := f.ReadAt(make([]byte, 1), 0); return err },
		"stat":   func() error { _, err := os.Stat(m.path("other")); return err },
		"open":   func() error { _, err := os.Open(m.path("file")); return err },
		"create": func() error { _, err := os.Create(m.path("new")); return err },
		// behind what is read above
		"fsync":    func() error { _, _ = f.WriteAt(noise(7, 3<<20), 1<<20); return f.Sync() },
		"readdir":  func() error { _, err := os.ReadDir(m.dir); return err },
		"truncate": func() error { return os.Truncate(m.path("file"), 0) },
	}
	type result struct {
		name string
		err  error
	}
	results := make(chan result, len(calls))
	for name, call := range calls {
		go func() { results <- result{name, call()} }()
	}
	time.Sleep(200 * time.Millisecond) // some of them wait in the kernel, behind the others
	must(t, m.srv.ForceUnmount())
	for range calls {
		select {
		case r := <-results:
			if r.err == nil {
				t.Errorf("%s succeeded", r.name)
			}
		case <-time.After(testTimeout):
			t.Fatal("a call still hangs")
		}
	}
	_ = f.Close()
	if lines := mountLines(t, m); len(lines) != 0 {
		t.Errorf("still mounted: %s", lines)
	}
}
