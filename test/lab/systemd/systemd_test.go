package systemd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { kit.Main(m) }

const (
	module = "github.com/nfsrdmad/nfsrdmad/"
	// stepTimeout bounds each wait. The processor of the guest is emulated.
	stepTimeout = 3 * time.Minute
	// held is the size of the file with data that is not synced when the guest shuts down.
	held = 3_000_000
	// serverUnit starts the server before the daemon, and stops it after the daemon.
	serverUnit = `[Unit]
Before=nfsrdmad.service remote-fs-pre.target
Wants=remote-fs-pre.target
[Service]
ExecStart=/usr/sbin/nfsrdmad serve /export --no-root-squash
Restart=on-failure
[Install]
WantedBy=multi-user.target
`
	install = `cp /share/first /usr/sbin/nfsrdmad && ln -s nfsrdmad /usr/sbin/mount.nfsrdma &&
cp /share/nfsrdmad.service /share/server.service /etc/systemd/system/ && cp /share/nfsrdmad.toml /etc/ &&
cp /share/load /usr/sbin/load && mkdir -p /export /data && modprobe fuse && echo fuse >/etc/modules-load.d/fuse.conf &&
systemctl daemon-reload && systemctl enable --now server nfsrdmad`
)

// A guest is a Debian with the daemon and a server.
type guest struct {
	*lab.Guest
	t *testing.T
	// failure is the error that ended the test.
	failure string
}

func start(t *testing.T) *guest {
	t.Helper()
	lab.SkipIfDisabled(t)
	share := t.TempDir()
	build := func(name, pkg, ldflags string) {
		lab.BuildPure(t, "build", "-ldflags", ldflags, "-o", filepath.Join(share, name), module+pkg)
	}
	build("first", "cmd/nfsrdmad", "")
	build("second", "cmd/nfsrdmad", "-s -w") // another file
	build("load", "test/lab/systemd/load", "")
	lab.BuildPure(t, "test", "-c", "-o", filepath.Join(share, "nfsd.test"), module+"internal/server/nfsd")
	root := filepath.Join("..", "..", "..")
	for name, from := range map[string]string{"nfsrdmad.service": "deploy/systemd/nfsrdmad.service",
		"nfsrdmad.toml": "configs/nfsrdmad.toml"} {
		b, err := os.ReadFile(filepath.Join(root, from))
		kit.Must(t, errors.Join(err, os.WriteFile(filepath.Join(share, name), b, 0o644)))
	}
	kit.Must(t, os.WriteFile(filepath.Join(share, "server.service"), []byte(serverUnit), 0o644))
	g := boot(t, share)
	g.must(install)
	return g
}

// boot starts a guest that has the directory share at /share.
func boot(t *testing.T, share string) *guest {
	t.Helper()
	g := &guest{t: t}
	t.Cleanup(func() { // after the end of the guest, whose console hides the error in long logs
		if t.Failed() {
			t.Logf("the test failed with: %s", g.failure)
		}
	})
	g.Guest = lab.Start(t, lab.Options{Systemd: true, Share: share})
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := g.Run("journalctl --no-pager -n 80 -o short-precise; systemctl --no-pager list-jobs")
			t.Logf("end of the journal:\n%s", out)
		}
	})
	return g
}

func (g *guest) fatalf(format string, args ...any) {
	g.t.Helper()
	g.errorf(format, args...)
	g.t.FailNow()
}

func (g *guest) errorf(format string, args ...any) {
	g.t.Helper()
	s := fmt.Sprintf(format, args...)
	g.failure += s + "\n"
	g.t.Error(s)
}

func (g *guest) must(command string) string {
	g.t.Helper()
	out, err := g.RunFor(command, stepTimeout)
	if err != nil {
		g.fatalf("%v\n%s", err, out)
	}
	return strings.TrimSpace(out)
}

// await repeats a command until it succeeds.
func (g *guest) await(command string) {
	g.t.Helper()
	for end := time.Now().Add(stepTimeout); ; time.Sleep(300 * time.Millisecond) {
		out, err := g.RunFor(command, stepTimeout)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			g.fatalf("%s: %v\n%s", command, err, out)
		}
	}
}

// A report is the progress of the load.
type report struct {
	Rounds map[string]int
	Errors []string
}

func (g *guest) report() (r report) {
	g.t.Helper()
	if err := json.Unmarshal([]byte(g.must("cat /run/progress")), &r); err != nil {
		g.fatalf("report of the load: %v", err)
	}
	return r
}

// works waits until each task of the load has done two rounds more.
func (g *guest) works(after string) {
	g.t.Helper()
	before := g.report()
	for end := time.Now().Add(stepTimeout); ; time.Sleep(300 * time.Millisecond) {
		now, more := g.report(), 0
		if len(now.Errors) > 0 {
			g.fatalf("errors on the mount after %s: %q", after, now.Errors)
		}
		for name, n := range now.Rounds {
			if n >= before.Rounds[name]+2 {
				more++
			}
		}
		if more == len(now.Rounds) && more > 0 {
			return
		}
		if time.Now().After(end) {
			g.fatalf("work on the mount does not continue after %s: %v, then %v", after, before, now)
		}
	}
}

func (g *guest) pid() string { return g.must("systemctl show -P MainPID nfsrdmad") }

// newPID waits until another process is the daemon.
func (g *guest) newPID(before string) {
	g.t.Helper()
	g.await(fmt.Sprintf("p=$(systemctl show -P MainPID nfsrdmad); [ $p != 0 ] && [ $p != %s ] && "+
		"systemctl is-active -q nfsrdmad", before))
}

// TestLifeCycle uses one guest for all steps: each needs the state of the one before.
func TestLifeCycle(t *testing.T) {
	g := start(t)
	g.must("cd /tmp && /share/nfsd.test -test.v -test.run '^TestListingAfterEnd$' | grep '^--- PASS'") // ext4
	g.await("nfsrdmad mount 127.0.0.1:/ /data")
	g.must("systemd-run -q --collect --unit=load load run /data /export /run/progress")
	g.await("[ -s /run/progress ]")
	g.works("start")
	stored := g.must("systemctl show -P NFileDescriptorStore nfsrdmad")
	if stored != "3" {
		g.errorf("descriptors that systemd keeps: got %s, want 3", stored)
	}
	for _, step := range []struct{ name, command string }{
		{"restart", "systemctl restart nfsrdmad"},
		{"upgrade", "cp /share/second /usr/sbin/new && mv /usr/sbin/new /usr/sbin/nfsrdmad && " +
			"systemctl restart nfsrdmad"},
		{"crash", "systemctl kill -s ABRT nfsrdmad"},
		{"kill", "systemctl kill -s KILL nfsrdmad"},
		{"restart with a short watchdog", "mkdir -p $drop && " +
			"printf '[Service]\\nWatchdogSec=10\\n' >$drop/watchdog.conf && " +
			"systemctl daemon-reload && systemctl restart nfsrdmad"},
		{"hang", "rm -r $drop && systemctl daemon-reload && kill -STOP $(systemctl show -P MainPID nfsrdmad)"},
		{"reexec", "systemctl daemon-reexec && systemctl daemon-reload && systemctl kill -s KILL nfsrdmad"},
		{"crash loop", "mv /usr/sbin/nfsrdmad /usr/sbin/good && cp /bin/false /usr/sbin/nfsrdmad && " +
			"systemctl kill -s KILL nfsrdmad && sleep 8 && mv /usr/sbin/good /usr/sbin/nfsrdmad"},
	} {
		begin, before := time.Now(), g.pid()
		g.must("drop=/run/systemd/system/nfsrdmad.service.d; " + step.command)
		g.newPID(before)
		g.works(step.name)
		if got := g.must("systemctl show -P NFileDescriptorStore nfsrdmad"); got != stored {
			g.errorf("%s: descriptors that systemd keeps: got %s, want %s", step.name, got, stored)
		}
		t.Logf("%s: the load continues after %v", step.name, time.Since(begin).Round(time.Millisecond))
	}
	g.must("cmp /proc/$(systemctl show -P MainPID nfsrdmad)/exe /share/second") // the upgrade
	g.must("systemctl stop load")                                               // the load checks its files at the end
	if r := g.report(); len(r.Errors) > 0 {
		g.errorf("errors at the end of the load: %q", r.Errors)
	}
	g.stop()
	g.shutDown()
}

// stop checks that systemctl stop writes the data of an open file, and unmounts.
func (g *guest) stop() {
	g.t.Helper()
	g.must(fmt.Sprintf("systemd-run -q --collect --unit=hold -p KillSignal=SIGKILL load hold /data/stopped %d", held))
	g.await("[ -s /data/stopped ]")
	g.must("sleep 1; systemctl stop nfsrdmad")
	if out := g.must("grep -c ' /data ' /proc/mounts || true"); out != "0" {
		g.errorf("mounts at /data after systemctl stop: got %s, want 0", out)
	}
	g.must(fmt.Sprintf("systemctl stop hold; load check /export/stopped %d", held))
}

// shutDown checks that an entry of fstab is mounted at the boot, and that the shutdown of the host
// writes the data of an open file.
func (g *guest) shutDown() {
	g.t.Helper()
	g.must("echo '127.0.0.1:/ /data nfsrdma _netdev 0 0' >>/etc/fstab && systemctl daemon-reload && " +
		"systemctl start nfsrdmad && systemctl start data.mount")
	for i, name := range []string{"first", "second"} {
		g.must(fmt.Sprintf("systemd-run -q --collect --unit=hold -p KillSignal=SIGKILL load hold /data/%s %d",
			name, held+i))
		g.await("[ -s /data/" + name + " ]")
		begin := time.Now()
		if err := g.ShutDown(stepTimeout); err != nil {
			g.fatalf("shutdown: %v", err)
		}
		g.t.Logf("shutdown with dirty data: %v", time.Since(begin).Round(time.Millisecond))
		if err := g.Boot(); err != nil {
			g.fatalf("boot: %v", err)
		}
		g.await("grep -q ' /data fuse.nfsrdma ' /proc/mounts")
		g.must(fmt.Sprintf("load check /export/%s %d && load check /data/%s %d", name, held+i, name, held+i))
	}
}
