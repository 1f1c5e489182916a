package monitoring

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	rulesFile = "../../deploy/prometheus/nfsrdmad.rules.yml"
	rulesTest = "../../deploy/prometheus/nfsrdmad.test.yml"
)

// grafana returns the expression with the variables of the dashboard.
func (q query) grafana() string { return q.fill(`instance=~"$instance"`, `mount=~"$mount"`) }

// prometheus returns the expression for all hosts and mounts, over a short time.
func (q query) prometheus() string {
	return strings.ReplaceAll(q.fill(`instance=~".+"`, `mount=~".+"`), "$__rate_interval", "20s")
}

func (q query) fill(instance, mount string) string {
	return strings.NewReplacer("SEL", instance+","+mount, "HOST", instance).Replace(q.expr)
}

// TestRules checks the alerts with their unit tests.
func TestRules(t *testing.T) {
	t.Parallel()
	kit.NeedsPrograms(t, "promtool")
	for _, args := range [][]string{{"check", "rules", rulesFile}, {"test", "rules", rulesTest}} {
		if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	rules, err1 := os.ReadFile(rulesFile)
	tests, err2 := os.ReadFile(rulesTest)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllSubmatch(rules, -1) {
		if !bytes.Contains(tests, []byte(`alertname="`+string(m[1])+`"`)) {
			t.Errorf("alert %s has no unit test", m[1])
		}
	}
}

// A server is a Prometheus that scrapes a daemon.
type server struct {
	t   *testing.T
	url string
}

// get decodes the data of a reply of the API.
func (s *server) get(path string, params url.Values, data any) error {
	resp, err := http.Get(s.url + path + "?" + params.Encode())
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var reply struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(resp.Body).Decode(&reply); err != nil {
		return fmt.Errorf("%s: %s: %w", path, resp.Status, err)
	}
	if reply.Status != "success" {
		return fmt.Errorf("%s: %s", path, reply.Error)
	}
	return json.Unmarshal(reply.Data, data)
}

// series returns the number of series that an expression returns.
func (s *server) series(expr string) (int, error) {
	var data struct{ Result []json.RawMessage }
	err := s.get("/api/v1/query", url.Values{"query": {expr}}, &data)
	return len(data.Result), err
}

// startPrometheus starts a Prometheus with the alerts, which scrapes a daemon often.
func startPrometheus(t *testing.T, daemon string) *server {
	t.Helper()
	dir := t.TempDir()
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("global: {scrape_interval: 500ms, evaluation_interval: 500ms}\nrule_files: [%q]\n"+
		"scrape_configs:\n  - job_name: nfsrdmad\n    static_configs: [{targets: [%q]}]\n", rules, daemon)
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	addr := kit.FreePort(t).String()
	cmd := exec.Command("prometheus", "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+addr, "--enable-feature=native-histograms")
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	var out mounts.Output
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("output of prometheus:\n%s", out.String())
		}
	})
	return &server{t, "http://" + addr}
}

// use writes and reads files of a mount, and looks up names that do not exist.
func use(dir string, round int) error {
	name := filepath.Join(dir, fmt.Sprintf("f%d", round%4))
	err := os.WriteFile(name, bytes.Repeat([]byte{byte(round)}, 300_000), 0o644)
	f, err2 := os.OpenFile(name, os.O_RDONLY|unix.O_DIRECT, 0)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(io.Discard, f)
	if _, missing := os.Stat(filepath.Join(dir, "missing")); !errors.Is(missing, os.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("stat of a missing name: %v", missing))
	}
	return err
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// startLoad uses a directory of a mount until the returned function is called, which the end of the
// test does too.
func startLoad(t *testing.T, dir string) (end func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; !closed(stop); i++ {
			if err := use(dir, i); err != nil {
				t.Errorf("load: %v", err)
				return
			}
		}
	}()
	end = sync.OnceFunc(func() {
		close(stop)
		<-stopped
	})
	t.Cleanup(end)
	return end
}

// A rig is a server, a daemon with a mount of it, and the address of the metrics of the daemon.
type rig struct {
	served       *mounts.ServedDir
	daemon       *mounts.Process
	socket       string
	dir, metrics string
}

// startRig starts a daemon that injects faults, and mounts a server with the given flags.
func startRig(t *testing.T, faults string, serverFlags ...string) *rig {
	t.Helper()
	served := mounts.ServeDir(t, t.TempDir(), append(serverFlags, "--no-root-squash")...)
	dir, err := os.MkdirTemp("", "mnt") // a short name, for the legends of panels
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	r := &rig{served: served, socket: filepath.Join(t.TempDir(), "control.sock"), dir: dir,
		metrics: kit.FreePort(t).String()}
	r.startDaemon(t, "--inject", faults)
	r.mount(t, dir)
	return r
}

func (r *rig) startDaemon(t *testing.T, flags ...string) {
	t.Helper()
	r.daemon = mounts.StartProcess(t, nil, nil, append([]string{"daemon", "--control-socket", r.socket,
		"--metrics-listen", r.metrics, "--state-dir", filepath.Dir(r.socket)}, flags...)...)
	r.daemon.WaitFor(t, "starting the daemon", func() error {
		_, err := os.Stat(r.socket)
		return err
	})
}

// mount mounts the server at dir until the test ends.
func (r *rig) mount(t *testing.T, dir string) {
	t.Helper()
	options := fmt.Sprintf("port=%s,mountport=%[2]s,nlmport=%[2]s", mounts.PortOf(t, r.served.RDMA),
		mounts.PortOf(t, r.served.TCP))
	mount := mounts.StartProcess(t, nil, nil, "mount", "--control-socket", r.socket, "-o", options, "127.0.0.1:/", dir)
	<-mount.Ended
	if !mount.Cmd.ProcessState.Success() {
		t.Fatalf("mount: %s", mount.Out.String())
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: not mounted
			_ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH)
			t.Errorf("unmount: %v", err)
		}
	})
}

// TestQueries runs the expressions of all alerts and panels against a Prometheus that scrapes a
// daemon, whose mount is under load and loses its connection now and then.
func TestQueries(t *testing.T) {
	t.Parallel()
	kit.NeedsPrograms(t, "prometheus", "promtool")
	kit.NeedsFUSE(t)
	r := startRig(t, "seed=1,disconnect-every=2000")
	prom := startPrometheus(t, r.metrics)
	startLoad(t, r.dir)
	some := func(expr string) func() error {
		return func() error {
			n, err := prom.series(expr)
			if err == nil && n == 0 {
				err = errors.New("got no series")
			}
			return err
		}
	}
	r.daemon.WaitFor(t, "reconnects in Prometheus", some("nfsrdmad_connects_total > 3"))
	r.daemon.WaitFor(t, "panels", prom.checkPanels)
	r.daemon.WaitFor(t, "values of a panel", func() error { return prom.checkRange(r.dir) })
	r.daemon.WaitFor(t, "alerts", prom.checkRules)
	for _, metric := range []string{"rpc_phase_seconds", "fuse_phase_seconds"} {
		median := "histogram_quantile(0.5, rate(nfsrdmad_" + metric + `{phase="server"}[20s])) > 0`
		r.daemon.WaitFor(t, "native histogram "+metric, some(median))
	}
	resp, err := http.Get("http://" + r.metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	check := exec.Command("promtool", "check", "metrics")
	check.Stdin = resp.Body
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

// checkPanels checks that each query of the dashboard returns some series.
func (s *server) checkPanels() (err error) {
	for _, r := range dashboard {
		for _, p := range r.panels {
			for _, q := range p.queries {
				if n, e := s.series(q.prometheus()); e != nil || n == 0 {
					err = errors.Join(err, fmt.Errorf("%s: %s: got %d series, %v; want some", p.title, q.prometheus(),
						n, e))
				}
			}
		}
	}
	return err
}

// checkRange checks the values of a panel over the last seconds.
func (s *server) checkRange(dir string) error {
	const count = 5
	times := &timeRange{begin: time.Now().Add(-(count - 1) * time.Second), step: time.Second, count: count}
	all, err := s.ranges(dashboard[0].panels[0].queries[0], times)
	if err != nil {
		return err
	}
	if len(all) != 1 || all[0].name != "read "+dir || len(all[0].values) != count || !(all[0].values[count-1] > 0) {
		return fmt.Errorf("bytes read: got %+v, want one series with %d values for %s", all, count, dir)
	}
	return nil
}

// checkRules checks that Prometheus evaluates all alerts, that all their metrics exist, and that
// the alert for fault injection fires.
func (s *server) checkRules() (err error) {
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Query, Health, LastError, State string }
		}
	}
	if err := s.get("/api/v1/rules", nil, &data); err != nil {
		return err
	}
	rules, fires := 0, false
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			rules++
			if r.Health != "ok" {
				err = errors.Join(err, fmt.Errorf("%s: health %s: %s", r.Name, r.Health, r.LastError))
			}
			fires = fires || r.Name == "NFSRDMAFaultInjection" && r.State == "firing"
			for _, metric := range regexp.MustCompile(`nfsrdmad_\w+`).FindAllString(r.Query, -1) {
				if n, e := s.series(metric); e != nil || n == 0 {
					err = errors.Join(err, fmt.Errorf("%s: %s: got %d series, %v; want some", r.Name, metric, n, e))
				}
			}
		}
	}
	text, e := os.ReadFile(rulesFile)
	if want := bytes.Count(text, []byte("- alert: ")); e != nil || rules != want || !fires {
		err = errors.Join(err, e, fmt.Errorf("got %d alerts, fault injection fires: %t; want %d, and that one to fire",
			rules, fires, want))
	}
	return err
}
