package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// noise returns n pseudorandom bytes. The same name gives the same bytes.
func noise(name string, n int) []byte {
	var seed [32]byte
	copy(seed[:], name)
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(b)
	return b
}

// scrape reads the metrics at addr. The keys of the map are the names of the series, with values
// summed over all labels, and name{label="value"}, summed over the other labels.
func scrape(t *testing.T, addr string) map[string]float64 {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	m := make(map[string]float64)
	lines := bufio.NewScanner(r.Body)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		at := strings.LastIndexByte(lines.Text(), ' ')
		series, labels, _ := strings.Cut(lines.Text()[:at], "{")
		v, err := strconv.ParseFloat(lines.Text()[at+1:], 64)
		if err != nil {
			t.Fatalf("%v: %q", err, lines.Text())
		}
		m[series] += v
		for l := range strings.SplitSeq(strings.TrimSuffix(labels, "}"), ",") {
			m[series+"{"+l+"}"] += v
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return m
}

// The files of TestInjectedFaults: most are small, some are big.
const (
	copies    = 120
	smallSize = 3000
	bigSize   = 500_000
	bigEvery  = 10
	copiers   = 4
)

func copyName(i int) string { return fmt.Sprintf("file%03d", i) }

func copySize(i int) int {
	if i%bigEvery == 0 {
		return bigSize + i
	}
	return smallSize + i
}

// copyAll copies all files from one directory to another with several goroutines.
func copyAll(from, to string) error {
	errs := make([]error, copiers)
	var all sync.WaitGroup
	for c := range copiers {
		all.Go(func() {
			for i := c; i < copies && errs[c] == nil; i += copiers {
				b, err := os.ReadFile(filepath.Join(from, copyName(i)))
				if err == nil {
					err = os.WriteFile(filepath.Join(to, copyName(i)), b, 0o644)
				}
				errs[c] = err
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// checkCopies checks the content of all files in dir.
func checkCopies(t *testing.T, dir string) {
	t.Helper()
	for i := range copies {
		b, err := os.ReadFile(filepath.Join(dir, copyName(i)))
		if err != nil || !bytes.Equal(b, noise(copyName(i), copySize(i))) {
			t.Errorf("read %s in %s: got %d bytes, %v; want the %d original bytes", copyName(i), dir, len(b), err,
				copySize(i))
		}
	}
}

// TestInjectedFaults copies files while the daemon injects faults. The data must be right, and all
// commands, the log and the metrics must show that fault injection is on.
func TestInjectedFaults(t *testing.T) {
	const spec = "seed=7,disconnect-every=60,post-fail=90:*"
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	metrics := kit.FreePort(t).String()
	w.startDaemonWith(t, "--metrics-listen", metrics)
	if v := scrape(t, metrics)["nfsrdmad_fault_injection_enabled"]; v != 0 {
		t.Errorf("got fault_injection_enabled %v, want 0", v)
	}
	if out := w.version(t); strings.Contains(out, control.FaultBanner) {
		t.Errorf("got version %s, want no banner", out)
	}
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", metrics, "--inject", spec)
	in, out := w.mkdir(t, "export/in"), w.mkdir(t, "export/out")
	for i := range copies {
		if err := os.WriteFile(filepath.Join(in, copyName(i)), noise(copyName(i), copySize(i)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rdma, tcp, _ := serve(t, filepath.Join(w.dir, "export"), "--log-level", "warn")
	dir := w.mkdir(t, "mnt")
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o", ports(t, rdma, tcp)).succeeds(t)
	traced := w.trace(t, dir)

	if err := copyAll(filepath.Join(dir, "in"), filepath.Join(dir, "out")); err != nil {
		t.Fatal(err)
	}
	checkCopies(t, out)
	checkCopies(t, filepath.Join(dir, "out"))

	w.checkBanner(t, dir, control.FaultBanner+spec)
	w.checkFaultCounters(t, dir, metrics)
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
	events := traced()
	for _, e := range []string{"disconnect", "connect", "post_send", "post_send_err", "resend", "reply", "map",
		"done"} {
		if events[e] == 0 {
			t.Errorf("got no %q in the trace: %v", e, events)
		}
	}
	w.stop(t, w.daemon)
	if !strings.Contains(w.log.String(), "FAULT INJECTION IS ON") {
		t.Errorf("got log %s, want the banner", w.log)
	}
}

func (w *testEnv) version(t *testing.T) string {
	t.Helper()
	return nfsrdmad(t, "version", "--verbose", "--control-socket", w.socket).succeeds(t).stdout
}

// checkBanner checks that status, list and version show the banner.
func (w *testEnv) checkBanner(t *testing.T, dir, banner string) {
	t.Helper()
	for _, verb := range []string{"status", "list"} {
		if out := nfsrdmad(t, verb, "--control-socket", w.socket).succeeds(t).stdout; !strings.HasPrefix(out,
			banner+"\n") {
			t.Errorf("%s: got %s, want %q first", verb, out, banner)
		}
	}
	if out := w.version(t); !strings.Contains(out, banner+"\n") {
		t.Errorf("version: got %s, want %q", out, banner)
	}
}

// checkFaultCounters checks the counters when no call is pending.
func (w *testEnv) checkFaultCounters(t *testing.T, dir, metrics string) {
	t.Helper()
	const (
		failed     = "nfsrdmad_mrs_failed_total"
		disconnect = `nfsrdmad_faults_injected_total{fault="disconnect-every"}`
		postFail   = `nfsrdmad_faults_injected_total{fault="post-fail"}`
	)
	var m map[string]float64
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		m = scrape(t, metrics)
		ended := m["nfsrdmad_mrs_recovered_total"] + m["nfsrdmad_mrs_recycled_total"] + m["nfsrdmad_mrs_orphaned_total"]
		if ended == m[failed] {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("recovered, recycled and orphaned MRs do not add up to failed MRs: %v", m)
		}
	}
	if m["nfsrdmad_fault_injection_enabled"] != 1 || m[failed] == 0 || m[disconnect] == 0 || m[postFail] == 0 ||
		m["nfsrdmad_rpc_resends_total"] == 0 {
		t.Errorf("metrics: %v", m)
	}
	var l []control.MountStatus
	out := nfsrdmad(t, "status", "--control-socket", w.socket, "--output", "json", dir).succeeds(t).stdout
	if err := json.Unmarshal([]byte(out), &l); err != nil || len(l) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	s := &l[0]
	// Each injected disconnect causes one connect. No fault causes the first connect.
	if float64(s.Connects) <= m[disconnect] || float64(s.FaultsInjected["disconnect-every"]) < m[disconnect] ||
		float64(s.FaultsInjected["post-fail"]) < m[postFail] || s.FaultInjection == "" {
		t.Errorf("got %d connects, faults %v, metrics %v", s.Connects, s.FaultsInjected, m)
	}
	if s.MRsFailed != s.MRsRecovered+s.MRsRecycled+s.MRsOrphaned || float64(s.MRsFailed) < m[failed] {
		t.Errorf("got %d failed MRs, %d recovered, %d recycled, %d orphaned; want the sum", s.MRsFailed,
			s.MRsRecovered, s.MRsRecycled,
			s.MRsOrphaned)
	}
	t.Logf("%d connects, faults %v; %d failed MRs: %d recovered, %d recycled, %d orphaned", s.Connects,
		s.FaultsInjected, s.MRsFailed, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
}

// trace starts "nfsrdmad trace" with output to a file. The returned function counts the events;
// call it after the unmount.
func (w *testEnv) trace(t *testing.T, dir string) (events func() map[string]int) {
	t.Helper()
	file, err := os.Create(filepath.Join(w.dir, "trace"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := program(t, "nfsrdmad", "trace", "--control-socket", w.socket, "--output", "json", "--last", "1", dir)
	cmd.Stdout, cmd.Stderr = file, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if st, err := os.Stat(file.Name()); err == nil && st.Size() > 0 { // the event of --last 1
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the trace has no output")
		}
	}
	return func() map[string]int {
		t.Helper()
		timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		if err := cmd.Wait(); err != nil {
			t.Fatalf("trace: %v", err)
		}
		return countEvents(t, file.Name())
	}
}

// countEvents counts the events of a trace by name. It checks that the lines and the counts of lost
// events cover every sequence number from the first to the last.
func countEvents(t *testing.T, path string) map[string]int {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	counts := make(map[string]int)
	seen := make(map[uint64]bool)
	var lost uint64
	first, last := uint64(math.MaxUint64), uint64(0)
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) && len(line) == 0 {
			break
		}
		var e struct {
			Seq   *uint64
			Time  time.Time
			Event string
			Lost  uint64
		}
		if err != nil || json.Unmarshal(line, &e) != nil || e.Seq == nil && e.Lost == 0 {
			t.Fatalf("%v: line %q", err, line)
		}
		if e.Seq == nil {
			lost += e.Lost
			continue
		}
		if e.Event == "" || e.Time.IsZero() || seen[*e.Seq] {
			t.Errorf("got invalid or repeated event %q", line)
		}
		counts[e.Event]++
		seen[*e.Seq] = true
		first, last = min(first, *e.Seq), max(last, *e.Seq)
	}
	if last-first+1 != uint64(len(seen))+lost {
		t.Errorf("got %[3]d events and %[4]d lost for sequence numbers %[1]d to %[2]d", first, last, len(seen), lost)
	}
	return counts
}

// TestInjectErrors checks that an invalid fault plan is a usage error that names the invalid word.
func TestInjectErrors(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "c.toml")
	if err := os.WriteFile(config, []byte("inject = \"disconnect-every=often\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	spec := "127.0.0.1:/ " + dir
	const plan = "daemon --inject "
	for _, tt := range []struct {
		name string
		args string // separated by spaces
		want string // texts in the error, separated by |
	}{
		{"unknown fault", plan + "seed=7,disconect-every=60", `"disconect-every=60"|no such fault|disconnect-every=N`},
		{"no number", plan + "disconnect-every=sixty,post-fail=90:*", `"disconnect-every=sixty"|number from 1`},
		{"never", plan + "post-fail=90:*,disconnect-every=0", `"disconnect-every=0"|number from 1`},
		{"no position", plan + "post-fail=90", `"post-fail=90"|position`},
		{"no argument", plan + "reg-error", `"reg-error"|name=argument`},
		{"twice", plan + "reg-error=3,reg-error=4", `"reg-error=4"|twice`},
		{"seed", plan + "seed=x,reg-error=3", `"seed=x"|64 bits`},
		{"no fault", plan + "seed=7", `"seed=7"|injects nothing`},
		{"configuration", "daemon --config " + config, config + `|inject|"disconnect-every=often"`},
		{"serve", "serve " + dir + " --rdma-listen 127.0.0.1:0 --inject late-write=0", `"late-write=0"|number from 1`},
		{"foreground", "mount --foreground --inject lose-reply= " + spec, `"lose-reply="|number from 1`},
		{"not in the foreground", "mount --inject lose-reply=3 " + spec, "--inject|--foreground"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			args := strings.Fields(tt.args)
			if args[0] != "serve" {
				args = append(args, "--control-socket", socket)
			}
			nfsrdmad(t, args...).fails(t, control.ExitUsage, strings.Split(tt.want, "|")...)
		})
	}
	if _, err := os.Lstat(socket); err == nil {
		t.Error("a daemon with an invalid plan created its socket")
	}
}
