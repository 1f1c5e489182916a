package vfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Offsets in the last words of WRITE's arguments before the data (RFC 1813 §3.3.7): count, stable,
// length of the data.
const (
	argCount  = 12
	argLength = 4
)

// shortWrite returns an answer that writes only the first bytes of each WRITE, a different number
// each time.
func shortWrite(limit int) answer {
	n := 0
	var mu sync.Mutex
	return func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		mu.Lock()
		n++
		keep := min(len(m.ArgData), 1+n*7919%limit)
		mu.Unlock()
		binary.BigEndian.PutUint32(m.Args[len(m.Args)-argCount:], uint32(keep))
		binary.BigEndian.PutUint32(m.Args[len(m.Args)-argLength:], uint32(keep))
		m.ArgData = m.ArgData[:keep]
		return pass()
	}
}

// TestShortWritesContinue writes to a server that writes only a part of each WRITE.
func TestShortWritesContinue(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	s.on(shortWrite(50_000), nfs3.ProcWrite)
	want := randomBytes(3, 2<<20+5)
	must(t, os.WriteFile(m.path("file"), want, 0o644))
	wantContent(t, filepath.Join(e.dir, "file"), want)
	if n := s.count(nfs3.ProcWrite); n < 40 {
		t.Errorf("WRITE calls: got %d, want at least 40", n)
	}
}

// replyCount returns an answer that changes the count in a WRITE's reply. The count precedes
// committed and the verifier.
func replyCount(change func(asked uint32) uint32) answer {
	return func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		asked := uint32(len(m.ArgData))
		if err := pass(); err != nil {
			return err
		}
		binary.BigEndian.PutUint32(m.Result[len(m.Result)-16:], change(asked))
		return nil
	}
}

// TestInvalidWriteCountFails checks that close returns EIO when the server's reply has a count of 0
// or one larger than the request.
func TestInvalidWriteCountFails(t *testing.T) {
	e := startExport(t)
	for name, change := range map[string]func(uint32) uint32{
		"one more": func(asked uint32) uint32 { return asked + 1 },
		"4 GiB":    func(uint32) uint32 { return 1<<32 - 1 },
		"nothing":  func(uint32) uint32 { return 0 },
	} {
		t.Run(name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			f, err := os.Create(m.path("file"))
			must(t, err)
			s.on(replyCount(change), nfs3.ProcWrite)
			_, err = f.Write([]byte("data"))
			must(t, err)
			if err := f.Close(); !errors.Is(err, syscall.EIO) {
				t.Errorf("close: got %v, want EIO", err)
			}
			s.on(nil, nfs3.ProcWrite)
			must(t, os.WriteFile(m.path("file"), []byte("more"), 0o644))
			wantContent(t, filepath.Join(e.dir, "file"), []byte("more"))
		})
	}
}

// setReadResult sets the result of READ. count may differ from the length of data.
func setReadResult(m *sunrpc.Message, data []byte, count uint32, eof bool) {
	b := sunrpc.AppendUint32(m.Result[:0], uint32(nfs.OK))
	b = sunrpc.AppendBool(b, false)
	b = sunrpc.AppendUint32(b, count)
	b = sunrpc.AppendBool(b, eof)
	b = sunrpc.AppendUint32(b, count)
	m.Result, m.ResultDataLen = append(b, data...), -1
}

// TestInvalidReadReplyFails checks that invalid READ replies end in EIO.
func TestInvalidReadReplyFails(t *testing.T) {
	e := startExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), randomBytes(4, 100_000), 0o644))
	for _, c := range []struct {
		name string
		a    answer
	}{
		{"more data than requested", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setReadResult(m, make([]byte, len(m.ResultData)+8), uint32(len(m.ResultData)+8), true)
			return nil
		}},
		{"a count of 4 GiB", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setReadResult(m, []byte("data"), 1<<32-4, true)
			return nil
		}},
		{"a count larger than the data", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setReadResult(m, []byte("data"), 8, true)
			return nil
		}},
		{"no data and no EOF", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			setReadResult(m, nil, 0, false)
			return nil
		}},
		{"a truncated reply", func(_ context.Context, m *sunrpc.Message, _ func() error) error {
			m.Result, m.ResultDataLen = m.Result[:6], -1
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			s.on(c.a, nfs3.ProcRead)
			if _, err := os.ReadFile(m.path("file")); !errors.Is(err, syscall.EIO) {
				t.Errorf("read: got %v, want EIO", err)
			}
			s.on(nil, nfs3.ProcRead)
			wantContent(t, m.path("file"), randomBytes(4, 100_000))
		})
	}
}

// TestShortReadsContinue reads from a server that returns only a part of each READ.
func TestShortReadsContinue(t *testing.T) {
	e := startExport(t)
	want := randomBytes(5, 1<<20+3)
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

// TestJukeboxRetries checks that calls are retried after NFS3ERR_JUKEBOX (RFC 1813 §2.6), and that
// a fatal signal ends the retries.
func TestJukeboxRetries(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true}})
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("old"), 0o644))
	busy := []nfs3.Proc{nfs3.ProcGetAttr, nfs3.ProcSetAttr, nfs3.ProcLookup, nfs3.ProcAccess, nfs3.ProcReadLink,
		nfs3.ProcRead, nfs3.ProcWrite, nfs3.ProcCreate, nfs3.ProcMkdir, nfs3.ProcSymlink, nfs3.ProcMknod,
		nfs3.ProcRemove, nfs3.ProcRmdir, nfs3.ProcRename, nfs3.ProcLink, nfs3.ProcReadDir, nfs3.ProcReadDirPlus,
		nfs3.ProcFSStat, nfs3.ProcCommit}
	for _, p := range busy {
		s.on(times(1, status(nfs.ErrJukebox)), p)
	}
	run(t, m.dir, "sh", "-ec", `cat file; echo new >file; chmod 600 file; mkdir d; ln -s file l; readlink l
		ln file h; mkfifo p; mv file d/f; ls d; df . >&2
		head -c 40000 /dev/zero | dd of=big bs=16384 2>/dev/null; rm big p l h d/f; rmdir d`)
	for _, p := range busy {
		if p != nfs3.ProcCommit && p != nfs3.ProcReadDir && s.count(p) < 2 {
			t.Errorf("%v calls: got %d, want at least 2", p, s.count(p))
		}
	}
	if list, err := os.ReadDir(e.dir); err != nil || len(list) != 0 {
		t.Errorf("files on the server after the script: got %v, %v, want none", list, err)
	}

	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	waiting := make(chan struct{}, 1)
	s.on(func(ctx context.Context, m *sunrpc.Message, pass func() error) error {
		select {
		case waiting <- struct{}{}:
		default:
		}
		return status(nfs.ErrJukebox)(ctx, m, pass)
	}, nfs3.ProcLookup)
	killBlocked(t, syscall.SIGKILL, waiting, exec.Command("cat", m.path("file")))
	s.on(nil, nfs3.ProcLookup)
	wantContent(t, m.path("file"), []byte("x"))
}

// TestNoACAsksServer checks that a noac mount sees changes by other clients at once, and that data
// is on the server when write(2) returns (nfs(5), noac).
func TestNoACAsksServer(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true}})
	serverPath := filepath.Join(e.dir, "file")
	must(t, os.WriteFile(serverPath, []byte("1"), 0o644))
	for i := range 5 {
		must(t, os.Truncate(serverPath, int64(10+i)))
		st, err := os.Stat(m.path("file"))
		must(t, err)
		if st.Size() != int64(10+i) {
			t.Fatalf("size: got %d, want %d", st.Size(), 10+i)
		}
	}
	f, err := os.OpenFile(m.path("file"), os.O_WRONLY|os.O_TRUNC, 0)
	must(t, err)
	defer f.Close()
	for i := range 5 {
		_, err := f.Write([]byte{byte('a' + i)})
		must(t, err)
		if got, err := os.ReadFile(serverPath); err != nil || !bytes.Equal(got, []byte("abcde")[:i+1]) {
			t.Fatalf("content on the server: got %q, %v, want %q", got, err, "abcde"[:i+1])
		}
	}
	if n := s.count(nfs3.ProcWrite); n != 5 {
		t.Errorf("WRITE calls: got %d, want 5", n)
	}
}

// TestLookupCacheModes counts LOOKUP calls per name in each lookupcache mode, and checks which
// changes by other clients are seen at once (nfs(5), lookupcache).
func TestLookupCacheModes(t *testing.T) {
	e := startExport(t)
	for _, c := range []struct {
		name               string
		cache              LookupCache
		keepsNew, keepsOld bool // whether missing and existing names are cached
	}{
		{"all", LookupCacheAll, true, true},
		{"positive", LookupCachePositive, false, true},
		{"none", LookupCacheNone, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Before the mount: a LOOKUP whose reply shows a change of the directory is not cached.
			must(t, os.WriteFile(filepath.Join(e.dir, "old"), nil, 0o644))
			m, s := e.mountScripted(t, mountConfig{opts: Options{LookupCache: c.cache}})
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
					t.Errorf("LOOKUP calls for three uses of %s: got %d, want %d", name, n, want)
				}
			}
			must(t, os.WriteFile(filepath.Join(e.dir, "new"), nil, 0o644))
			must(t, os.Remove(filepath.Join(e.dir, "old")))
			// A lookup that asks the server finds that the directory changed, and drops all names.
			if _, err := os.Lstat(m.path("old")); (err == nil) != c.keepsOld {
				t.Errorf("lstat of a name that another client removed: got %v, old name cached: %v", err, c.keepsOld)
			}
			if _, err := os.Lstat(m.path("new")); (err != nil) != c.keepsNew {
				t.Errorf("lstat of a name that another client created: got %v, missing name cached: %v", err,
					c.keepsNew)
			}
		})
	}
}

// TestStaleHandleFails removes files on the server. An open file then returns ESTALE. An open by
// name gets the current file.
func TestStaleHandleFails(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	serverPath := filepath.Join(e.dir, "file")
	must(t, os.WriteFile(serverPath, []byte("old"), 0o644))
	f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
	must(t, err)
	// Create the new file before the old one is removed, so that the handles differ.
	must(t, os.WriteFile(serverPath+".new", []byte("new content"), 0o644))
	must(t, os.Rename(serverPath+".new", serverPath))
	if _, err := f.ReadAt(make([]byte, 3), 0); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("read: got %v, want ESTALE", err)
	}
	_, _ = f.Write([]byte("lost"))
	if err := f.Close(); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("close: got %v, want ESTALE", err)
	}
	wantContent(t, m.path("file"), []byte("new content")) // the kernel retries after ESTALE
	must(t, os.WriteFile(serverPath+".gone", nil, 0o644))
	_, err = os.Lstat(m.path("file.gone"))
	must(t, err)
	must(t, os.Remove(serverPath+".gone"))
	if _, err := os.ReadFile(m.path("file.gone")); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("read of a removed file: got %v, want ENOENT", err)
	}
	if m.fs.Counters.Stale.Load() == 0 {
		t.Error("dropped stale nodes: got 0, want at least 1")
	}
	must(t, os.WriteFile(m.path("file.gone"), []byte("again"), 0o644))
	wantContent(t, serverPath+".gone", []byte("again"))
}

// TestReusedHandleIsStale checks that attributes of another object make a handle stale.
func TestReusedHandleIsStale(t *testing.T) {
	e := startExport(t)
	for name, change := range map[string]func(attr []byte){
		"directory type":  func(attr []byte) { binary.BigEndian.PutUint32(attr, uint32(nfs.Directory)) },
		"another file ID": func(attr []byte) { attr[59] ^= 1 },
		"unknown type":    func(attr []byte) { binary.BigEndian.PutUint32(attr, 99) },
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
					change(m.Result[4:])
				}
				return err
			}, nfs3.ProcGetAttr)
			if _, err := f.Stat(); !errors.Is(err, syscall.ESTALE) && !errors.Is(err, syscall.EIO) {
				t.Errorf("fstat: got %v, want ESTALE or EIO", err)
			}
			s.on(nil, nfs3.ProcGetAttr)
			if st, err := os.Stat(m.path("file")); err != nil || !st.Mode().IsRegular() {
				t.Errorf("stat by name: got %v, want a regular file", err)
			}
		})
	}
}

// TestForceUnmountEndsBlockedCalls checks that ForceUnmount ends all calls with an error while the
// server does not answer.
func TestForceUnmountEndsBlockedCalls(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{buffers: 4})
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
	must(t, err)
	// A call that begins late must not use the directory below the mount.
	root, err := os.OpenRoot(m.dir)
	must(t, err)
	s.on(hang, allProcs()...)
	calls := map[string]func() error{
		"read":   func() error { _, err := f.ReadAt(make([]byte, 1), 0); return err },
		"stat":   func() error { _, err := root.Stat("other"); return err },
		"open":   func() error { _, err := root.Open("file"); return err },
		"create": func() error { _, err := root.Create("new"); return err },
		// beyond the range of the read above
		"fsync":    func() error { _, _ = f.WriteAt(randomBytes(7, 3<<20), 1<<20); return f.Sync() },
		"readdir":  func() error { _, err := fs.ReadDir(root.FS(), "."); return err },
		"truncate": func() error { return f.Truncate(0) },
	}
	type result struct {
		name string
		err  error
	}
	results := make(chan result, len(calls))
	for name, call := range calls {
		go func() { results <- result{name, call()} }()
	}
	kit.Eventually(t, "call that waits for the server", func() bool { // others wait in the kernel
		_, ok := m.fs.requests.Oldest()
		return ok
	})
	must(t, m.srv.ForceUnmount())
	for range calls {
		select {
		case r := <-results:
			if r.err == nil {
				t.Errorf("%s after ForceUnmount: got success, want an error", r.name)
			}
		case <-time.After(testTimeout):
			t.Fatal("a call did not end after ForceUnmount")
		}
	}
	_ = errors.Join(f.Close(), root.Close())
	if lines := mountLines(t, m); len(lines) != 0 {
		t.Errorf("mount table after ForceUnmount: got %s, want no entry", lines)
	}
}
