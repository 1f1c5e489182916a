package main

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// scrape reads the metrics at addr. The keys of the map are the names of the series, with values
// summed over all labels, and name{label="value"}, summed over the other labels.
func scrape(t *testing.T, addr string) map[string]float64 {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	kit.Must(t, err)
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
		kit.Must(t, err)
		m[series] += v
		for l := range strings.SplitSeq(strings.TrimSuffix(labels, "}"), ",") {
			m[series+"{"+l+"}"] += v
		}
	}
	kit.Must(t, lines.Err())
	return m
}

// TestInjectedFaults writes and reads a file while the daemon injects faults. All commands, the log
// and the metrics must show that fault injection is on. test/integration checks the data of many
// files.
func TestInjectedFaults(t *testing.T) {
	const spec = "seed=7,disconnect-every=60,post-fail=90:*"
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	metrics := kit.FreePort(t).String()
	w.startDaemonWith(t, "--metrics-listen", metrics)
	off := scrape(t, metrics)
	if v := off["nfsrdmad_fault_injection_enabled"]; v != 0 {
		t.Errorf("got fault_injection_enabled %v, want 0", v)
	}
	for name := range off {
		if strings.Contains(name, "otlp") {
			t.Errorf("got metric %s, want none of traces by default", name)
		}
	}
	if out := w.run(t, "version", "--verbose").succeeds(t).stdout; strings.Contains(out, control.FaultBanner) {
		t.Errorf("got version %s, want no banner", out)
	}
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", metrics, "--inject", spec)
	server := serve(t, filepath.Join(w.dir, "export"), "--log-level", "warn")
	dir := w.mkdir(t, "mnt")
	w.run(t, "mount", "127.0.0.1:/", dir, "-o", server.ports(t)+",rsize=65536,wsize=65536").succeeds(t)
	data := kit.RandomBytes(7, 8<<20)
	kit.Must(t, os.WriteFile(filepath.Join(dir, "file"), data, 0o644))
	w.wantOnServer(t, "file", data)

	for _, verb := range []string{"status", "list"} {
		if out := w.run(t, verb).succeeds(t).stdout; !strings.HasPrefix(out, control.FaultBanner+spec+"\n") {
			t.Errorf("%s: got %s, want the banner first", verb, out)
		}
	}
	if out := w.run(t, "version", "--verbose").succeeds(t).stdout; !strings.Contains(out, control.FaultBanner+spec) {
		t.Errorf("version: got %s, want the banner", out)
	}
	var l []control.MountStatus
	out := w.run(t, "status", "--output", "json", dir).succeeds(t).stdout
	if err := json.Unmarshal([]byte(out), &l); err != nil || len(l) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	faults, connects, failed := l[0].FaultsInjected, l[0].Metrics.Count("connects_total"),
		l[0].Metrics.Count("mrs_failed_total")
	if connects < 2 || faults["disconnect-every"] == 0 || faults["post-fail"] == 0 || failed == 0 {
		t.Errorf("got %d connects, faults %v, %d failed MRs", connects, faults, failed)
	}
	on := scrape(t, metrics)
	if on["nfsrdmad_fault_injection_enabled"] != 1 || on["nfsrdmad_rpc_resends_total"] == 0 ||
		on[`nfsrdmad_faults_injected_total{fault="disconnect-every"}`] == 0 {
		t.Errorf("metrics: %v", on)
	}
	trace := w.run(t, "trace", dir, "--follow=false").succeeds(t).stdout
	if !strings.Contains(trace, "post_send") {
		t.Errorf("trace: got %s, want calls", trace)
	}
	w.stop(t, w.daemon)
	if !strings.Contains(w.log.String(), "FAULT INJECTION IS ON") {
		t.Errorf("got log %s, want the banner", w.log)
	}
}
