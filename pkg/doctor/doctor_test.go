package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

func TestMain(m *testing.M) { kit.Main(m) }

// A target is a server and how to reach it.
type target struct {
	host, export string
	rdma, mountd int // ports
}

func (g target) config(t *testing.T, options ...string) Config {
	t.Helper()
	spec, err := mount.ParseSpec(g.host + ":" + g.export)
	kit.Must(t, err)
	list := append([]string{"provider=softiwarp", fmt.Sprintf("port=%d", g.rdma)}, options...)
	if g.mountd != 0 {
		list = append(list, fmt.Sprintf("mountport=%d", g.mountd))
	}
	o, err := mount.ParseOptions(mount.DefaultOptions(), strings.Join(list, ","))
	kit.Must(t, err)
	return Config{Socket: filepath.Join(t.TempDir(), "none"), Spec: &spec, Options: o, Timeout: kit.Timeout}
}

// serve exports dir until the test ends.
func serve(t *testing.T, cfg nfsserve.Config) target {
	t.Helper()
	cfg.RDMAListen, cfg.TCPListen, cfg.StateDir = "127.0.0.1:0", "127.0.0.1:0", t.TempDir()
	cfg.Provider = softiwarp.New(softiwarp.Config{})
	s, err := nfsserve.Run(context.Background(), cfg)
	kit.Must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	return target{"127.0.0.1", "/", int(s.RDMAAddr.Port()), int(netip.MustParseAddrPort(s.TCPAddr).Port())}
}

// writable returns a directory in which every user may write.
func writable(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

// silentPort returns a port that accepts connections and never answers.
func silentPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	})
	t.Cleanup(func() { l.Close(); work.Wait() })
	return l.Addr().(*net.TCPAddr).Port
}

// find returns the step of a report.
func find(t *testing.T, r *Report, name string) Step {
	t.Helper()
	for _, s := range r.Steps {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("the report has no step %q: %+v", name, r.Steps)
	return Step{}
}

// wantSteps checks the results of steps, written as "name=result".
func wantSteps(t *testing.T, r *Report, want ...string) {
	t.Helper()
	for _, w := range want {
		name, result, _ := strings.Cut(w, "=")
		if s := find(t, r, name); string(s.Result) != result {
			t.Errorf("step %s: got %s (%s; %s), want %s", name, s.Result, s.Text, s.Remedy, result)
		}
	}
}

// TestHostSteps checks this host without a source.
func TestHostSteps(t *testing.T) {
	kit.NeedsFUSE(t)
	socket := filepath.Join(t.TempDir(), "no.sock")
	r := Run(t.Context(), Config{Socket: socket, Options: mount.DefaultOptions()})
	for _, s := range r.Steps {
		if s.Text == "" || s.Group != GroupHost {
			t.Errorf("step %+v: want a text, and group %s", s, GroupHost)
		}
	}
	wantSteps(t, r, "privilege=ok", "softiwarp=ok", "daemon=warning")
	if s := find(t, r, "daemon"); !strings.Contains(s.Text, socket) || !strings.Contains(s.Remedy, "nfsrdmad daemon") {
		t.Errorf("daemon: got %+v, want the socket and the command that starts the daemon", s)
	}
	if r.Outcome != OutcomeOK || r.Keys != nil || r.Source != "" {
		t.Errorf("got outcome %s, keys %v, source %q", r.Outcome, r.Keys, r.Source)
	}
}

// TestWorkingServer tries every step with a server that works.
func TestWorkingServer(t *testing.T) {
	dir := writable(t)
	cfg := serve(t, nfsserve.Config{Dir: dir}).config(t)
	cfg.Write = true
	var begun, ended []string
	cfg.Begin = func(_, name string) { begun = append(begun, name) }
	cfg.End = func(s Step) { ended = append(ended, s.Name) }
	r := Run(t.Context(), cfg)
	wantSteps(t, r, "name=ok", "route=ok", "mount-service=ok", "exports=ok", "nfs-tcp=ok", "provider=ok",
		"rdma-port=ok", "handshake=ok", "private-data=ok", "nfs-null=ok", "credits=ok", "inline=ok", "mnt=ok",
		"fsinfo=ok", "getattr=ok", "keys=ok", "read-write=ok", "lock-service=ok")
	for name, text := range map[string]string{"credits": "64 of 64", "inline": "4096",
		"private-data": "invalidates keys"} {
		if s := find(t, r, name); !strings.Contains(s.Text, text) {
			t.Errorf("step %s: got %q, want %q in it", name, s.Text, text)
		}
	}
	if len(ended) != len(r.Steps) || len(begun) == 0 || len(begun) > len(ended) {
		t.Errorf("got %d calls of Begin and %d of End for %d steps", len(begun), len(ended), len(r.Steps))
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files left in the export: %v, %v", left, err)
	}
	k := r.Keys
	if k == nil || k.Sample.Calls != sampleCalls || k.Sample.DistinctKeys != k.Sample.Registrations ||
		k.Sample.UnpredictableBits < 24 {
		t.Fatalf("keys: got %+v", k)
	}
	for _, c := range k.Checks {
		if want := map[bool]Verdict{true: Weak, false: Holds}[c.Name == "injection"]; c.Verdict != want {
			t.Errorf("check %s: got %s (%s), want %s", c.Name, c.Verdict, c.Text, want)
		}
	}
}

// TestConfigurationSteps checks a configuration that is broken, is missing, or excludes mounts.
func TestConfigurationSteps(t *testing.T) {
	broken := control.Errorf(control.CodeUsage, "configuration /etc/x.toml:3: unknown key \"a\"; remove it")
	value := control.Errorf(control.CodeUsage, "configuration /etc/x.toml: connect_rate = \"-1\": must be from 0")
	missing := control.Errorf(control.CodeUsage, "read configuration: %w; set its path", &fs.PathError{Op: "open",
		Path: "/etc/x.toml", Err: fs.ErrNotExist})
	for _, x := range []struct {
		name    string
		err     error
		allowed string
		config  string // result, text and remedy of the step configuration
		allow   string // those of the step allow-mounts
	}{
		{"valid", nil, "", "ok|/etc/x.toml is valid|", "ok|the daemon may mount the source|"},
		{"source", nil, "127.0.0.1:/**", "ok||", "ok|the daemon may mount the source|"},
		{"directories", nil, "/mnt/*", "ok||", "ok|on the directories in allow_mounts only|"},
		{"other source", nil, "nas:/**", "ok||", "failed|not allowed by allow_mounts|add one to the configuration"},
		{"unknown key", broken, "", "warning|unknown key \"a\"; the daemon does not start|remove it", "skipped||"},
		{"value", value, "", "warning|connect_rate = \"-1\": must be|correct the value", "skipped||"},
		{"no file", missing, "", "skipped|there is no file /etc/x.toml|", "ok||"},
	} {
		t.Run(x.name, func(t *testing.T) {
			cfg := target{"127.0.0.1", "/export", int(kit.ClosedPort(t).Port()),
				int(kit.ClosedPort(t).Port())}.config(t)
			cfg.ConfigFile, cfg.ConfigError = "/etc/x.toml", x.err
			var err error
			if cfg.Allowed, err = mount.ParseAllowed(x.allowed); err != nil {
				t.Fatal(err)
			}
			r := Run(t.Context(), cfg)
			for name, want := range map[string]string{"configuration": x.config, "allow-mounts": x.allow} {
				s, w := find(t, r, name), strings.Split(want, "|")
				if string(s.Result) != w[0] || !strings.Contains(s.Text, w[1]) || !strings.Contains(s.Remedy, w[2]) {
					t.Errorf("step %s: got %+v, want %s", name, s, want)
				}
			}
		})
	}
}

// TestFailedSteps provokes each failure. The steps that do not depend on it are still tried.
func TestFailedSteps(t *testing.T) {
	dir := t.TempDir() // of root, which the server squashes
	good := serve(t, nfsserve.Config{Dir: dir})
	closedNet := serve(t, nfsserve.Config{Dir: dir, Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	with := func(change func(*target)) target {
		g := good
		change(&g)
		return g
	}
	for _, x := range []struct {
		name   string
		to     target
		want   string // results of steps
		failed string // the first failed step
		text   string // in it
		remedy string // in it
	}{
		{"name that does not resolve", with(func(g *target) { g.host = "no-such-host.invalid" }),
			"route=skipped rdma-port=skipped mnt=skipped lock-service=skipped",
			"name", "no-such-host.invalid", "check the spelling"},
		{"closed RDMA port", with(func(g *target) { g.rdma = int(kit.ClosedPort(t).Port()) }),
			"handshake=skipped nfs-null=skipped fsinfo=skipped exports=ok nfs-tcp=ok mnt=ok lock-service=ok",
			"rdma-port", "connection refused", "nfsrdmad serve --backend"},
		{"RDMA port of another protocol", with(func(g *target) { g.rdma = closedNet.mountd }),
			"rdma-port=ok private-data=skipped mnt=ok",
			"handshake", "without an MPA reply", "RDMA port"},
		{"closed MOUNT port", with(func(g *target) { g.mountd = int(kit.ClosedPort(t).Port()) }),
			"exports=skipped mnt=skipped getattr=skipped keys=skipped handshake=ok nfs-null=ok credits=ok",
			"mount-service", "connection refused", "mountport="},
		{"wrong export", with(func(g *target) { g.export = "/missing" }),
			"exports=ok nfs-null=ok credits=ok fsinfo=skipped getattr=skipped keys=skipped",
			"mnt", "MNT3ERR_NOENT", "list of exports"},
		{"client that is not allowed", closedNet, "mount-service=ok exports=warning mnt=failed nfs-null=skipped",
			"handshake", "rejected", "--allow"},
		{"no permission to write", good, "mnt=ok fsinfo=ok getattr=ok keys=ok lock-service=ok",
			"read-write", "permission denied", "root_squash"},
	} {
		t.Run(x.name, func(t *testing.T) {
			if x.name == "no permission to write" {
				kit.NeedsRoot(t)
			}
			cfg := x.to.config(t)
			cfg.Write = true
			r := Run(t.Context(), cfg)
			wantSteps(t, r, strings.Fields(x.want)...)
			f := firstServerFailure(r)
			if f == nil || r.Outcome != OutcomeFailed {
				t.Fatalf("got outcome %s, failed step %v", r.Outcome, f)
			}
			if f.Name != x.failed || !strings.Contains(f.Text, x.text) || !strings.Contains(f.Remedy, x.remedy) {
				t.Errorf("got failed step %+v, want %s with %q and remedy %q", f, x.failed, x.text, x.remedy)
			}
		})
	}
	t.Cleanup(func() {
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("files left in the export: %v, %v", left, err)
		}
	})
}

// firstServerFailure is FirstFailure without the steps of this host, which may be unable to mount.
func firstServerFailure(r *Report) *Step {
	for i := range r.Steps {
		if r.Steps[i].Result == Failed && r.Steps[i].Group == GroupServer {
			return &r.Steps[i]
		}
	}
	return nil
}

// TestDiagnosisEnds uses a server of which every port is silent.
func TestDiagnosisEnds(t *testing.T) {
	g := target{"127.0.0.1", "/", silentPort(t), silentPort(t)}
	cfg := g.config(t, fmt.Sprintf("nlmport=%d", silentPort(t)))
	cfg.Timeout = time.Second
	r := Run(t.Context(), cfg)
	wantSteps(t, r, "mount-service=failed", "mnt=skipped", "lock-service=warning", "nfs-null=skipped",
		"read-write=skipped")
	for name, want := range map[string][2]string{"handshake": {"did not answer", "RDMA port"},
		"mount-service": {"does not answer", "firewall"}} {
		s := find(t, r, name)
		if s.Result == Skipped { // a busy host has not connected in time
			continue
		}
		if !strings.Contains(s.Text, want[0]) || !strings.Contains(s.Remedy, want[1]) {
			t.Errorf("got step %+v, want %q and remedy %q", s, want[0], want[1])
		}
	}
}

// TestTotalTimeIsBounded uses up the time of the diagnosis in one step.
func TestTotalTimeIsBounded(t *testing.T) {
	cfg := target{"127.0.0.1", "/", 1, 0}.config(t)
	cfg.Timeout = time.Millisecond
	cfg.Begin = func(string, string) { time.Sleep(MaxTimeouts * time.Millisecond) }
	r := Run(t.Context(), cfg)
	if s := find(t, r, "lock-service"); s.Result != Skipped || !strings.Contains(s.Text, "--timeout") {
		t.Errorf("got step %+v, want it skipped for lack of time", s)
	}
}

// interruptAtScratchFile runs a diagnosis of dir until the scratch file exists. It calls f before
// the WRITE reaches the server, and interrupts the diagnosis.
func interruptAtScratchFile(t *testing.T, dir string, f func()) *Report {
	t.Helper()
	good := serve(t, nfsserve.Config{Dir: dir})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	relay := kit.StartRelay(t, fmt.Sprintf("127.0.0.1:%d", good.rdma), kit.RelayOptions{ToServer: func(int) {
		if len(scratchFiles(dir)) > 0 {
			f()
			cancel()
		}
	}})
	good.rdma = int(relay.Addr().Port())
	cfg := good.config(t)
	cfg.Write = true
	return Run(ctx, cfg)
}

func TestInterruptRemovesScratchFile(t *testing.T) {
	dir := writable(t)
	var seen atomic.Bool
	r := interruptAtScratchFile(t, dir, func() { seen.Store(true) })
	if !seen.Load() || r.Outcome != OutcomeInterrupted {
		t.Errorf("got outcome %s, scratch file seen: %v; want %s", r.Outcome, seen.Load(), OutcomeInterrupted)
	}
	if s := find(t, r, "lock-service"); s.Result != Skipped || s.Text != "interrupted" {
		t.Errorf("got step %+v, want it skipped", s)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files left in the export: %v, %v", left, err)
	}
}

// TestScratchFileThatStays makes the removal of the scratch file fail, in an interrupted diagnosis.
func TestScratchFileThatStays(t *testing.T) {
	kit.NeedsRoot(t)
	dir := writable(t)
	r := interruptAtScratchFile(t, dir, func() { _ = os.Chmod(dir, 0o555) }) // the server squashes root
	s, left := find(t, r, "read-write"), scratchFiles(dir)
	if len(left) != 1 || s.Result != Failed || !strings.Contains(s.Text, filepath.Base(left[0])) ||
		s.Remedy != "remove the file" {
		t.Errorf("got files %v, step %+v; want the step to fail and to name the file", left, s)
	}
}

func scratchFiles(dir string) []string {
	found, _ := filepath.Glob(filepath.Join(dir, scratchPrefix+"*")) // the pattern is valid
	return found
}

// TestReadOnlyAndNoWrite checks that no scratch file is made without permission.
func TestReadOnlyAndNoWrite(t *testing.T) {
	good := serve(t, nfsserve.Config{Dir: writable(t), ReadOnly: true})
	for _, x := range []struct {
		write   bool
		options string
		result  Result
		text    string
	}{
		{false, "", Skipped, "--write"},
		{true, "ro", Skipped, "ro"},
		{true, "", Failed, "read-only"},
	} {
		cfg := good.config(t, x.options)
		cfg.Write = x.write
		r := Run(t.Context(), cfg)
		if s := find(t, r, "read-write"); s.Result != x.result || !strings.Contains(s.Text, x.text) {
			t.Errorf("write %v, options %q: got %+v, want %s with %q", x.write, x.options, s, x.result, x.text)
		}
	}
}

// TestServerWithoutRDMA diagnoses NFS-Ganesha, which has a port mapper and no RDMA port. It runs in
// a separate network namespace, in which port 111 is free. Only this thread is in it; the RDMA
// provider connects from other threads, on which the port is closed too.
func TestServerWithoutRDMA(t *testing.T) {
	kit.NeedsRoot(t)
	runtime.LockOSThread() // until the runtime ends the thread with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("create network namespace: %v; run as root", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("ip link set lo up: %v: %s", err, out)
	}
	g := ganesha.Start(t, t.TempDir(), ganesha.SharedPortmap())
	to := target{g.Host, g.Export, int(kit.ClosedPort(t).Port()), 0}
	r := Run(t.Context(), to.config(t))
	wantSteps(t, r, "lock-callbacks=ok", "port-mapper=ok", "mount-service=ok", "exports=ok", "nfs-tcp=ok",
		"rdma-port=failed", "handshake=skipped", "mnt=ok", "fsinfo=skipped", "lock-service=warning")
	for name, port := range map[string]int{"port-mapper": g.MountPort, "nfs-tcp": g.NFSPort} {
		if s := find(t, r, name); !strings.Contains(s.Text, fmt.Sprintf("port %d", port)) {
			t.Errorf("got step %+v, want port %d", s, port)
		}
	}
	if s := find(t, r, "rdma-port"); !strings.Contains(s.Remedy, "serve --backend") {
		t.Errorf("got step %+v, want the relay as remedy", s)
	}
	to.export = "/not/exported"
	r = Run(t.Context(), to.config(t))
	wantSteps(t, r, "exports=warning", "mnt=failed")
	if s := find(t, r, "exports"); !strings.Contains(s.Text, g.Export) {
		t.Errorf("got step %+v, want the list of exports", s)
	}
	to.rdma = g.NFSPort // the RDMA port of a mount is never a port for TCP
	wantSteps(t, Run(t.Context(), to.config(t)), "nfs-tcp=skipped")
}

// TestSecondAddress uses a server whose first address has a closed RDMA port.
func TestSecondAddress(t *testing.T) {
	cfg := serve(t, nfsserve.Config{Dir: t.TempDir()}).config(t, "remoteports=127.0.0.9~127.0.0.1")
	r := Run(t.Context(), cfg)
	wantSteps(t, r, "rdma-port=ok", "handshake=ok", "getattr=ok")
	if s := find(t, r, "rdma-port"); !strings.Contains(s.Text, "127.0.0.1:") {
		t.Errorf("got step %+v, want the second address", s)
	}
}

// TestWritePadIsReported mounts with the option whose key lives as long as the connection.
func TestWritePadIsReported(t *testing.T) {
	r := Run(t.Context(), serve(t, nfsserve.Config{Dir: t.TempDir()}).config(t, "writepad"))
	if r.Keys == nil {
		t.Fatalf("no keys: %+v", find(t, r, "keys"))
	}
	for _, c := range r.Keys.Checks {
		if (c.Verdict == Weak) != (c.Name == "injection" || c.Name == "long-lived-keys") {
			t.Errorf("check %s: got %s (%s)", c.Name, c.Verdict, c.Text)
		}
	}
}

func TestAdmits(t *testing.T) {
	for _, x := range []struct {
		groups string
		client string
		want   admission
	}{
		{"", "192.0.2.1", admitted},
		{"*", "192.0.2.1", admitted},
		{"192.0.2.1", "192.0.2.1", admitted},
		{"192.0.2.0/24", "192.0.2.1", admitted},
		{"192.0.2.0/255.255.255.0", "192.0.2.1", admitted},
		{"192.0.2.0/255.0.255.0", "192.0.2.1", unknownAdmission},
		{"198.51.100.0/24 192.0.2.9", "192.0.2.1", excluded},
		{"198.51.100.0/24 @hosts", "192.0.2.1", unknownAdmission},
		{"client.example.com", "192.0.2.1", unknownAdmission},
		{"2001:db8::/32", "2001:db8::7", admitted},
		{"0.0.0.0/0", "2001:db8::7", excluded},
	} {
		if got := admits(strings.Fields(x.groups), netip.MustParseAddr(x.client)); got != x.want {
			t.Errorf("export to %q, client %s: got %v, want %v", x.groups, x.client, got, x.want)
		}
	}
}
