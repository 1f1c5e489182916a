package vfs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// Offsets in the XDR of WRITE's arguments and results, counted from the end (RFC 1813 §3.3.7).
const (
	argStable   = 8  // stable is the second last word of the arguments before the data
	verfFromEnd = 8  // the verifier is the last field of the results
	commFromEnd = 12 // committed precedes the verifier
)

// TestWriteErrorReportedOncePerOpenFile checks that each open file reports a write error once.
func TestWriteErrorReportedOncePerOpenFile(t *testing.T) {
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{})
	a, err := os.Create(m.path("file"))
	must(t, err)
	b, err := os.OpenFile(m.path("file"), os.O_WRONLY, 0)
	must(t, err)
	s.on(status(nfs.ErrNoSpc), nfs3.ProcWrite)
	_, err = a.Write([]byte("data"))
	must(t, err)
	if err := a.Sync(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("fsync: got %v, want ENOSPC", err)
	}
	s.on(nil, nfs3.ProcWrite)
	if err := a.Sync(); err != nil {
		t.Errorf("second fsync: got %v, want no error", err)
	}
	must(t, a.Close())
	if err := b.Close(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("close of the other open file: got %v, want ENOSPC", err)
	}
	must(t, os.WriteFile(m.path("file"), []byte("more"), 0o644))
	wantContent(t, filepath.Join(e.dir, "file"), []byte("more"))
}

// TestWriteAndTruncateMix mixes writes and truncations of one open file and compares the file with
// a byte slice.
func TestWriteAndTruncateMix(t *testing.T) {
	e := startExport(t)
	// The pool has the smallest possible size.
	m := e.mount(t, mountConfig{opts: Options{WSize: 8192}, buffers: 1, bufSize: 8192})
	f, err := os.Create(m.path("file"))
	must(t, err)
	var want []byte
	data := randomBytes(2, 100_000)
	for i := range 40 {
		off, n := i*7919%60_000, i*3571%20_000+1
		if grow := off + n - len(want); grow > 0 {
			want = append(want, make([]byte, grow)...)
		}
		copy(want[off:], data[i*100:i*100+n])
		_, err := f.WriteAt(data[i*100:i*100+n], int64(off))
		must(t, err)
		if i%5 == 4 {
			size := i * 1009 % 50_000
			if grow := size - len(want); grow > 0 {
				want = append(want, make([]byte, grow)...)
			}
			want = want[:size]
			must(t, f.Truncate(int64(size)))
		}
		st, err := f.Stat()
		must(t, err)
		if st.Size() != int64(len(want)) {
			t.Fatalf("step %d: got size %d, want %d", i, st.Size(), len(want))
		}
	}
	must(t, f.Close())
	wantContent(t, filepath.Join(e.dir, "file"), want)
	wantContent(t, m.path("file"), want)
}

// TestOpenFileSurvivesRemoval reads an open file after an unlink and after a rename over it.
func TestOpenFileSurvivesRemoval(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	for name, remove := range map[string]func() error{
		"unlink": func() error { return os.Remove(m.path("victim")) },
		"rename": func() error { return os.Rename(m.path("other"), m.path("victim")) },
	} {
		t.Run(name, func(t *testing.T) {
			must(t, os.WriteFile(m.path("victim"), []byte("still here"), 0o644))
			must(t, os.WriteFile(m.path("other"), []byte("other"), 0o644))
			f, err := os.OpenFile(m.path("victim"), os.O_RDWR, 0)
			must(t, err)
			_, err = f.WriteAt([]byte("STILL"), 0) // stays in the write-behind buffer
			must(t, err)
			must(t, remove())
			var buf [10]byte
			if _, err := f.ReadAt(buf[:], 0); err != nil || string(buf[:]) != "STILL here" {
				t.Errorf("read after removal: got %q, %v, want %q", buf, err, "STILL here")
			}
			if hidden, _ := filepath.Glob(filepath.Join(e.dir, ".nfs*")); len(hidden) != 1 {
				t.Errorf("hidden files on the server: got %v, want one", hidden)
			}
			must(t, f.Close())
			if !eventually(func() bool { // the kernel does not wait for the release
				hidden, _ := filepath.Glob(filepath.Join(e.dir, ".nfs*"))
				return len(hidden) == 0
			}) {
				t.Error("the hidden file is still on the server after close")
			}
		})
	}
}

// TestCallsUseCallerCredentials checks on the server that calls use the caller's uid, gid and
// groups.
func TestCallsUseCallerCredentials(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	must(t, os.Chmod(e.dir, 0o777))
	must(t, os.Mkdir(filepath.Join(e.dir, "group"), 0o770))
	must(t, os.Chmod(filepath.Join(e.dir, "group"), 0o770))
	must(t, os.Chown(filepath.Join(e.dir, "group"), 0, 7777))
	as := func(groups []uint32, script string) error {
		cmd := exec.Command("sh", "-c", script)
		cmd.Dir = "/"
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "M=" + m.dir}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4321, Gid: 1234, Groups: groups}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return errors.New(strings.TrimSpace(string(out)) + ": " + err.Error())
		}
		return nil
	}
	allowParents(t, m.dir)
	must(t, as(nil, "umask 027; echo hello >$M/mine; mkdir $M/dir"))
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(e.dir, "mine"), &st))
	if st.Uid != 4321 || st.Gid != 1234 || st.Mode&0o7777 != 0o640 {
		t.Errorf("owner on the server: got uid %d gid %d mode %o, want 4321, 1234, 640", st.Uid, st.Gid, st.Mode&0o7777)
	}
	if err := as(nil, "echo x >$M/group/file"); err == nil {
		t.Error("write to the group's directory as another user: got no error, want one")
	}
	must(t, as([]uint32{7777}, "echo x >$M/group/file"))
	if err := as(nil, "set -C; echo x >$M/mine"); err == nil { // set -C opens with O_EXCL
		t.Error("create with O_EXCL of an existing file: got no error, want one")
	}
}

// allowParents makes the directories above path accessible to all users.
func allowParents(t *testing.T, path string) {
	t.Helper()
	for dir := filepath.Dir(path); strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		must(t, os.Chmod(dir, 0o755))
	}
}
