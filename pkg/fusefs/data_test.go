package fusefs

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// amnesiac stands before a server and plays one that restarts: it keeps UNSTABLE data to itself
// until COMMIT, forgets all of it now and then, and has another verifier from then on.
type amnesiac struct {
	nfs3.Caller
	every int // calls of WRITE and COMMIT between two restarts

	mu    sync.Mutex
	calls int
	verf  byte
	held  []heldWrite
}

type heldWrite struct {
	cred, args, data []byte
	pos              int
}

// Offsets in the XDR of WRITE's arguments and results, from the end of the part of variable length
// (RFC 1813 §3.3.7).
const (
	argStable   = 8  // stable is the last but one word of the arguments before the data
	verfFromEnd = 8  // the verifier ends the results
	commFromEnd = 12 // committed stands before it
)

func (a *amnesiac) Call(ctx context.Context, m *sunrpc.Message) error {
	switch nfs3.Proc(m.Proc) {
	case nfs3.ProcWrite:
		return a.write(ctx, m)
	case nfs3.ProcCommit:
		return a.commit(ctx, m)
	}
	return a.Caller.Call(ctx, m)
}

func (a *amnesiac) tick() {
	if a.calls++; a.calls%a.every == 0 {
		a.verf++
		a.held = nil
	}
}

// write lets the data through for its reply only: a WRITE is sent as FILE_SYNC, so that sizes are
// right, but of what was asked for UNSTABLE the content is spoilt, and the good content kept for
// COMMIT.
func (a *amnesiac) write(ctx context.Context, m *sunrpc.Message) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tick()
	at := len(m.Args) - argStable
	unstable := m.Args[at+3] == byte(nfs3.Unstable)
	if unstable {
		a.held = append(a.held, heldWrite{bytes.Clone(m.Cred), bytes.Clone(m.Args), bytes.Clone(m.ArgData),
			m.ArgDataPos})
		m.Args[at+3] = byte(nfs3.FileSync)
		m.ArgData = bytes.Repeat([]byte{0xEE}, len(m.ArgData))
	}
	if err := a.Caller.Call(ctx, m); err != nil {
		return err
	}
	a.stamp(m, unstable)
	return nil
}

func (a *amnesiac) commit(ctx context.Context, m *sunrpc.Message) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tick()
	for _, w := range a.held {
		args := w.args
		args[len(args)-argStable+3] = byte(nfs3.FileSync)
		msg := sunrpc.Message{Prog: m.Prog, Vers: m.Vers, Proc: uint32(nfs3.ProcWrite), Cred: w.cred, Args: args,
			ArgData:    w.data,
			ArgDataPos: w.pos, MaxResult: 1 << 12, Result: make([]byte, 0, 1<<12), ResultDataLen: -1}
		if err := a.Caller.Call(ctx, &msg); err != nil {
			return err
		}
	}
	a.held = nil
	if err := a.Caller.Call(ctx, m); err != nil {
		return err
	}
	a.stamp(m, false)
	return nil
}

func (a *amnesiac) stamp(m *sunrpc.Message, unstable bool) {
	n := len(m.Result)
	if n < commFromEnd || !bytes.Equal(m.Result[:4], []byte{0, 0, 0, 0}) {
		return
	}
	for i := n - verfFromEnd; i < n; i++ {
		m.Result[i] = a.verf
	}
	if unstable {
		m.Result[n-commFromEnd+3] = byte(nfs3.Unstable)
	}
}

// TestVerifierChange writes through a server that forgets, with overlaps and from several files at
// once, and compares what is stable.
func TestVerifierChange(t *testing.T) {
	e := startExport(t)
	for _, every := range []int{5, 13} {
		m := e.mount(t, mountConfig{opts: Options{WSize: 64 << 10}, buffers: 6, bufSize: 64 << 10,
			wrap: func(c nfs3.Caller) nfs3.Caller { return &amnesiac{Caller: c, every: every} }})
		var wg sync.WaitGroup
		for file := range 3 {
			wg.Go(func() {
				name := string(rune('a' + file))
				want := noise(uint64(file), 1<<20+file*777)
				f, err := os.Create(m.path(name))
				if err != nil {
					t.Error(err)
					return
				}
				for _, part := range []struct{ off, n int }{{0, 700_000}, {300_000, 400_000},
					{900_000, len(want) - 900_000}, {650_000, 300_000}, {10, 100_000}} {
					data := want[part.off : part.off+part.n]
					if part.off == 0 || part.off == 300_000 { // to be overwritten in part
						data = bytes.Clone(data)
						for i := 350_000 - part.off; i < 650_000-part.off && i < len(data); i += 7 {
							if part.off == 0 {
								data[i] ^= 0x55
							}
						}
					}
					if _, err := f.WriteAt(data, int64(part.off)); err != nil {
						t.Error(err)
					}
				}
				if err := f.Sync(); err != nil {
					t.Error(err)
				}
				if err := f.Close(); err != nil {
					t.Error(err)
				}
				got, err := os.ReadFile(filepath.Join(e.dir, name))
				if err != nil || !bytes.Equal(got, want) {
					t.Errorf("every %d: file %s is not what was written (%v)", every, name, err)
				}
			})
		}
		wg.Wait()
		if m.fs.Counters.Replays.Load() == 0 {
			t.Errorf("every %d: nothing was sent again: the test tested nothing", every)
		}
	}
}

// failing answers a procedure with a status while it is on.
type failing struct {
	nfs3.Caller
	proc   nfs3.Proc
	status atomic.Uint32
}

func (f *failing) Call(ctx context.Context, m *sunrpc.Message) error {
	if s := f.status.Load(); s != 0 && nfs3.Proc(m.Proc) == f.proc {
		m.Result = sunrpc.AppendUint32(m.Result[:0], s)
		m.Result = append(m.Result, make([]byte, 8)...) // no attributes
		return nil
	}
	return f.Caller.Call(ctx, m)
}

// TestWriteError sees an error of the server's at close, once, for each open file.
func TestWriteError(t *testing.T) {
	e := startExport(t)
	f := &failing{proc: nfs3.ProcWrite}
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { f.Caller = c; return f }})
	a, err := os.Create(m.path("file"))
	must(t, err)
	b, err := os.OpenFile(m.path("file"), os.O_WRONLY, 0)
	must(t, err)
	f.status.Store(uint32(nfs3.ErrNoSpc))
	_, err = a.Write([]byte("data"))
	must(t, err)
	if err := a.Sync(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("fsync: %v, want ENOSPC", err)
	}
	f.status.Store(0)
	if err := a.Sync(); err != nil {
		t.Errorf("second fsync: %v, want none", err)
	}
	must(t, a.Close())
	if err := b.Close(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("close of the other open file: %v, want ENOSPC", err)
	}
	must(t, os.WriteFile(m.path("file"), []byte("more"), 0o644))
	wantContent(t, filepath.Join(e.dir, "file"), []byte("more"))
}

// delaying holds READs back until they are given up, or the test ends.
type delaying struct {
	nfs3.Caller
	over    <-chan struct{}
	on      atomic.Bool
	waiting chan struct{}
}

func (d *delaying) Call(ctx context.Context, m *sunrpc.Message) error {
	if d.on.Load() && nfs3.Proc(m.Proc) == nfs3.ProcRead {
		select {
		case d.waiting <- struct{}{}:
		default:
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.over:
		}
	}
	return d.Caller.Call(ctx, m)
}

// TestInterrupt kills a process in the middle of a read, and sees that a harmless signal does not
// disturb one.
func TestInterrupt(t *testing.T) {
	e := startExport(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	over := make(chan struct{})
	d := &delaying{waiting: make(chan struct{}, 1), over: over}
	m := e.mount(t, mountConfig{wrap: func(c nfs3.Caller) nfs3.Caller { d.Caller = c; return d }})
	t.Cleanup(func() { close(over) }) // before the mount's own clean-up
	d.on.Store(true)
	// dd goes on after SIGUSR1. What is read ahead of it is no request of its own, so it reads
	// directly.
	cmd := exec.Command("dd", "if="+m.path("file"), "of=/dev/null", "iflag=direct", "bs=4096", "status=none")
	must(t, cmd.Start())
	<-d.waiting
	must(t, cmd.Process.Signal(syscall.SIGUSR1))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		t.Fatalf("dd ended on a harmless signal: %v", err)
	case <-time.After(10 * interruptPoll):
	}
	must(t, cmd.Process.Kill())
	select {
	case <-ended:
	case <-time.After(testTimeout):
		t.Fatal("dd did not die")
	}
	if m.fs.Counters.Interrupts.Load() == 0 {
		t.Error("no request was given up")
	}
	d.on.Store(false)
	wantContent(t, m.path("file"), []byte("x"))
}

// TestCloseToOpen changes files through one mount and sees the changes through another that has the
// old state in its caches.
func TestCloseToOpen(t *testing.T) {
	e := startExport(t)
	a, b := e.mount(t, mountConfig{}), e.mount(t, mountConfig{})
	for i := range 20 {
		want := noise(uint64(i), 100+i*5000%70_000)
		w, r := a, b
		if i%2 == 1 {
			w, r = b, a
		}
		must(t, os.WriteFile(w.path("file"), want, 0o644))
		wantContent(t, r.path("file"), want)
		wantContent(t, r.path("file"), want)
	}
	if b.fs.Counters.Ops[OpRead].Load() == 0 {
		t.Error("nothing was read")
	}
	// Appending goes to the end that the file has, not to the one that this mount knows.
	must(t, os.WriteFile(a.path("log"), []byte("one\n"), 0o644))
	wantContent(t, b.path("log"), []byte("one\n"))
	run(t, a.dir, "sh", "-c", "echo two >>log")
	run(t, b.dir, "sh", "-c", "echo three >>log; echo four >>log")
	run(t, a.dir, "sh", "-c", "echo five >>log")
	wantContent(t, b.path("log"), []byte("one\ntwo\nthree\nfour\nfive\n"))
}

// TestTruncate mixes writes and truncations on one open file and compares with a plain slice.
func TestTruncate(t *testing.T) {
	e := startExport(t)
	// the smallest pool there can be
	m := e.mount(t, mountConfig{opts: Options{WSize: 8192}, buffers: 1, bufSize: 8192})
	f, err := os.Create(m.path("file"))
	must(t, err)
	var want []byte
	data := noise(2, 100_000)
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
			t.Fatalf("step %d: size %d, want %d", i, st.Size(), len(want))
		}
	}
	must(t, f.Close())
	wantContent(t, filepath.Join(e.dir, "file"), want)
	wantContent(t, m.path("file"), want)
}

// TestSillyRename uses a file after its name is gone, by unlink and by a rename over it.
func TestSillyRename(t *testing.T) {
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
			_, err = f.WriteAt([]byte("STILL"), 0) // not sent yet
			must(t, err)
			must(t, remove())
			var buf [10]byte
			if _, err := f.ReadAt(buf[:], 0); err != nil || string(buf[:]) != "STILL here" {
				t.Errorf("read %q, %v", buf, err)
			}
			if hidden, _ := filepath.Glob(filepath.Join(e.dir, ".nfs*")); len(hidden) != 1 {
				t.Errorf("hidden files on the server: %v", hidden)
			}
			must(t, f.Close())
			for range 100 { // the kernel does not wait for the release
				if hidden, _ := filepath.Glob(filepath.Join(e.dir, ".nfs*")); len(hidden) == 0 {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
			t.Error("the hidden file is still on the server")
		})
	}
}

// TestCredentials sees on the server which user made a file, and who is kept out.
func TestCredentials(t *testing.T) {
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
		t.Errorf("the server has uid %d gid %d mode %o, want 4321, 1234, 640", st.Uid, st.Gid, st.Mode&0o7777)
	}
	if err := as(nil, "echo x >$M/group/file"); err == nil {
		t.Error("a user who is not in the group got in")
	}
	must(t, as([]uint32{7777}, "echo x >$M/group/file"))
	if err := as(nil, "set -C; echo x >$M/mine"); err == nil { // O_EXCL
		t.Error("O_EXCL took a file that exists")
	}
}

// allowParents lets every user through the directories above path.
func allowParents(t *testing.T, path string) {
	t.Helper()
	for dir := filepath.Dir(path); strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		must(t, os.Chmod(dir, 0o755))
	}
}

// TestSetIDWrite has somebody write to another's program with the set-user-id bit: the data
// arrives, and the server takes the bit away.
func TestSetIDWrite(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	must(t, os.Chmod(e.dir, 0o755))
	must(t, os.WriteFile(m.path("program"), []byte("old"), 0o644))
	must(t, unix.Chmod(m.path("program"), 0o4777))
	allowParents(t, m.dir)
	cmd := exec.Command("sh", "-c", "printf new 1<>"+m.path("program"))
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4321, Gid: 1234}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	wantContent(t, filepath.Join(e.dir, "program"), []byte("new"))
	for _, path := range []string{filepath.Join(e.dir, "program"), m.path("program")} {
		var st unix.Stat_t
		must(t, unix.Stat(path, &st))
		if st.Mode&0o7777 != 0o777 {
			t.Errorf("%s has mode %o, want 777", path, st.Mode&0o7777)
		}
	}
}

// TestSillyRemovalShows sees the directory's times move when the last close of a removed file
// removes its hidden name.
func TestSillyRemovalShows(t *testing.T) {
	e := startExport(t)
	m := e.mount(t, mountConfig{})
	must(t, os.Mkdir(m.path("dir"), 0o755))
	f, err := os.Create(m.path("dir/victim"))
	must(t, err)
	must(t, os.Remove(m.path("dir/victim")))
	var before, after, server unix.Stat_t
	must(t, unix.Stat(m.path("dir"), &before))
	must(t, f.Close())
	for range 200 { // the kernel does not wait for the release
		must(t, unix.Stat(m.path("dir"), &after))
		if after.Mtim != before.Mtim {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	must(t, unix.Stat(filepath.Join(e.dir, "dir"), &server))
	t.Errorf("the directory was changed at %v, then at %v on the server; the mount shows %v", before.Mtim,
		server.Mtim, after.Mtim)
}

// TestRmdirBehindSillyRename removes a directory right after the last close of a file that was
// removed from it: the hidden name is not in the way. While the file is open, it is.
func TestRmdirBehindSillyRename(t *testing.T) {
	m := startExport(t).mount(t, mountConfig{})
	for range 30 {
		must(t, os.Mkdir(m.path("dir"), 0o755))
		f, err := os.Create(m.path("dir/victim"))
		must(t, err)
		must(t, os.Remove(m.path("dir/victim")))
		must(t, f.Close())
		must(t, unix.Rmdir(m.path("dir")))
	}
	must(t, os.Mkdir(m.path("dir"), 0o755))
	f, err := os.Create(m.path("dir/victim"))
	must(t, err)
	defer f.Close()
	must(t, os.Remove(m.path("dir/victim")))
	if err := unix.Rmdir(m.path("dir")); err != syscall.ENOTEMPTY {
		t.Errorf("rmdir above an open file: %v, want ENOTEMPTY", err)
	}
}
