package lab_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// TestRemote runs itself in a guest, from where it uses this host's lab.
func TestRemote(t *testing.T) {
	if lab.Remote() {
		testRemoteGuest(t)
		return
	}
	share := t.TempDir()
	client := lab.Start(t, lab.Options{Name: "client", MemoryMiB: 512, Share: share})
	server := lab.Start(t, lab.Options{Name: "server", MemoryMiB: 512, Complaints: []string{"WARNING: .* at provoked"}})
	copyFile(t, os.Args[0], filepath.Join(share, "lab.test"))
	// Twice: the second process finds the lab as the first did.
	t.Run("lend", func(t *testing.T) {
		client.Lend(t, server, func(o *lab.Options) { o.MemoryMiB, o.CPUs = 512, 1 })
		for range 2 {
			out, err := client.RunFor(lab.RemoteEnv+"=1 /share/lab.test -test.v -test.run '^TestRemote$' 2>&1",
				20*time.Minute)
			if err != nil || !strings.Contains(out, "--- PASS: TestRemote ") {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Log(out)
		}
	})
	if got := strings.TrimSpace(server.MustRun("cat /tmp/times")); got != "twice" {
		t.Errorf("the server was used %s", got)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	src, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(dst, src); err != nil {
		t.Fatal(err)
	}
	if err := dst.Close(); err != nil {
		t.Fatal(err)
	}
}

// testRemoteGuest is the guest's part.
func testRemoteGuest(t *testing.T) {
	server := lab.Borrow(t)
	server.MustRun("if [ -e /tmp/times ]; then echo twice; else echo once; fi >/tmp/times")
	_, err := server.Run("echo before; exit 7")
	var failed *lab.CommandError
	if !errors.As(err, &failed) || failed.ExitCode != 7 || failed.Output != "before\n" {
		t.Errorf("exit 7: %v", err)
	}
	// Calls overlap: one command is under way while another guest starts.
	waits := make(chan error, 1)
	go func() {
		_, err := server.RunFor("while ! [ -e /tmp/go ]; do sleep 0.1; done; rm /tmp/go", 5*time.Minute)
		waits <- err
	}()
	r := &recorder{TB: t}
	g := lab.Start(r, lab.Options{Name: "another", Complaints: []string{"WARNING: .* at announced"}})
	defer r.end()
	if got := strings.TrimSpace(g.MustRun("cat /sys/devices/system/cpu/online")); got != "0" {
		t.Errorf("the host's changes to the options were left out: the guest has CPUs %s", got)
	}
	server.MustRun("touch /tmp/go")
	if err := <-waits; err != nil {
		t.Error(err)
	}
	remotePower(t, g)

	c := g.Capture(t, "nothing")
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("an empty capture: %q, %v", out, err)
	}
	if _, err := c.Tshark("-Y", "no such field"); err == nil || !strings.Contains(err.Error(), "tshark") {
		t.Errorf("a filter that is none: %v", err)
	}
	if err := g.SlowNetwork(lab.Line{Delay: time.Millisecond}); err != nil {
		t.Error(err)
	}
	if out := g.MustRun("tc qdisc show dev eth0"); !strings.Contains(out, "netem") {
		t.Errorf("a slow network: %s", out)
	}
	if err := errors.Join(g.CutNetwork(), g.Freeze(), g.Thaw(), g.RestoreNetwork()); err != nil {
		t.Error(err)
	}
	g.MustRun("echo '<4>WARNING: CPU: 0 PID: 1 at announced.c:1' >/dev/kmsg; echo '<4>WARNING: CPU: 0 PID: 1 at other.c:1' >/dev/kmsg")
	if log := g.Log(); !strings.Contains(log, "==== lab: network cut") || !strings.Contains(log, "other.c") {
		t.Errorf("the console does not have what happened:\n%s", log)
	}
	r.end()
	if all := strings.Join(r.errors, "\n"); strings.Contains(all, "announced.c") || !strings.Contains(all, "other.c") {
		t.Errorf("complaints of the guest's kernel: %s", all)
	}
	if _, err := g.Run("true"); err == nil {
		t.Error("the guest goes on after its test")
	}
}

// remotePower takes a guest's power under a command, and gives it back.
func remotePower(t *testing.T, g *lab.Guest) {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		_, err := g.Run("touch /tmp/begun; sleep 100")
		ended <- err
	}()
	for g.MustRun("ls /tmp/begun 2>/dev/null || true") == "" {
		time.Sleep(100 * time.Millisecond)
	}
	if err := g.Reset(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, lab.ErrPower) {
		t.Errorf("a command under a reset: %v", err)
	}
	g.PowerOff()
	if _, err := g.Run("true"); err == nil {
		t.Error("a guest without power runs commands")
	}
	if err := g.Boot(); err != nil {
		t.Fatal(err)
	}
	g.MustRun("true")
}
