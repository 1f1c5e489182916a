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

// TestRemote runs itself in a guest, where it uses this host's lab.
func TestRemote(t *testing.T) {
	if lab.Remote() {
		testRemoteGuest(t)
		return
	}
	share := t.TempDir()
	client := lab.Start(t, lab.Options{Name: "client", MemoryMiB: 512, Share: share})
	server := lab.Start(t, lab.Options{Name: "server", MemoryMiB: 512})
	copyFile(t, os.Args[0], filepath.Join(share, "lab.test"))
	// Run it twice: the host must serve a second process too.
	t.Run("lend", func(t *testing.T) {
		client.ServeRemote(t, server, func(o *lab.Options) { o.MemoryMiB, o.CPUs = 512, 1 })
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
		t.Errorf("got a server used %s, want twice", got)
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

// testRemoteGuest is the part of TestRemote in the guest.
func testRemoteGuest(t *testing.T) {
	server := lab.RemoteServer(t)
	server.MustRun("if [ -e /tmp/times ]; then echo twice; else echo once; fi >/tmp/times")
	_, err := server.Run("echo before; exit 7")
	var failed *lab.CommandError
	if !errors.As(err, &failed) || failed.ExitCode != 7 || failed.Output != "before\n" {
		t.Errorf("got error %v, want exit code 7 and the output", err)
	}
	// Calls overlap: one command runs while another guest starts.
	waits := make(chan error, 1)
	go func() {
		_, err := server.RunFor("while ! [ -e /tmp/go ]; do sleep 0.1; done; rm /tmp/go", 5*time.Minute)
		waits <- err
	}()
	r := &recorder{TB: t}
	g := lab.Start(r, lab.Options{Name: "another", ExpectedKernelErrors: []string{"WARNING: .* at expected"}})
	defer r.end()
	if got := strings.TrimSpace(g.MustRun("cat /sys/devices/system/cpu/online")); got != "0" {
		t.Errorf("got CPUs %s, want only 0, as the host changed the options", got)
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
		t.Errorf("malformed packets of an empty capture: got %q, error %v", out, err)
	}
	if _, err := c.Tshark("-Y", "no such field"); err == nil || !strings.Contains(err.Error(), "tshark") {
		t.Errorf("invalid filter: got error %v, want tshark's", err)
	}
	if err := g.SlowNetwork(lab.Impairment{Delay: time.Millisecond}); err != nil {
		t.Error(err)
	}
	if out := g.MustRun("tc qdisc show dev eth0"); !strings.Contains(out, "netem") {
		t.Errorf("got queue discipline %s, want netem", out)
	}
	if err := errors.Join(g.CutNetwork(), g.Freeze(), g.Thaw(), g.RestoreNetwork()); err != nil {
		t.Error(err)
	}
	g.MustRun(twoWarnings)
	if log := g.Log(); !strings.Contains(log, "==== lab: network cut") || !strings.Contains(log, "other.c") {
		t.Errorf("got a console log without the cut or the warning:\n%s", log)
	}
	r.end()
	if all := strings.Join(r.errors, "\n"); strings.Contains(all, "expected.c") || !strings.Contains(all, "other.c") {
		t.Errorf("got kernel errors %s, want only that of other.c", all)
	}
	if _, err := g.Run("true"); err == nil {
		t.Error("command after the end of the test: got no error")
	}
}

// remotePower resets a guest during a command, powers it off, and boots it.
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
		t.Errorf("command during a reset: got error %v, want ErrPower", err)
	}
	g.PowerOff()
	if _, err := g.Run("true"); err == nil {
		t.Error("command in a guest that is off: got no error")
	}
	if err := g.Boot(); err != nil {
		t.Fatal(err)
	}
	g.MustRun("true")
}
