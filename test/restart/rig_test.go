package restart

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/lockrace"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// limit ends a test that would hang.
const limit = 5 * time.Minute

func TestMain(m *testing.M) {
	lockrace.Main()
	if os.Getenv(workerEnv) != "" {
		runWorker()
		return
	}
	mounts.MainOwnProcess(m)
}

// An export is a directory that a server exports.
type export struct {
	dir     string // on the server
	source  string // HOST:/EXPORT
	options []string
}

// memoryDir is a directory in memory until the test ends. Servers wait for the disk before they
// reply to most calls, so they serve more calls between two restarts without one.
func memoryDir(t *testing.T) string {
	t.Helper()
	return mounts.MemoryDir(t, "size=512m,mode=777")
}

func embedded(t *testing.T) (*export, *mounts.ServedDir) {
	t.Helper()
	s := mounts.ServeDir(t, memoryDir(t), "--no-root-squash")
	return &export{dir: s.Dir, source: "127.0.0.1:/",
		options: []string{"port=" + mounts.PortOf(t, s.RDMA), "mountport=" + mounts.PortOf(t, s.TCP)}}, s
}

// A rig has a mount, and the daemons that serve the mount one after the other.
type rig struct {
	t       *testing.T
	x       *export
	state   string // directory for the state of the daemon
	socket  string
	metrics string         // address of the metrics of the daemon
	dir     string         // mount point
	before  map[string]int // descriptors of daemon and holder after the mount
	daemon  *mounts.Process
	daemons []*mounts.Process
	starts  int // of daemons
}

// newRig starts a daemon and mounts x.
func newRig(t *testing.T, x *export, options ...string) *rig {
	t.Helper()
	r := &rig{t: t, x: x, state: t.TempDir(), metrics: kit.FreePort(t).String(), dir: mounts.OpenTempDir(t)}
	r.socket = filepath.Join(r.state, "control.sock")
	t.Cleanup(r.cleanup)
	r.start()
	r.ready()
	r.cli("mount", x.source, r.dir, "-o", strings.Join(append(options, x.options...), ","))
	r.before = r.descriptors()
	return r
}

// cleanup removes a mount that a failed test has left.
func (r *rig) cleanup() {
	if mounts.IsMountPoint(r.dir) {
		if !r.t.Failed() {
			r.t.Errorf("%s is mounted at the end of the test", r.dir)
		}
		forceUnmount(r.dir)
	}
}

// forceUnmount ends the connection of a mount, so that no process waits for the mount.
func forceUnmount(dir string) {
	_ = unix.Unmount(dir, unix.MNT_FORCE) // EBUSY, but the connection has ended
	_ = unix.Unmount(dir, unix.MNT_DETACH)
}

// start starts a daemon and does not wait for it.
func (r *rig) start() {
	r.t.Helper()
	r.daemon = mounts.StartProcess(r.t, nil, nil, "daemon", "--control-socket", r.socket, "--metrics-listen",
		r.metrics, "--state-dir", r.state)
	r.daemons = append(r.daemons, r.daemon)
	r.starts++
}

// ready waits until the daemon accepts commands.
func (r *rig) ready() {
	r.t.Helper()
	r.daemon.WaitFor(r.t, "starting the daemon", func() error {
		_, err := r.list()
		return err
	})
}

func (r *rig) list() ([]control.MountInfo, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return control.NewClient(r.socket).List(ctx)
}

// waitState waits until the daemon lists the mount in a state, and returns the reason of the state.
func (r *rig) waitState(state control.MountState) (reason string) {
	r.t.Helper()
	kit.Succeeds(r.t, fmt.Sprintf("state %q of %s", state, r.dir), func() error {
		l, err := r.list()
		if err != nil {
			return err
		}
		if len(l) != 1 || l[0].Dir != r.dir || l[0].State != state {
			return fmt.Errorf("got mounts %+v", l)
		}
		reason = l[0].Reason
		return nil
	})
	return reason
}

// kill ends the daemon with a signal that it does not handle.
func (r *rig) kill(sig syscall.Signal) {
	r.t.Helper()
	r.daemon.End(r.t, sig)
}

// leave stops the daemon without unmounting. It may kill the process that keeps the mounts before.
func (r *rig) leave(killHolder bool) {
	r.t.Helper()
	r.ready()
	if killHolder {
		kit.Must(r.t, syscall.Kill(mounts.HolderOf(r.t, r.socket), syscall.SIGKILL))
	}
	r.cli("stop", "--keep-mounts")
	select {
	case <-r.daemon.Ended:
	case <-time.After(limit):
		r.t.Fatalf("daemon runs %v after stop --keep-mounts", limit)
	}
	if code := r.daemon.Cmd.ProcessState.ExitCode(); code != 0 {
		r.t.Errorf("daemon: got exit code %d after stop --keep-mounts, want 0", code)
	}
}

// command runs nfsrdmad with a command and returns its output.
func (r *rig) command(args ...string) (stdout, stderr string, err error) {
	r.t.Helper()
	file, err := mounts.Program()
	kit.Must(r.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, file, append(args, "--control-socket", r.socket)...)
	cmd.WaitDelay = time.Second
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	if ctx.Err() != nil {
		r.t.Fatalf("nfsrdmad %s: still runs after %v", strings.Join(args, " "), limit)
	}
	return out.String(), errOut.String(), err
}

// cli runs a command that must succeed.
func (r *rig) cli(args ...string) string {
	r.t.Helper()
	stdout, stderr, err := r.command(args...)
	if err != nil {
		r.t.Fatalf("nfsrdmad %s: %v: %s", strings.Join(args, " "), err, stderr)
	}
	return stdout
}

// refused runs a command that must fail with an error that contains the given texts.
func (r *rig) refused(args []string, want ...string) {
	r.t.Helper()
	_, stderr, err := r.command(args...)
	if err == nil {
		r.t.Errorf("nfsrdmad %s: succeeded, want an error", strings.Join(args, " "))
	}
	for _, w := range want {
		if !strings.Contains(stderr, w) {
			r.t.Errorf("nfsrdmad %s: got error %q, want %q in it", strings.Join(args, " "), stderr, w)
		}
	}
}

func (r *rig) status() control.MountStatus {
	r.t.Helper()
	var l []control.MountStatus
	if err := json.Unmarshal([]byte(r.cli("status", r.dir, "--output", "json")), &l); err != nil || len(l) != 1 {
		r.t.Fatalf("status: %d mounts, %v", len(l), err)
	}
	return l[0]
}

// unmount unmounts, and checks what remains. No worker has a file open.
func (r *rig) unmount() {
	r.t.Helper()
	r.checkReleased()
	n := r.status().Metrics.Count
	failed, recovered, recycled, orphaned := n("mrs_failed_total"), n("mrs_recovered_total"), n("mrs_recycled_total"),
		n("mrs_orphaned_total")
	if failed != recovered+recycled+orphaned {
		r.t.Errorf("%d MRs failed, but %d were recovered, %d recycled and %d orphaned", failed, recovered, recycled,
			orphaned)
	}
	if bad, refused := n("bad_reply_total"), n("remote_access_errors_total"); bad != 0 || refused != 0 {
		r.t.Errorf("got %d bad replies and %d remote access errors", bad, refused)
	}
	r.cli("umount", r.dir)
	r.end(0)
	r.checkLogs()
}

// end stops the last daemon, which must exit with the given code. No mount may remain, and the
// holder must end.
func (r *rig) end(code int) {
	r.t.Helper()
	if l, err := r.list(); err != nil || len(l) != 0 {
		r.t.Errorf("mounts at the end: got %+v, %v, want none", l, err)
	}
	if mounts.IsMountPoint(r.dir) {
		r.t.Errorf("%s is mounted at the end", r.dir)
	}
	holder := mounts.HolderOf(r.t, r.socket)
	if holder == 0 {
		r.t.Error("the process that keeps the mounts was not found")
	}
	r.daemon.End(r.t, syscall.SIGTERM)
	if got := r.daemon.Cmd.ProcessState.ExitCode(); got != code {
		r.t.Errorf("daemon: got exit code %d, want %d", got, code)
	}
	kit.Succeeds(r.t, "end of the process that keeps the mounts", func() error {
		if holder != 0 && syscall.Kill(holder, 0) == nil {
			return fmt.Errorf("process %d runs", holder)
		}
		return nil
	})
}

// mountEnds waits until the daemon lists no mount.
func (r *rig) mountEnds() {
	r.t.Helper()
	kit.Succeeds(r.t, "end of the mount", func() error {
		l, err := r.list()
		if err == nil && len(l) > 0 {
			err = fmt.Errorf("got mounts %+v", l)
		}
		return err
	})
}

// checkLogs checks the output of all daemons.
func (r *rig) checkLogs() {
	r.t.Helper()
	for _, d := range r.daemons {
		for line := range strings.Lines(d.Out.String()) {
			if strings.Contains(line, "[ERROR]") || strings.Contains(line, "panic:") {
				r.t.Errorf("log of a daemon: %s", line)
			}
		}
	}
}

// onServer checks the content of a file in the directory of the server.
func (r *rig) onServer(name string, want []byte) {
	r.t.Helper()
	if err := compare(filepath.Join(r.x.dir, name), want); err != nil {
		r.t.Errorf("on the server: %v", err)
	}
}

// compare compares the content of a file.
func compare(path string, want []byte) error {
	got, err := os.ReadFile(path)
	return compareContent(path, got, want, err)
}

// compareDirect is compare without the page cache: the directory of the server may be a mount, and
// the time of a change has a limited resolution.
func compareDirect(path string, want []byte) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	got := make([]byte, len(want)+1)
	n, err := io.ReadFull(f, got)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil
	}
	return compareContent(path, got[:n], want, err)
}

func compareContent(path string, got, want []byte, err error) error {
	if err == nil && !bytes.Equal(got, want) {
		i := 0
		for i < min(len(got), len(want)) && got[i] == want[i] {
			i++
		}
		err = fmt.Errorf("%s: %d bytes, which differ at offset %d from the %d bytes that were written", path, len(got),
			i, len(want))
	}
	return err
}
