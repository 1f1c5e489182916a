package main

import (
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestMetricsAddressInUse starts the daemon while another process listens on its metrics address.
// The daemon must serve mounts, report the problem, and serve metrics once the address is free.
func TestMetricsAddressInUse(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	address := other.Addr().String()
	w.startDaemonWith(t, "--metrics-listen", address)
	dir := w.mkdir(t, "m")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	for _, command := range [][]string{{"status", dir}, {"version", "--verbose"}} {
		out := nfsrdmad(t, append(command, "--control-socket", w.socket)...).succeeds(t).stdout
		for _, want := range []string{address, "in use", "metrics_listen"} {
			if !strings.Contains(out, want) {
				t.Errorf("%v: got %s, want it to contain %q", command, out, want)
			}
		}
	}
	other.Close()
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		r, err := http.Get("http://" + address + "/healthz")
		if err == nil {
			r.Body.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no metrics after the address became free: %v: %s", err, w.log)
		}
	}
	if out := nfsrdmad(t, "status", "--control-socket", w.socket).succeeds(t).stdout; strings.Contains(out, address) {
		t.Errorf("got status %s, want no problem of the metrics listener", out)
	}
	w.stop(t, w.daemon)
	for _, want := range []string{"metrics are not available", "metrics are available"} {
		if n := strings.Count(w.log.String(), want); n != 1 {
			t.Errorf("log lines with %q: got %d, want 1: %s", want, n, w.log)
		}
	}
}
