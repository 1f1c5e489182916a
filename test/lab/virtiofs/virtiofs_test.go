package virtiofs

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { kit.Main(m) }

// dir is where the guest mounts the share: in the host's root, so that programs of the host use it.
const dir = "/host/tmp/share"

// A guest is a virtual machine with a share of an export.
type guest struct {
	*lab.Guest
	t      *testing.T
	files  string // directory of the host that the guest mounts too, at /share and by its path below /host
	export string // directory of the server, in files
	server *mounts.ServedDir
	share  *mounts.Process
	socket string
}

// start boots a guest with a share.
func start(t *testing.T) *guest {
	t.Helper()
	lab.SkipIfDisabled(t)
	files := mounts.OpenTempDir(t)
	g := &guest{t: t, files: files, export: filepath.Join(files, "export"),
		socket: filepath.Join(t.TempDir(), "share.sock")}
	kit.Must(t, os.Mkdir(g.export, 0o777))
	kit.Must(t, os.Chmod(g.export, 0o777))
	g.server = mounts.ServeDir(t, g.export, "--no-root-squash", "--allow-suid")
	g.serve()
	g.Guest = lab.Start(t, lab.Options{Provider: lab.None, HostRoot: true, Share: files, Virtiofs: g.socket})
	g.mount("true")
	return g
}

// mount mounts the share in the guest and runs a check.
func (g *guest) mount(check string) {
	g.t.Helper()
	g.must("modprobe virtiofs && mkdir -p " + dir + " && mount -t virtiofs share " + dir + " && " + check)
}

// serve starts the share.
func (g *guest) serve() {
	g.t.Helper()
	g.share = mounts.StartProcess(g.t, nil, nil, "virtiofs", "--foreground", "--socket", g.socket, "127.0.0.1:/", "-o",
		"port="+mounts.PortOf(g.t, g.server.RDMA)+",mountport="+mounts.PortOf(g.t, g.server.TCP))
	g.share.WaitFor(g.t, "listening", func() error {
		if !strings.Contains(g.share.Out.String(), "is served on "+g.socket) {
			return errors.New("no line yet")
		}
		return nil
	})
}

// must runs a shell command in the guest.
func (g *guest) must(command string) string {
	g.t.Helper()
	out, err := g.Run(command)
	if err != nil {
		g.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return out
}

// TestShare uses a share as programs do, restarts the server under it, resets the guest, and ends
// the share.
func TestShare(t *testing.T) {
	g := start(t)
	t.Run("Data", g.testData)
	t.Run("Git", g.testGit)
	t.Run("Locks", g.testLocks)
	t.Run("Restart", g.testRestart)
	t.Run("Reset", g.testReset)
	t.Run("End", g.testEnd)
}

// testData writes 64 MiB in the guest, and reads it from the server and again in the guest.
func (g *guest) testData(t *testing.T) {
	sum := func(out string) string { return strings.Fields(out)[0] }
	g.must("dd if=/dev/urandom of=/tmp/data bs=1M count=64 2>/dev/null")
	want := sum(g.must("sha256sum /tmp/data"))
	begin := time.Now()
	g.must("dd if=/tmp/data of=" + dir + "/data bs=1M conv=fsync 2>/dev/null")
	t.Logf("write: 64 MiB in %v", time.Since(begin))
	out, err := exec.Command("sha256sum", filepath.Join(g.export, "data")).Output()
	kit.Must(t, err)
	if got := sum(string(out)); got != want {
		t.Errorf("file on the server: got %s, want %s", got, want)
	}
	g.must("echo 3 > /proc/sys/vm/drop_caches")
	begin = time.Now()
	g.must("dd if=" + dir + "/data of=/dev/null bs=1M 2>/dev/null")
	t.Logf("read: 64 MiB in %v", time.Since(begin))
	if got := sum(g.must("sha256sum " + dir + "/data")); got != want {
		t.Errorf("file in the guest: got %s, want %s", got, want)
	}
	g.must("rm /tmp/data")
	kit.Must(t, os.WriteFile(filepath.Join(g.export, "by-server"), []byte("hello\n"), 0o644))
	if got := g.must("cat " + dir + "/by-server"); got != "hello\n" {
		t.Errorf("file of the server: got %q", got)
	}
	g.must("cd " + dir + " && mkdir d && ln -s d l && ln data d/hard && mv d/hard d/moved && chmod 600 d/moved && " +
		"[ $(stat -c %h,%a data) = 2,600 ] && mkfifo d/p && rm -r d l && [ $(stat -c %h data) = 1 ]")
}

// testGit clones a repository on the share with git of the host.
func (g *guest) testGit(t *testing.T) {
	repo := filepath.Join(g.export, "repo")
	script := `git init -q "$1" && cd "$1" || exit
for d in a b c; do mkdir $d; for i in $(seq 30); do echo "$d $i" >$d/$i; done; done
git add . && git -c user.name=t -c user.email=t@example.org commit -q -m first`
	if out, err := exec.Command("sh", "-c", script, "sh", repo).CombinedOutput(); err != nil {
		t.Fatalf("make the repository: %v\n%s", err, out)
	}
	begin := time.Now()
	g.must("chroot /host env HOME=/tmp GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' " +
		"sh -c 'cd /tmp/share && git clone -q --no-hardlinks repo clone && git -C clone fsck --full && " +
		"git -C clone status --porcelain && diff -r -x .git repo clone'")
	t.Logf("git clone, fsck, status and diff of 90 files: %v", time.Since(begin))
	out, err := exec.Command("diff", "-r", "-x", ".git", repo, filepath.Join(g.export, "clone")).CombinedOutput()
	if err != nil {
		t.Errorf("clone on the server: %v\n%s", err, out)
	}
}

// testLocks checks that a lock which waits does not stop other requests.
func (g *guest) testLocks(*testing.T) {
	g.must("cd " + dir + " && touch lock && (flock 9; sleep 2; echo first >>order) 9<lock & sleep 1; cd " + dir +
		" && (flock 9; echo second >>order) 9<lock & cd " + dir + "; stat data >/dev/null; wait; " +
		"[ \"$(tr '\\n' ' ' <order)\" = 'first second ' ]")
}

// testRestart restarts the server while the guest writes.
func (g *guest) testRestart(t *testing.T) {
	done := make(chan error, 1)
	go func() {
		_, err := g.Run("cd " + dir + "; for i in $(seq 200); do echo line $i >>lines && sync lines || exit 1; done")
		done <- err
	}()
	time.Sleep(time.Second)
	g.server.Restart(t, syscall.SIGKILL, func() { time.Sleep(2 * time.Second) })
	select {
	case err := <-done:
		kit.Must(t, err)
	case <-time.After(2 * time.Minute):
		t.Fatal("the guest does not continue after the restart of the server")
	}
	b, err := os.ReadFile(filepath.Join(g.export, "lines"))
	kit.Must(t, err)
	if n := bytes.Count(b, []byte("\n")); n != 200 {
		t.Errorf("lines on the server: got %d, want 200", n)
	}
}

// testReset resets the guest while it has a file open, and mounts again.
func (g *guest) testReset(t *testing.T) {
	g.must("sh -c 'exec 9>" + dir + "/open; echo unsynced >&9; sleep 1000' >/dev/null 2>&1 & sleep 1")
	kit.Must(t, g.Reset())
	g.mount("[ -e " + dir + "/data ]")
}

// testEnd ends the share while the guest uses it: its data is on the server, the socket is gone.
func (g *guest) testEnd(t *testing.T) {
	g.must("sh -c 'exec 9>" + dir + "/last; echo kept >&9; sleep 1000' >/dev/null 2>&1 & sleep 1")
	g.share.End(t, syscall.SIGTERM)
	if code := g.share.Cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code: got %d, want 0\n%s", code, g.share.Out.String())
	}
	if _, err := os.Lstat(g.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket: got %v, want none", err)
	}
	if b, err := os.ReadFile(filepath.Join(g.export, "last")); err != nil || string(b) != "kept\n" {
		t.Errorf("file on the server: got %q, %v", b, err)
	}
	// QEMU does not connect again: the guest waits, also for a new share, until its next power-on.
	g.must("stat " + dir + "/other >/dev/null 2>&1 & echo $! >/tmp/pid; sleep 3; kill -9 $!; sleep 1; [ -d /proc/$! ]")
	g.serve()
	g.must("sleep 3; [ -d /proc/$(cat /tmp/pid) ]")
	g.PowerOff()
	kit.Must(t, g.Boot())
	g.mount("[ -e " + dir + "/last ]")
}
