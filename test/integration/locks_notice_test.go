package integration

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// statusHost runs rpcbind, and rpc.statd if wanted, in the network namespace of the test. It
// returns the state directory of rpc.statd.
func statusHost(t *testing.T, statd bool) string {
	t.Helper()
	kit.NeedsPrograms(t, "rpcbind", "rpc.statd", "sm-notify", "ip")
	dir := t.TempDir() // which the user of rpc.statd must reach
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	run(t, "", "mount", "-t", "tmpfs", "tmpfs", "/run")
	run(t, "", "sh", "-c", "ip link set lo up; mkdir -p /run/rpcbind "+dir+"/sm "+dir+"/sm.bak; "+
		"chown _rpc /run/rpcbind; chmod 755 "+dir+"; chown -R statd "+dir)
	start(t, "rpcbind", "-f")
	args := mountd.Args{Host: "127.0.0.1", Timeout: time.Second}
	registered := func(program, version uint32) func() bool {
		return func() bool { _, err := mountd.GetPort(t.Context(), args, program, version); return err == nil }
	}
	eventually(t, "rpcbind", registered(100000, 2))
	if statd {
		start(t, "rpc.statd", "-F", "-L", "-P", dir)
		eventually(t, "rpc.statd", registered(100024, 1))
	}
	return dir
}

func start(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// TestStatusMonitorReportsRestart lets rpc.statd monitor the server. sm-notify of the server then
// reports a restart to rpc.statd, which calls the lock service of this process.
func TestStatusMonitorReportsRestart(t *testing.T) { testNotice(t, true) }

// TestServerReportsRestart has no rpc.statd: sm-notify reports the restart to this process.
func TestServerReportsRestart(t *testing.T) { testNotice(t, false) }

func testNotice(t *testing.T, statd bool) {
	if !inOwnProcess(t) {
		return
	}
	dir := statusHost(t, statd)
	service := nlm.NewService(nlm.ServiceConfig{Listen: "127.0.0.1:0",
		Logger: hclog.New(&hclog.LoggerOptions{Output: os.Stderr})})
	t.Cleanup(service.Close)
	e := serveLocks(t)
	e.service = service
	relay := kit.StartRelay(t, net.JoinHostPort(e.export.Host, strconv.Itoa(e.export.Port)),
		kit.RelayOptions{})
	m := e.mount(t, lockPort(relay))
	p := startLockProcess(t)
	p.do("ok", "open 1 %s", m.file())
	p.do("ok", "set 1 w 0 10")
	if statd {
		found, err := filepath.Glob(filepath.Join(dir, "sm", "*"))
		if err != nil || len(found) != 1 {
			t.Errorf("hosts that rpc.statd monitors: got %v, error %v; want one", found, err)
		}
	}
	// A notice costs no lock while the lock connection shows that the server has not restarted.
	relay.Stop()
	relay.Start()
	// The server's host is this host. Its monitor notifies the client, which is this host, too.
	peer := t.TempDir()
	const host = "0100007f 000186b5 00000003 00000010 00000000000000000000000000000000 127.0.0.1 127.0.0.1"
	run(t, "", "sh", "-c", "cd "+peer+" && mkdir sm sm.bak && printf '\\5\\0\\0\\0' >state && "+
		"echo '"+host+"' >sm/127.0.0.1 && chmod 755 . && chown -R statd .")
	run(t, "", "sm-notify", "-f", "-v", "127.0.0.1", "-P", peer)
	// The server has no grace period, so that the lock cannot be reclaimed.
	eventually(t, "a lost lock", func() bool { return m.locks.Counters.Lost.Load() == 1 })
	p.do("EIO", "write 1 text")
	p.kill()
}
