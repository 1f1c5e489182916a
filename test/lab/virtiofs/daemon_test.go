package virtiofs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// A service is a daemon and its share.
type service struct {
	*guest
	socket, state string
	daemon        *mounts.Process
}

func (s *service) start() {
	s.t.Helper()
	s.daemon = mounts.StartProcess(s.t, nil, nil, "daemon", "--control-socket", s.socket, "--metrics-listen", "",
		"--state-dir", s.state)
	s.daemon.WaitFor(s.t, "answering", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, err := control.NewClient(s.socket).List(ctx)
		return err
	})
}

// command runs a command that asks the daemon.
func (s *service) command(name string, args ...string) {
	s.t.Helper()
	p := mounts.StartProcess(s.t, nil, nil, append([]string{name, "--control-socket", s.socket}, args...)...)
	select {
	case <-p.Ended:
	case <-time.After(mounts.ProcessTimeout):
		s.t.Fatalf("%s: timeout", name)
	}
	if code := p.Cmd.ProcessState.ExitCode(); code != 0 {
		s.t.Fatalf("%s: exit code %d\n%s", name, code, p.Out.String())
	}
}

// rounds is what the guest does while the daemon ends again and again: it writes, reads from the
// server, renames, makes and removes directories, and appends lines. A process holds a lock and an
// open file that was removed.
const rounds = `cd ` + dir + ` && : >lock && echo removed >gone || exit 1
(
	exec 8<gone 9<lock
	flock 9 && rm gone && echo >/tmp/locked
	while [ ! -e /tmp/over ]; do sleep 1; done
	cat <&8 >/tmp/gone
) &
while [ ! -e /tmp/locked ]; do sleep 1; done
for i in $(seq 20); do
	dd if=/dev/urandom of=/tmp/r bs=256k count=4 2>/dev/null
	dd if=/tmp/r of=r bs=64k conv=fsync 2>/dev/null || exit 2
	echo 3 >/proc/sys/vm/drop_caches
	[ "$(sha256sum <r)" = "$(sha256sum </tmp/r)" ] || exit 3
	mv r last && mkdir d$i && : >d$i/f && rm d$i/f && rmdir d$i || exit 4
	(set -o noclobber; echo new >new) && rm new || exit 5
	echo line $i >>lines || exit 6
	if flock -n lock true; then exit 7; fi
done
cp /tmp/r copy && sync copy lines || exit 8
: >/tmp/over
wait
[ "$(cat /tmp/gone)" = removed ] && flock -n lock true && sha256sum </tmp/r >sum && sync sum || exit 9
`

// TestDaemonEndsUnderGuest kills and stops the daemon while the guest does verified I/O. The guest
// sees pauses only.
func TestDaemonEndsUnderGuest(t *testing.T) {
	lab.SkipIfDisabled(t)
	run := t.TempDir()
	s := &service{guest: &guest{t: t, export: t.TempDir(), socket: filepath.Join(run, "share.sock")},
		socket: filepath.Join(run, "control.sock"), state: run}
	s.server = mounts.ServeDir(t, s.export, "--no-root-squash")
	s.start()
	s.command("virtiofs", "--socket", s.guest.socket, "127.0.0.1:/", "-o",
		"port="+mounts.PortOf(t, s.server.RDMA)+",mountport="+mounts.PortOf(t, s.server.TCP))
	s.Guest = lab.Start(t, lab.Options{Provider: lab.None, HostRoot: true, Virtiofs: s.guest.socket})
	s.mount("true")
	type result struct {
		out string
		err error
	}
	done := make(chan result, 1)
	go func() {
		out, err := s.Run(rounds)
		done <- result{out, err}
	}()
	var r result
	ends := 0
	deadline := time.After(10 * time.Minute)
	for running := true; running; ends++ {
		select {
		case r = <-done:
			running = false
		case <-deadline:
			t.Fatalf("the guest does not end after %d ends of the daemon", ends)
		case <-time.After(time.Duration(500+ends%5*400) * time.Millisecond):
		}
		if ends%2 == 0 {
			s.daemon.End(t, syscall.SIGKILL)
		} else {
			s.command("stop", "--keep-mounts")
			<-s.daemon.Ended
		}
		s.start()
	}
	if r.err != nil {
		t.Fatalf("guest: %v\n%s", r.err, r.out)
	}
	t.Logf("the daemon ended %d times", ends)
	if ends < 4 {
		t.Errorf("the daemon ended %d times, want at least 4", ends)
	}
	var lines bytes.Buffer
	for i := range 20 {
		fmt.Fprintf(&lines, "line %d\n", i+1)
	}
	if b, err := os.ReadFile(filepath.Join(s.export, "lines")); err != nil || string(b) != lines.String() {
		t.Errorf("lines on the server: got %q, %v", b, err)
	}
	for _, name := range []string{"copy", "last"} {
		sum := mounts.Run(t, s.export, "sha256sum", name)
		if want, err := os.ReadFile(filepath.Join(s.export, "sum")); err != nil ||
			strings.Fields(sum)[0] != strings.Fields(string(want))[0] {
			t.Errorf("file %s on the server: got %s, %v, want %s", name, sum, err, want)
		}
	}
	s.must("umount " + dir)
	s.command("umount", s.guest.socket)
}
