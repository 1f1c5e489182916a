package nlm_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Environment of a process that a test starts from the test binary: the port of the lock service,
// the state directory, and the step at which the process kills itself.
const (
	childPort = "NLM_TEST_PORT"
	childDir  = "NLM_TEST_DIR"
	childStep = "NLM_TEST_STEP"
)

func TestMain(m *testing.M) {
	if port := os.Getenv(childPort); port != "" {
		if err := lockUntilKilled(port); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	kit.Main(m)
}

// killSpan is the number of bytes that are locked.
const killSpan = 30

// killOps are the requests of the process, with the modes of the bytes after each: free, shared or
// exclusive.
var killOps = []struct {
	do    func(context.Context, *nlm.Client) error
	modes string
}{
	{lockOp(exclusive(alice, 0, 29)), "eeeeeeeeeeeeeeeeeeeeeeeeeeeeee"},
	{lockOp(shared(alice, 10, 19)), "eeeeeeeeeesssssssssseeeeeeeeee"},
	{unlockOp(14, 24), "eeeeeeeeeessss...........eeeee"},
	{lockOp(exclusive(alice, 5, 27)), "eeeeeeeeeeeeeeeeeeeeeeeeeeeeee"},
	{unlockOp(3, 3), "eee.eeeeeeeeeeeeeeeeeeeeeeeeee"},
	{unlockOp(0, whole), ".............................."},
}

func lockOp(l nlm.Lock) func(context.Context, *nlm.Client) error {
	return func(ctx context.Context, c *nlm.Client) error { return c.Lock(ctx, cred, fh, l, false) }
}

func unlockOp(start, end uint64) func(context.Context, *nlm.Client) error {
	return func(ctx context.Context, c *nlm.Client) error { return c.Unlock(ctx, cred, fh, alice, start, end) }
}

// lockUntilKilled is the child. It has the file in descriptor 3, and writes a byte to descriptor 4
// after each request.
func lockUntilKilled(port string) error {
	f, err := slotfile.Open(os.NewFile(3, "file"), 1, nlm.StateTables())
	if err != nil {
		return err
	}
	steps, err := strconv.Atoi(os.Getenv(childStep))
	if err != nil {
		return err
	}
	f.OnChange(func() {
		if steps--; steps == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	cfg := nlm.Config{Host: "127.0.0.1", Caller: "test", State: nlm.NewState(f),
		Service: nlm.NewService(nlm.ServiceConfig{StateDir: os.Getenv(childDir), Restore: true})}
	cfg.Port, _ = strconv.Atoi(port)
	cfg.Quick(nil)
	c := nlm.New(cfg)
	done := os.NewFile(4, "pipe")
	for _, op := range killOps {
		if err := op.do(context.Background(), c); err != nil {
			return err
		}
		if _, err := done.Write([]byte{1}); err != nil {
			return err
		}
	}
	return nil
}

// runChild runs a process that kills itself at a step, with the state directory dir. It returns the
// number of requests that succeeded before. exited means that the process had fewer steps.
func (k *keptFile) runChild(step int, dir string) (done int, exited bool) {
	k.t.Helper()
	k.close()
	r, w, err := os.Pipe()
	kit.Must(k.t, err)
	defer r.Close()
	c := exec.Command("/proc/self/exe")
	port := strconv.Itoa(k.s.l.Addr().(*net.TCPAddr).Port)
	c.Env = append(os.Environ(), childPort+"="+port, childDir+"="+dir, childStep+"="+strconv.Itoa(step))
	c.ExtraFiles = []*os.File{k.d, w}
	c.Stderr = os.Stderr
	err = c.Start()
	w.Close()
	kit.Must(k.t, err)
	told, err := io.ReadAll(r)
	kit.Must(k.t, err)
	if err := c.Wait(); err != nil && c.ProcessState.Exited() {
		k.t.Fatalf("child: %v", err)
	}
	return len(told), c.ProcessState.Exited()
}

// modes returns the modes of the bytes in the table of a client.
func modes(c *nlm.Client) string {
	held, lost := c.Table(fh)
	m := slices.Repeat([]byte{'.'}, killSpan)
	for _, l := range held {
		for i := l.Start; i <= l.End; i++ {
			m[i] = mode(&l)
		}
	}
	return strings.Repeat("lost ", len(lost)) + string(m)
}

func mode(l *nlm.Lock) byte {
	if l.Exclusive {
		return 'e'
	}
	return 's'
}

// serverModes asks a server for the modes of the bytes, with another client.
func serverModes(t *testing.T, other *nlm.Client) string {
	t.Helper()
	m := slices.Repeat([]byte{'.'}, killSpan)
	for i := range uint64(killSpan) {
		holder, held, err := other.Test(t.Context(), cred, fh, exclusive(bob, i, i))
		kit.Must(t, err)
		if held {
			m[i] = mode(&holder)
		}
	}
	return string(m)
}

// TestLocksSurviveKill kills a process at each change of the records of its locks. The next process
// restores the locks of before or after the request in progress, and the server has the same. If the
// State is lost, the next process releases all locks.
func TestLocksSurviveKill(t *testing.T) {
	kit.Long(t)
	s := startLockServer(t)
	other := s.client(nil)
	for step := 1; ; step++ {
		dir := t.TempDir()
		newKeptFile(t, s, nlm.StateTables()).runChild(step, dir)
		lost := nlm.NewService(nlm.ServiceConfig{StateDir: dir})
		kit.Eventually(t, "release", func() bool { return len(ownersIn(t, dir)) == 0 })
		lost.Close()
		if n := s.locks(); n != 0 {
			t.Fatalf("step %d: %d locks at the server after the State is lost, want none", step, n)
		}
		k := newKeptFile(t, s, nlm.StateTables())
		done, exited := k.runChild(step, dir)
		if exited {
			if step < 4*len(killOps) || done != len(killOps) {
				t.Errorf("got %d steps, %d requests", step-1, done)
			}
			return
		}
		service := nlm.NewService(nlm.ServiceConfig{StateDir: dir, Restore: true})
		c := k.client(func(cfg *nlm.Config) { cfg.Service = service })
		c.WaitRestored()
		service.Restored()
		before, after, got := killOps[len(killOps)-1].modes, killOps[done].modes, modes(c)
		if done > 0 {
			before = killOps[done-1].modes
		}
		if got != before && got != after {
			t.Fatalf("step %d: restored\n%s, want\n%s or\n%s", step, got, before, after)
		}
		if at := serverModes(t, other); at != got {
			t.Fatalf("step %d: the server has\n%s, want\n%s", step, at, got)
		}
		if _, _, requests := k.state.Records(); requests != 0 {
			t.Fatalf("step %d: %d requests are not settled", step, requests)
		}
		release(t, c, alice)
		k.wantRecords(0, 0)
		c.Close()
		service.Close()
		if n := len(ownersIn(t, dir)); n != 0 {
			t.Fatalf("step %d: %d files left", step, n)
		}
	}
}
