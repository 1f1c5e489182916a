package vfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// changingVerifier passes WRITE and COMMIT, and gives each reply another write verifier.
func changingVerifier() answer {
	var n atomic.Uint64
	return func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		if err := pass(); err != nil {
			return err
		}
		if len(m.Result) > verfFromEnd && binary.BigEndian.Uint32(m.Result) == uint32(nfs.OK) {
			binary.BigEndian.PutUint64(m.Result[len(m.Result)-verfFromEnd:], n.Add(1))
			if nfs3.Proc(m.Proc) == nfs3.ProcWrite {
				binary.BigEndian.PutUint32(m.Result[len(m.Result)-commFromEnd:], uint32(nfs.Unstable))
			}
		}
		return nil
	}
}

// TestChangingVerifierFailsFsync checks that fsync returns EIO after few calls when the server's
// write verifier changes with each reply, and that another mount of the server works meanwhile.
func TestChangingVerifierFailsFsync(t *testing.T) {
	const maxCalls = 100
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{WSize: 16 << 10}})
	other := e.mount(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	s.on(changingVerifier(), nfs3.ProcWrite, nfs3.ProcCommit)
	data := randomBytes(31, 60_000)
	_, err = f.Write(data)
	must(t, err)
	if err := f.Sync(); !errors.Is(err, syscall.EIO) {
		t.Errorf("fsync: got %v, want EIO", err)
	}
	if n := s.count(nfs3.ProcWrite) + s.count(nfs3.ProcCommit); n > maxCalls {
		t.Errorf("calls of WRITE and COMMIT: got %d, want at most %d", n, maxCalls)
	}
	if n := m.fs.Counters.InvalidReplies.Load(); n == 0 {
		t.Error("invalid replies: got 0, want at least 1")
	}
	must(t, os.WriteFile(other.path("other"), data, 0o644))
	wantContent(t, other.path("other"), data)
	s.on(nil, nfs3.ProcWrite, nfs3.ProcCommit)
	must(t, f.Close())
	must(t, os.WriteFile(m.path("file"), data, 0o644))
	wantContent(t, filepath.Join(e.dir, "file"), data)
}

// TestInvalidNamesFail lists directories whose entries have names that no directory can have.
func TestInvalidNamesFail(t *testing.T) {
	e := startExport(t)
	for _, c := range []struct{ name, entry string }{
		{"empty", ""},
		{"slash", "a/b"},
		{"slash only", "/"},
		{"parent", "../../etc/passwd"},
		{"NUL", "a\x00b"},
		{"too long", string(make([]byte, 4096))},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, s := e.mountScripted(t, mountConfig{})
			must(t, os.MkdirAll(m.path("d"), 0o755))
			before := m.fs.Counters.InvalidReplies.Load()
			s.on(func(_ context.Context, msg *sunrpc.Message, _ func() error) error {
				setDirResult(msg, true, scriptedEntry{"good", 1}, scriptedEntry{c.entry, 2})
				return nil
			}, dirProcs...)
			if list, err := os.ReadDir(m.path("d")); !errors.Is(err, syscall.EIO) {
				t.Errorf("readdir: got %v, %v, want EIO", list, err)
			}
			if n := m.fs.Counters.InvalidReplies.Load(); n == before {
				t.Error("invalid replies: got none, want one")
			}
			s.on(nil, dirProcs...)
			if list, err := os.ReadDir(m.path("d")); err != nil || len(list) != 0 {
				t.Errorf("readdir after the server recovered: got %v, %v, want an empty list", list, err)
			}
		})
	}
}

// TestEndlessDirectoryEndsWithReader lists a directory without end. The listing must end when the
// reader is killed.
func TestEndlessDirectoryEndsWithReader(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	must(t, os.MkdirAll(m.path("d"), 0o755))
	listing := make(chan struct{}, 1)
	s.on(func(_ context.Context, msg *sunrpc.Message, _ func() error) error {
		c := dirCookie(msg)
		if c > 1000 {
			select {
			case listing <- struct{}{}:
			default:
			}
		}
		setDirResult(msg, false, scriptedEntry{"a" + string(rune('a'+c%26)), c + 1}, scriptedEntry{"b", c + 2})
		return nil
	}, dirProcs...)
	killBlocked(t, syscall.SIGKILL, listing, exec.Command("ls", "-f", m.path("d")))
	s.on(nil, dirProcs...)
	if list, err := os.ReadDir(m.path("d")); err != nil || len(list) != 0 {
		t.Errorf("readdir after the server recovered: got %v, %v, want an empty list", list, err)
	}
}

// TestInvalidLookupReply checks that a name with the handle of the export's root is refused.
func TestInvalidLookupReply(t *testing.T) {
	e := startOwnExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	m, s := e.mountScripted(t, mountConfig{opts: Options{LookupCache: LookupCacheNone}})
	s.on(func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		if err := pass(); err != nil {
			return err
		}
		at := 8 + int(binary.BigEndian.Uint32(m.Result[4:])+3)&^3 // after status and handle
		rest := bytes.Clone(m.Result[at:])
		b := sunrpc.AppendUint32(m.Result[:0], uint32(nfs.OK))
		m.Result = append(sunrpc.AppendOpaque(b, e.root.Bytes()), rest...)
		return nil
	}, nfs3.ProcLookup)
	if _, err := os.Stat(m.path("file")); !errors.Is(err, syscall.EIO) {
		t.Errorf("stat: got %v, want EIO", err)
	}
	s.on(nil, nfs3.ProcLookup)
	wantContent(t, m.path("file"), []byte("x"))
}
