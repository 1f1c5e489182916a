package kubernetes

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// The shell of the daemon's container starts a daemon that was killed again, so that mounts stay.
// On SIGTERM it stops the daemon, which unmounts, and exits with the status of the daemon.
func TestDaemonContainerKeepsMounts(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	v := n.create("pvc-1")
	n.daemon.End(t, syscall.SIGTERM)
	var script string
	manifests, err := os.Open("../../deploy/kubernetes/nfsrdmad.yaml")
	kit.Must(t, err)
	defer manifests.Close()
	for docs := yaml.NewDecoder(manifests); script == ""; {
		var object struct {
			Spec struct {
				Template struct {
					Spec struct {
						Containers []struct {
							Name string
							Args []string
						}
					}
				}
			}
		}
		kit.Must(t, docs.Decode(&object)) // at the latest EOF
		for _, c := range object.Spec.Template.Spec.Containers {
			if c.Name == "daemon" {
				script = c.Args[0]
			}
		}
	}
	bin := t.TempDir()
	if err := os.Symlink(program(t), filepath.Join(bin, "nfsrdmad")); err != nil {
		t.Fatal(err)
	}
	// The program of StartProcess becomes an argument that the script does not use.
	wrap := append(slices.Clone(container), "env", "PATH="+bin+":"+os.Getenv("PATH"), "sh", "-c",
		`script=$1; shift 3; exec sh -c "$script" daemon "$@"`, "wrap", script)
	n.daemon = mounts.StartProcess(t, wrap, nil, "daemon", "--control-socket="+n.socket, "--metrics-listen=",
		"--state-dir="+filepath.Dir(n.socket))
	n.waitMounted(0)
	n.stage(v)
	dir := n.publish(v, "pod-1")
	write(t, filepath.Join(dir, "a"), "1")
	for range 2 {
		pid := n.daemonID()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		n.daemon.WaitFor(t, "next daemon", func() error {
			if _, err := n.list(); err != nil {
				return err
			}
			if n.daemonID() == pid {
				return fmt.Errorf("process %d still runs", pid)
			}
			return nil
		})
		n.waitMounted(1)
		hasFile(t, filepath.Join(dir, "a"), "1")
	}
	n.unpublish(v, "pod-1")
	n.daemon.End(t, syscall.SIGTERM)
	if code := n.daemon.Cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("got exit code %d after SIGTERM, want 0\n%s", code, n.daemon.Out.String())
	}
	if got := n.daemon.Out.String(); strings.Count(got, "starting the next one") != 2 {
		t.Errorf("the shell started other than 2 daemons again:\n%s", got)
	}
}
