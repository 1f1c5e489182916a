package kubernetes

import (
	"context"
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

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// limit bounds what takes a second on an idle host.
const limit = time.Minute

// container runs a program as Kubernetes does in a container with the directory of kubelet mounted
// with Bidirectional propagation: in a new mount namespace, in which a shared mount stays shared.
var container = []string{"unshare", "--mount", "--propagation", "unchanged"}

func TestMain(m *testing.M) {
	// Ginkgo, which csi-sanity uses, leaves a goroutine for signals.
	mounts.MainOwnProcess(m, goleak.IgnoreTopFunction(
		"github.com/onsi/ginkgo/v2/internal/interrupt_handler.(*InterruptHandler).registerForInterrupts.func2"))
}

// program returns the path of nfsrdmad.
func program(t *testing.T) string {
	t.Helper()
	file, err := mounts.Program()
	kit.Must(t, err)
	return file
}

// A node is a node of a cluster with a daemon and a driver.
type node struct {
	t       *testing.T
	server  *mounts.ServedDir
	kubelet string // the directory of kubelet
	socket  string // of the daemon
	daemon  *mounts.Process
	driver  *mounts.Process
	conn    *grpc.ClientConn
	csi.ControllerClient
	csi.NodeClient
	csi.IdentityClient
}

// newNode starts a server, a daemon with the given flags, and a driver.
func newNode(t *testing.T, daemonFlags ...string) *node {
	t.Helper()
	n := &node{t: t, server: mounts.ServeDir(t, mounts.MemoryDir(t, "size=64m,mode=777"), "--no-root-squash"),
		kubelet: mounts.MemoryDir(t, "size=64m,mode=755")}
	if err := unix.Mount("", n.kubelet, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.checkMounts)
	n.socket = filepath.Join(t.TempDir(), "control.sock")
	n.startDaemon(daemonFlags...)
	n.startDriver()
	var err error
	if n.conn, err = grpc.NewClient(n.endpoint(),
		grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.conn.Close() })
	n.ControllerClient, n.NodeClient = csi.NewControllerClient(n.conn), csi.NewNodeClient(n.conn)
	n.IdentityClient = csi.NewIdentityClient(n.conn)
	n.waitReady()
	return n
}

func (n *node) endpoint() string { return "unix://" + filepath.Join(n.kubelet, "csi.sock") }

func (n *node) startDaemon(flags ...string) {
	n.t.Helper()
	n.daemon = mounts.StartProcess(n.t, container, nil, append([]string{"daemon", "--control-socket", n.socket,
		"--metrics-listen", "", "--state-dir", filepath.Dir(n.socket)}, flags...)...)
	n.daemon.WaitFor(n.t, "starting the daemon", func() error {
		_, err := n.list()
		return err
	})
}

func (n *node) startDriver() {
	n.t.Helper()
	n.driver = mounts.StartProcess(n.t, container, nil, "csi", "--node-id", "node-1", "--endpoint", n.endpoint(),
		"--control-socket", n.socket, "--work-dir", filepath.Join(n.kubelet, "work"))
}

// waitReady waits until the driver replies that the daemon replies.
func (n *node) waitReady() {
	n.t.Helper()
	n.driver.WaitFor(n.t, "starting the driver", func() error {
		r, err := n.Probe(n.t.Context(), &csi.ProbeRequest{})
		if err == nil && !r.GetReady().GetValue() {
			err = errors.New("not ready")
		}
		return err
	})
}

// restartDriver kills the driver and starts it again.
func (n *node) restartDriver() {
	n.t.Helper()
	n.driver.End(n.t, syscall.SIGKILL)
	n.startDriver()
	n.waitReady()
}

// pauseServer stops the server, and returns when all its threads have stopped.
func (n *node) pauseServer() {
	n.t.Helper()
	if err := syscall.Kill(n.server.PID(), syscall.SIGSTOP); err != nil {
		n.t.Fatal(err)
	}
	n.daemon.WaitFor(n.t, "stopping the server", func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", n.server.PID()))
		if err != nil || len(threads) == 0 {
			return fmt.Errorf("no threads: %w", err)
		}
		for _, file := range threads {
			if b, err := os.ReadFile(file); err != nil || !strings.Contains(string(b), "State:\tT") {
				return errors.New("a thread runs")
			}
		}
		return nil
	})
}

func (n *node) resumeServer() {
	n.t.Helper()
	if err := syscall.Kill(n.server.PID(), syscall.SIGCONT); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) list() ([]control.MountInfo, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return control.NewClient(n.socket).List(ctx)
}

// daemonID returns the process ID of the daemon, or 0 if it does not reply.
func (n *node) daemonID() int {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	v, err := control.NewClient(n.socket).Version(ctx)
	if err != nil {
		return 0
	}
	return v.PID
}

// waitMounted waits until the daemon has continued all mounts.
func (n *node) waitMounted(want int) {
	n.t.Helper()
	n.daemon.WaitFor(n.t, "continuing the mounts", func() error {
		l, err := n.list()
		if err != nil {
			return err
		}
		if len(l) != want {
			return fmt.Errorf("got %d mounts, want %d", len(l), want)
		}
		for i := range l {
			if l[i].State != control.StateMounted {
				return fmt.Errorf("%s is %s", l[i].Dir, l[i].State)
			}
		}
		return nil
	})
}

// checkMounts fails a test that has left a mount, and removes it.
func (n *node) checkMounts() {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.t.Error(err)
	}
	for line := range strings.Lines(string(table)) {
		dir := strings.Fields(line)[4]
		if !strings.HasPrefix(dir, n.kubelet+"/") {
			continue
		}
		if !n.t.Failed() {
			n.t.Errorf("%s is mounted at the end of the test", dir)
		}
		_ = unix.Unmount(dir, unix.MNT_FORCE)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
}

// options are the mount options for the ports of the server.
func (n *node) options() string {
	return "port=" + mounts.PortOf(n.t, n.server.RDMA) + ",mountport=" + mounts.PortOf(n.t, n.server.TCP)
}

func (n *node) secrets() map[string]string { return map[string]string{"mountOptions": n.options()} }

// parameters are those of a StorageClass. pairs are names and values.
func (n *node) parameters(pairs ...string) map[string]string {
	p := map[string]string{"server": "127.0.0.1", "share": "/", "mountOptions": n.options()}
	for i := 0; i < len(pairs); i += 2 {
		p[pairs[i]] = pairs[i+1]
	}
	return p
}

// capability is a mounted volume with an access mode.
func capability(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

const (
	manyWriters = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	manyReaders = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	oneWriter   = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
)

// ok stops the test if a call failed.
func ok[T any](n *node, reply T, err error) T {
	n.t.Helper()
	if err != nil {
		n.t.Fatalf("call failed: %v", err)
	}
	return reply
}

// fails checks the code and the text of a call that must fail.
func fails(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want %v with %q", err, code, text)
	}
}

func (n *node) create(name string, pairs ...string) *csi.Volume {
	n.t.Helper()
	r, err := n.CreateVolume(n.t.Context(), n.createRequest(name, pairs...))
	return ok(n, r, err).GetVolume()
}

func (n *node) createRequest(name string, pairs ...string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, Parameters: n.parameters(pairs...),
		VolumeCapabilities: []*csi.VolumeCapability{capability(manyWriters)}}
}

func (n *node) remove(id string) {
	n.t.Helper()
	r, err := n.DeleteVolume(n.t.Context(), &csi.DeleteVolumeRequest{VolumeId: id, Secrets: n.secrets()})
	ok(n, r, err)
}

// staging returns the staging path of a volume. kubelet creates the directory.
func (n *node) staging(v *csi.Volume) string {
	dir := filepath.Join(n.kubelet, "staging-"+v.GetVolumeContext()["subDir"])
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) { // does not wait for a mount
		n.t.Error(err)
	}
	return dir
}

func (n *node) stageRequest(v *csi.Volume) *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: n.staging(v),
		VolumeCapability: capability(manyWriters), VolumeContext: v.GetVolumeContext()}
}

func (n *node) stage(v *csi.Volume) {
	n.t.Helper()
	r, err := n.NodeStageVolume(n.t.Context(), n.stageRequest(v))
	ok(n, r, err)
}

func (n *node) publishRequest(v *csi.Volume, pod string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: n.staging(v),
		TargetPath: filepath.Join(n.kubelet, pod), VolumeCapability: capability(manyWriters),
		VolumeContext: v.GetVolumeContext()}
}

// publish publishes a volume for a pod, and returns the target path.
func (n *node) publish(v *csi.Volume, pod string) string {
	n.t.Helper()
	q := n.publishRequest(v, pod)
	r, err := n.NodePublishVolume(n.t.Context(), q)
	ok(n, r, err)
	return q.GetTargetPath()
}

func (n *node) unpublish(v *csi.Volume, pod string) {
	n.t.Helper()
	r, err := n.NodeUnpublishVolume(n.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(),
		TargetPath: filepath.Join(n.kubelet, pod)})
	ok(n, r, err)
}

func (n *node) unstage(v *csi.Volume) {
	n.t.Helper()
	r, err := n.NodeUnstageVolume(n.t.Context(), n.unstageRequest(v))
	ok(n, r, err)
}

func (n *node) unstageRequest(v *csi.Volume) *csi.NodeUnstageVolumeRequest {
	return &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: n.staging(v)}
}

// onServer returns the path of a file in the export.
func (n *node) onServer(elem ...string) string {
	return filepath.Join(append([]string{n.server.Dir}, elem...)...)
}

// hasFile checks the content of a file.
func hasFile(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s: got %q, %v, want %q", path, got, err, want)
	}
}

// exists checks whether a file exists.
func exists(t *testing.T, path string, want bool) {
	t.Helper()
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) == want {
		t.Errorf("%s: got error %v, want that it exists: %v", path, err, want)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Error(err)
	}
}

// A pod is a mount namespace that receives mounts of the node.
type pod struct {
	t    *testing.T
	root string // its root directory, as seen from the test
}

// startPod starts a pod. Its container has a volume mount with the given propagation.
func startPod(t *testing.T, propagation string) *pod {
	t.Helper()
	cmd := exec.Command("unshare", "--mount", "--propagation", propagation, "sh", "-c", "echo; exec sleep infinity")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil { // the namespace exists
		t.Fatal(err)
	}
	return &pod{t: t, root: fmt.Sprintf("/proc/%d/root", cmd.Process.Pid)}
}

// sees reports whether dir is a mount point of a daemon in the namespace.
func (p *pod) sees(dir string) bool {
	p.t.Helper()
	table, err := os.ReadFile(filepath.Join(filepath.Dir(p.root), "mountinfo"))
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); f[4] == dir && strings.Contains(line, " fuse.nfsrdma ") {
			return true
		}
	}
	return false
}

// A writer is a program with a file open for writing. The test must not have a file open on a mount
// without a daemon: a program that the test starts would wait for the daemon, to close its copy.
type writer struct {
	t     *testing.T
	cmd   *exec.Cmd
	input io.WriteCloser
}

func startWriter(t *testing.T, path string) *writer {
	t.Helper()
	cmd := exec.Command("dd", "bs=4096", "status=none", "oflag=append,sync", "conv=notrunc", "of="+path)
	input, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return &writer{t, cmd, input}
}

// write writes one line. It does not wait until the file has it.
func (w *writer) write(line string) {
	w.t.Helper()
	if _, err := io.WriteString(w.input, line+"\n"); err != nil {
		w.t.Error(err)
	}
}

// end closes the file, which must report no error.
func (w *writer) end() {
	w.t.Helper()
	w.input.Close()
	if err := w.cmd.Wait(); err != nil {
		w.t.Errorf("program with an open file: %v", err)
	}
}

// hasText waits until a file has the wanted content.
func hasText(n *node, path, want string) {
	n.t.Helper()
	n.driver.WaitFor(n.t, "content of "+path, func() error {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			return fmt.Errorf("got %q, %v, want %q", got, err, want)
		}
		return nil
	})
}
