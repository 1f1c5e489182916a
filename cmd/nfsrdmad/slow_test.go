package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestStatusSlow mounts with a daemon that delays each reply, and checks that the slowest requests
// and RPCs spent their time at the server.
func TestStatusSlow(t *testing.T) {
	const delay = 0.02 // seconds
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--inject", "seed=1,delay-reply=1:20ms")
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	if _, err := os.Stat(filepath.Join(dir, "missing")); !os.IsNotExist(err) {
		t.Errorf("stat of a missing file: got %v", err)
	}
	var text string
	kit.Eventually(t, "lookup with ENOENT", func() bool { // a request ends a moment after its reply
		text = w.run(t, "status", "--slow", dir).succeeds(t).stdout
		return strings.Contains(text, "ENOENT")
	})
	out := w.run(t, "status", "--slow", "--output", "json").succeeds(t).stdout
	var l []control.SlowCalls
	if err := json.Unmarshal([]byte(out), &l); err != nil || len(l) != 1 || l[0].Dir != dir {
		t.Fatalf("%v: %s, want one mount", err, out)
	}
	found := make(map[string]control.SlowCall)
	for _, c := range l[0].Requests {
		checkSlow(t, &c, delay*float64(c.Calls))
		found[c.Name+c.Error] = c
	}
	for _, c := range l[0].Calls {
		checkSlow(t, &c, delay)
		found[c.Name] = c
	}
	if c := found["read"]; c.Calls == 0 || c.Ended.IsZero() || c.XID != "" {
		t.Errorf("read: got %+v, want RPCs, and its end", c)
	}
	if c := found["lookupENOENT"]; c.Calls == 0 || c.Owner != control.OwnerProcess || c.PID != uint32(os.Getpid()) {
		t.Errorf("lookup of a missing name: got %+v, want an RPC of this process, %d", c, os.Getpid())
	}
	if c := found["READ"]; c.XID == "" || c.Calls != 0 {
		t.Errorf("READ: got %+v in %s, want an XID", c, out)
	}
	for _, s := range []string{text, out} {
		if strings.Contains(s, "hello") || strings.Contains(s, "missing") {
			t.Errorf("got %s, want no names of files", s)
		}
	}
	wantText(t, "status --slow", text, dir, "REQUEST", "RPC ", "READ", "lookup", "server ", "1 RPC")
}

// checkSlow checks that the phases of a call sum to its total, and that it spent enough seconds at
// the server.
func checkSlow(t *testing.T, c *control.SlowCall, server float64) {
	t.Helper()
	sum := 0.0
	for name, s := range c.Phases {
		if s <= 0 {
			t.Errorf("phase %s: got %v, want more than 0", name, s)
		}
		sum += s
	}
	if d := sum - c.Total; d > 1e-9 || d < -1e-9 || c.Phases["server"] < server {
		t.Errorf("got %+v, want phases that sum to the total, and at least %v at the server", c, server)
	}
}

// TestSlowTableFits prints a call that spent the same time in each phase, with a long command.
func TestSlowTableFits(t *testing.T) {
	c := control.SlowCall{Name: "readdirplus", Total: 12 * 0.0123456, Calls: 321, Error: "ENAMETOOLONG",
		CallOwner: control.CallOwner{Owner: control.OwnerProcess, PID: 4194304, Command: "é-command-of-15",
			UID: 4294967294}, Phases: map[string]float64{}}
	for _, p := range strings.Fields("queue slot reconnect credit register send server completion invalidation " +
		"return local reply") {
		c.Phases[p] = 0.0123456
	}
	rpc := control.SlowCall{Name: "READ", Total: 700, Resends: 1, Error: "timeout",
		CallOwner: control.CallOwner{Owner: control.OwnerWriteBack},
		Phases:    map[string]float64{"reconnect": 699, "server": 0.5}}
	var b strings.Builder
	printSlow(&b, []control.SlowCalls{{Dir: "/mnt", Requests: []control.SlowCall{c}, Calls: []control.SlowCall{rpc}},
		{Dir: "/idle"}}, time.Now())
	out := b.String()
	for line := range strings.Lines(out) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > slowColumns {
			t.Errorf("line of %d columns, want at most %d: %q", n, slowColumns, line)
		}
	}
	for _, want := range []string{"completion 12.3ms", "reply 12.3ms", "321 RPCs", "ENAMETOOLONG", "  148ms  ",
		"4194304 é-command-of-15…", "  11m40s", "reconnect 11m39s, 1 resend, timeout", "/idle\n  no requests"} {
		if !strings.Contains(out, want) {
			t.Errorf("got\n%swant %q in it", out, want)
		}
	}
	if strings.Contains(out, "server 500ms") {
		t.Errorf("got\n%swant no phase below 1 %%", out)
	}
}

func TestShortDurations(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                         "0.00us",
		123:                       "0.12us",
		9999:                      "10.0us",
		99_960:                    "100us",
		999_400:                   "999us",
		999_999:                   "1000us",
		1_234_567:                 "1.23ms",
		45_678 * time.Microsecond: "45.7ms",
		1234 * time.Millisecond:   "1.23s",
		99 * time.Second:          "99.0s",
		100 * time.Second:         "1m40s",
	} {
		if got := short(d); got != want {
			t.Errorf("%v: got %s, want %s", d, got, want)
		}
	}
}
