package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// A driver that is killed leaves the mounts. The next one continues with them.
func TestDriverRestartKeepsVolumes(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	n.stage(v)
	dir := n.publish(v, "pod-1")
	f, err := os.Create(filepath.Join(dir, "open"))
	if err != nil {
		t.Fatal(err)
	}
	n.restartDriver()
	if _, err := f.WriteString("after"); err != nil {
		t.Error(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	hasFile(t, n.onServer("pvc-1", "open"), "after")
	n.stage(v)
	n.publish(v, "pod-1")
	write(t, filepath.Join(n.publish(v, "pod-2"), "second"), "2")
	hasFile(t, filepath.Join(dir, "second"), "2")
	n.waitMounted(1)

	_, err = n.NodeUnstageVolume(t.Context(), n.unstageRequest(v))
	fails(t, err, codes.FailedPrecondition, "published at")
	for range 2 { // each call can be repeated
		n.unpublish(v, "pod-1")
		n.unpublish(v, "pod-2")
	}
	n.restartDriver()
	for range 2 {
		n.unstage(v)
	}
	n.waitMounted(0)
	n.remove(v.GetVolumeId())
	exists(t, n.onServer("pvc-1"), false)
}

// A daemon that is killed leaves its mounts to the next one, with all volumes that are published.
func TestDaemonKillKeepsVolumes(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	n.stage(v)
	dir := n.publish(v, "pod-1")
	w := startWriter(t, filepath.Join(dir, "open"))
	w.write("before")
	hasText(n, n.onServer("pvc-1", "open"), "before\n")
	n.daemon.End(t, syscall.SIGKILL)
	if r, err := n.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || r.GetReady().GetValue() {
		t.Errorf("probe without a daemon: got %v, %v, want that it is not ready", r, err)
	}
	_, err := n.NodePublishVolume(t.Context(), n.publishRequest(v, "pod-2"))
	fails(t, err, codes.Unavailable, "not running")
	w.write("while") // waits for the next daemon
	n.startDaemon()
	n.waitMounted(1)
	hasText(n, n.onServer("pvc-1", "open"), "before\nwhile\n")
	hasFile(t, filepath.Join(n.publish(v, "pod-2"), "open"), "before\nwhile\n")
	w.write("after")
	w.end()
	hasFile(t, n.onServer("pvc-1", "open"), "before\nwhile\nafter\n")
	n.unpublish(v, "pod-1")
	n.unpublish(v, "pod-2")
	n.unstage(v)
	n.waitMounted(0)
}

// When the mounts end with their daemon, publishing a volume again makes a new mount.
func TestEndedMountIsReplaced(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	const noKeep = "--keep-mounts=false"
	n := newNode(t, noKeep)
	v, other := n.create("pvc-1"), n.create("pvc-2")
	for _, v := range []*csi.Volume{v, other} {
		n.stage(v)
		n.publish(v, v.GetVolumeContext()["subDir"])
	}
	n.daemon.End(t, syscall.SIGKILL)
	n.startDaemon(noKeep)
	n.hasHealth(v, "pvc-1", "MountEnded")
	_, err := n.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.GetVolumeId(),
		VolumePath: filepath.Join(n.kubelet, "pvc-1")})
	fails(t, err, codes.Internal, "not connected")
	write(t, filepath.Join(n.publish(v, "pod-2"), "a"), "new")
	hasFile(t, filepath.Join(n.publish(v, "pvc-1"), "a"), "new") // the same target path
	n.unpublish(v, "pvc-1")
	n.unpublish(v, "pod-2")
	n.unstage(v)
	n.unpublish(other, "pvc-2") // of a mount that has ended
	n.unstage(other)
	n.waitMounted(0)
}

// Volumes reach the host and pods in other mount namespaces, and leave them.
func TestMountPropagation(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	running, private := startPod(t, "slave"), startPod(t, "private")
	n.stage(v)
	dir := n.publish(v, "pod-1")
	q := n.publishRequest(v, "pod-2")
	q.Readonly = true
	r, err := n.NodePublishVolume(t.Context(), q)
	ok(n, r, err)

	late := startPod(t, "slave")
	write(t, filepath.Join(dir, "a"), "host")
	for _, p := range []*pod{running, late} {
		for _, path := range []string{n.staging(v), dir, q.GetTargetPath()} {
			if !p.sees(path) {
				t.Errorf("a pod does not see the mount at %s", path)
			}
		}
		hasFile(t, filepath.Join(p.root, dir, "a"), "host")
		write(t, filepath.Join(p.root, dir, "b"), "pod")
		hasFile(t, n.onServer("pvc-1", "b"), "pod")
		hasFile(t, filepath.Join(p.root, q.GetTargetPath(), "b"), "pod")
		if err := os.WriteFile(filepath.Join(p.root, q.GetTargetPath(), "c"), nil, 0o644); !errors.Is(err, unix.EROFS) {
			t.Errorf("write to a read-only volume: got error %v, want EROFS", err)
		}
	}
	if private.sees(dir) {
		t.Error("a namespace without propagation sees the mount; the test proves nothing")
	}

	n.unpublish(v, "pod-1")
	n.unpublish(v, "pod-2")
	n.unstage(v)
	for _, p := range []*pod{running, late} {
		for _, path := range []string{n.staging(v), dir, q.GetTargetPath()} {
			if p.sees(path) {
				t.Errorf("a pod still sees the mount at %s", path)
			}
		}
	}
	n.waitMounted(0)
}

// Access modes decide about writes, and about a second target path.
func TestAccessModes(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	n.stage(v)
	publish := func(pod string, mode csi.VolumeCapability_AccessMode_Mode, readOnly bool) error {
		q := n.publishRequest(v, pod)
		q.VolumeCapability, q.Readonly = capability(mode), readOnly
		_, err := n.NodePublishVolume(t.Context(), q)
		return err
	}
	for name, number := range csi.VolumeCapability_AccessMode_Mode_value {
		mode := csi.VolumeCapability_AccessMode_Mode(number)
		err := publish("pod", mode, false)
		if mode == csi.VolumeCapability_AccessMode_UNKNOWN {
			fails(t, err, codes.InvalidArgument, "unknown access mode")
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		err = os.WriteFile(filepath.Join(n.kubelet, "pod", "a"), nil, 0o644)
		if isReader := strings.Contains(name, "READER_ONLY"); isReader != errors.Is(err, unix.EROFS) ||
			!isReader && err != nil {
			t.Errorf("%s: write: got error %v", name, err)
		}
		again := publish("pod", mode, true)
		if isReader := strings.Contains(name, "READER_ONLY"); isReader && again != nil {
			t.Errorf("%s: repeated call: %v", name, again)
		} else if !isReader {
			fails(t, again, codes.AlreadyExists, "already published with readonly=false")
		}
		n.unpublish(v, "pod")
	}
	if err := publish("pod-1", manyWriters, false); err != nil {
		t.Error(err)
	}
	fails(t, publish("pod-2", oneWriter, false), codes.FailedPrecondition, "SINGLE_NODE_SINGLE_WRITER")
	n.unpublish(v, "pod-1")

	q := n.stageRequest(v)
	q.VolumeCapability = &csi.VolumeCapability{AccessMode: q.VolumeCapability.AccessMode,
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	_, err := n.NodeStageVolume(t.Context(), q)
	fails(t, err, codes.InvalidArgument, "block volumes")
	second := n.create("pvc-2")
	q = n.stageRequest(second)
	q.StagingTargetPath = n.staging(v)
	_, err = n.NodeStageVolume(t.Context(), q)
	fails(t, err, codes.AlreadyExists, "unstage it first")
	n.unstage(v)
}

// What DeleteVolume does depends on onDelete. The directory has the wanted name and mode.
func TestCreateAndDelete(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	metadata := []string{"csi.storage.k8s.io/pvc/name", "data", "csi.storage.k8s.io/pvc/namespace", "shop",
		"csi.storage.k8s.io/pv/name", "pvc-7"}
	v := n.create("pvc-7", append(metadata, "subDir", "${pvc.metadata.namespace}/${pvc.metadata.name}",
		"mountPermissions", "2775", "onDelete", "archive")...)
	if want := "127.0.0.1##shop/data#pvc-7#archive"; v.GetVolumeId() != want {
		t.Errorf("got volume ID %q, want %q", v.GetVolumeId(), want)
	}
	if fi, err := os.Stat(n.onServer("shop", "data")); err != nil || fi.Mode() != os.ModeDir|os.ModeSetgid|0o775 {
		t.Errorf("directory of the volume: got %v, %v, want mode 2775", fi, err)
	}
	again := n.create("pvc-7", append(metadata, "subdir", "${pvc.metadata.namespace}/${pvc.metadata.name}",
		"mountpermissions", "2775", "ondelete", "Archive")...)
	if again.GetVolumeId() != v.GetVolumeId() {
		t.Errorf("got volume ID %q from the second call, want %q", again.GetVolumeId(), v.GetVolumeId())
	}
	write(t, n.onServer("shop", "data", "a"), "1")
	for range 2 {
		n.remove(v.GetVolumeId())
	}
	hasFile(t, n.onServer("shop", "archived-data", "a"), "1")
	if err := os.Mkdir(n.onServer("shop", "data"), 0o755); err != nil {
		t.Error(err)
	}
	n.remove(v.GetVolumeId())
	hasFile(t, n.onServer("shop", "archived-data", "a"), "1")
	exists(t, n.onServer("shop", "archived-data-1"), true)

	kept := n.create("pvc-8", "onDelete", "retain")
	n.remove(kept.GetVolumeId())
	exists(t, n.onServer("pvc-8"), true)

	deleted := n.create("pvc-9", "onDelete", "delete")
	if err := os.MkdirAll(n.onServer("pvc-9", "x", "y"), 0o700); err != nil {
		t.Error(err)
	}
	if err := os.Symlink("../pvc-8", n.onServer("pvc-9", "x", "link")); err != nil {
		t.Error(err)
	}
	n.remove(deleted.GetVolumeId())
	exists(t, n.onServer("pvc-9"), false)
	exists(t, n.onServer("pvc-8"), true)
	n.waitMounted(0)

	// The log has the call, and no mount option, which may be a secret.
	kit.Eventually(t, "call in the log", func() bool { return strings.Contains(n.driver.Out.String(), "DeleteVolume") })
	if log := n.driver.Out.String(); !strings.Contains(log, v.GetVolumeId()) || strings.Contains(log, n.options()) {
		t.Errorf("the log lacks the volume, or has the secret %q:\n%s", n.options(), log)
	}
}

// A volume that an administrator has written has no ID of this driver. Its attributes say where it
// is.
func TestStaticVolume(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	if err := os.MkdirAll(n.onServer("a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	v := &csi.Volume{VolumeId: "any text", VolumeContext: n.parameters("share", "/a", "subDir", "b",
		"mountPermissions", "0770", "storage.kubernetes.io/csiProvisionerIdentity", "x")}
	n.stage(v)
	write(t, filepath.Join(n.publish(v, "pod"), "c"), "3")
	hasFile(t, n.onServer("a", "b", "c"), "3")
	if fi, err := os.Stat(n.onServer("a", "b")); err != nil || fi.Mode().Perm() != 0o770 {
		t.Errorf("directory of the volume: got %v, %v, want mode 0770", fi, err)
	}
	n.unpublish(v, "pod")
	n.unstage(v)
	n.remove(v.GetVolumeId()) // not a volume that the driver has created
	exists(t, n.onServer("a", "b", "c"), true)
}

// No name of a request, and no symbolic link on the server, leads out of the directory of a volume.
func TestTraversalIsRefused(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	outside := t.TempDir()
	for _, dir := range []string{"victim/data", "tenant"} {
		if err := os.MkdirAll(n.onServer(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"tenant/link": "../victim", "tenant/last": "../victim/data",
		"tenant/out": outside} {
		if err := os.Symlink(target, n.onServer(name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, subDir := range []string{"..", "../x", "a/../../x", "/abs", "a//b", "a/", ".", "a/./b", "a\x00b", "a#b",
		"a\nb",
		"${pvc.metadata.nam}", "tenant/link/new", "tenant/last", "tenant/out/new"} {
		_, err := n.CreateVolume(t.Context(), n.createRequest("pvc-1", "subDir", subDir))
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("create with subDir %q: got error %v, want InvalidArgument", subDir, err)
		}
		q := n.stageRequest(&csi.Volume{VolumeId: "static", VolumeContext: n.parameters()})
		if q.VolumeContext["subDir"] = subDir; strings.HasPrefix(subDir, "tenant/") {
			continue // the server resolves the path of a mount
		}
		_, err = n.NodeStageVolume(t.Context(), q)
		fails(t, err, codes.InvalidArgument, "volume attributes")
	}
	for _, name := range []string{"..", "a/b", "../x"} {
		_, err := n.CreateVolume(t.Context(), n.createRequest(name))
		fails(t, err, codes.InvalidArgument, "volume name")
	}
	for _, pair := range [][2]string{{"server", "h/x"}, {"server", "h#x"}, {"server", ""}, {"share", "x"}, {"share",
		"/a/../b"},
		{"share", "/a#b"}, {"share", ""}, {"onDelete", "purge"}, {"mountPermissions", "rwx"}, {"subdirectory", "x"},
		{"csi.storage.k8s.io/pvc/name", "../x"}} {
		q := n.createRequest("pvc-1", pair[:]...)
		q.Parameters["subDir"] = "x/${pvc.metadata.name}"
		_, err := n.CreateVolume(t.Context(), q)
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("create with %s %q: got error %v, want InvalidArgument", pair[0], pair[1], err)
		}
	}
	for _, id := range []string{"127.0.0.1##../victim##", "127.0.0.1##tenant/../victim##", "127.0.0.1##/victim##",
		"127.0.0.1##victim", "127.0.0.1##victim###", "127.0.0.1####", "127.0.0.1##.##", "127.0.0.1##victim/##",
		"127.0.0.1##victim##purge", "127.0.0.1##victim\x00##", "127.0.0.1#tenant/..#victim##"} {
		n.remove(id) // names no volume
	}
	for _, id := range []string{"127.0.0.1##tenant/link/data##", "127.0.0.1##tenant/last##",
		"127.0.0.1##tenant/link/data##archive"} {
		_, err := n.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id, Secrets: n.secrets()})
		fails(t, err, codes.InvalidArgument, "symbolic links")
	}
	exists(t, n.onServer("victim", "data"), true)
	exists(t, n.onServer("victim", "new"), false)
	exists(t, n.onServer("tenant", "last"), true)
	exists(t, filepath.Join(outside, "new"), false)
	n.waitMounted(0)
}

// hasHealth checks the health of a published volume. "" is no reason.
func (n *node) hasHealth(v *csi.Volume, pod, reason string) {
	n.t.Helper()
	for _, q := range []*csi.NodeGetVolumeHealthRequest{
		{VolumeId: v.GetVolumeId(), VolumePublishPath: filepath.Join(n.kubelet, pod)},
		{VolumeId: v.GetVolumeId(), StagingTargetPath: n.staging(v)},
	} {
		r, err := n.NodeGetVolumeHealth(n.t.Context(), q)
		l := ok(n, r, err).GetVolumeHealth().GetHealthStatuses()
		switch {
		case reason == "" && len(l) > 0:
			n.t.Errorf("got health %v, want none", l)
		case reason != "" && (len(l) != 1 || l[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE ||
			l[0].GetReason() != reason || l[0].GetMessage() == ""):
			n.t.Errorf("got health %v, want INACCESSIBLE with reason %s", l, reason)
		}
	}
}

// A server that does not reply delays no call for long, and no other volume.
func TestServerWithoutReply(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	n.stage(v)
	n.publish(v, "pod-1")
	n.publish(v, "pod-2")
	n.hasHealth(v, "pod-1", "")
	stats := func() (*csi.NodeGetVolumeStatsResponse, error) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return n.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.GetVolumeId(),
			VolumePath: filepath.Join(n.kubelet, "pod-1")})
	}
	r, err := stats()
	usage := ok(n, r, err).GetUsage()
	if len(usage) != 2 || usage[0].GetTotal() != 64<<20 || usage[0].GetAvailable() <= 0 || usage[1].GetTotal() <= 0 {
		t.Errorf("got usage %v, want 64 MiB and the inodes", usage)
	}

	n.pauseServer()
	errs := make(chan error)
	for range 3 {
		go func() {
			_, err := stats()
			errs <- err
		}()
	}
	for range 3 {
		fails(t, <-errs, codes.Unavailable, "no reply")
	}
	n.hasHealth(v, "pod-1", "ServerNotResponding")
	n.unpublish(v, "pod-2")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, err := n.CreateVolume(ctx, n.createRequest("pvc-2"))
		errs <- err
	}()
	kit.Eventually(t, "private mount", n.isCreating)
	_, err = n.CreateVolume(t.Context(), n.createRequest("pvc-2"))
	fails(t, err, codes.Aborted, "in progress")
	cancel()
	fails(t, <-errs, codes.Canceled, "")

	n.resumeServer()
	n.daemon.WaitFor(t, "creating the volume", func() error {
		_, err := n.CreateVolume(t.Context(), n.createRequest("pvc-2"))
		return err
	})
	exists(t, n.onServer("pvc-2"), true)
	n.daemon.WaitFor(t, "statistics of the volume", func() error { _, err := stats(); return err })
	n.hasHealth(v, "pod-1", "")
	n.unpublish(v, "pod-1")
	n.unstage(v)
	n.waitMounted(0)
}

// isCreating reports whether the driver has requested a private mount.
func (n *node) isCreating() bool {
	l, err := n.list()
	if err != nil {
		n.t.Error(err)
		return true
	}
	for i := range l {
		if strings.HasPrefix(l[i].Dir, filepath.Join(n.kubelet, "work")) {
			return true
		}
	}
	return false
}

// A call that waits for the server ends when its client gives it up, and leaves no mount. The next call
// continues its work.
func TestDeleteOnServerWithoutReply(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	const files = 10000
	for i := range files {
		write(t, n.onServer("pvc-1", fmt.Sprint(i)), "")
	}
	left := func() int {
		names, _ := os.ReadDir(n.onServer("pvc-1"))
		return len(names)
	}
	result := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, err := n.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId(), Secrets: n.secrets()})
		result <- err
	}()
	kit.Eventually(t, "removed file", func() bool { return left() < files })
	n.pauseServer()
	if left() == 0 {
		t.Fatal("the volume is removed before the server was stopped; use more files")
	}
	cancel()
	fails(t, <-result, codes.Canceled, "")
	n.daemon.WaitFor(t, "end of the private mount", func() error {
		if n.isCreating() {
			return errors.New("still mounted")
		}
		return nil
	})
	n.resumeServer()
	n.driver.WaitFor(t, "removing the volume", func() error {
		_, err := n.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId(), Secrets: n.secrets()})
		return err
	})
	exists(t, n.onServer("pvc-1"), false)
	n.waitMounted(0)
}

// A driver unmounts the private mounts that an earlier driver left when it was killed during a
// call.
func TestPrivateMountsAreReleased(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	left := filepath.Join(n.kubelet, "work", "left")
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	mounts.Run(t, "", program(t), "mount", "--control-socket", n.socket, "127.0.0.1:/", left, "-o",
		n.options())
	n.waitMounted(1)
	n.restartDriver()
	n.waitMounted(0)
	exists(t, left, false)
}
