package main

import (
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// TestStatusShowsAddresses checks the lines of status about connections to one and to several
// addresses.
func TestStatusShowsAddresses(t *testing.T) {
	const a, b = "192.0.2.1:20049", "192.0.2.2:20049"
	for _, c := range []struct {
		connections []control.Connection
		want        []string
		not         string
	}{
		{[]control.Connection{{State: "connected", Address: a, Preferred: a}},
			[]string{"  connection: connected to " + a + " by softiwarp"}, "addresses:"},
		{[]control.Connection{{State: "connected", Address: b, Preferred: b}},
			[]string{"  connection: connected by softiwarp", "  addresses:  #0 connected " + b}, a},
		{[]control.Connection{{State: "connected", Address: b, Preferred: a},
			{State: "idle", Address: b, Preferred: b}},
			[]string{"connection: connected by", "#0 connected " + b + " (prefers " + a + "),", "#1 idle " + b},
			"#2"},
	} {
		m := control.MountStatus{Connection: "connected", Addresses: c.connections}
		m.Server, m.Provider = a, "softiwarp"
		var out strings.Builder
		printMount(&out, &m, time.Now())
		for _, want := range c.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%+v: got\n%swant %q in it", c.connections, out.String(), want)
			}
		}
		if strings.Contains(out.String(), c.not) {
			t.Errorf("%+v: got\n%swant no %q in it", c.connections, out.String(), c.not)
		}
	}
}

// TestStatusShowsPendingCalls prints a stalled mount with calls and a history of its connections.
func TestStatusShowsPendingCalls(t *testing.T) {
	now := time.Now()
	m := control.MountStatus{Calls: []control.PendingCall{
		{Age: 72, XID: "0x2a", Procedure: "READ", Slot: 7, WaitsFor: "reply",
			CallOwner: control.CallOwner{Owner: control.OwnerProcess, PID: 4711, Command: "d\x1bd", UID: 1000}},
		{Age: 3, XID: "0x2b", Procedure: "LOOKUP", Slot: 8, WaitsFor: "late reply",
			CallOwner: control.CallOwner{Owner: control.OwnerGone}},
		{Age: 0.5, Procedure: "NULL", Slot: -1, WaitsFor: "slot",
			CallOwner: control.CallOwner{Owner: control.OwnerLiveness}}},
		History: []control.ConnEvent{{Time: now.Add(-time.Hour), Event: "connected"},
			{Time: now.Add(-80 * time.Second), Event: "disconnected", Cause: "no message", Connection: 1, Times: 3}}}
	m.Spec, m.Dir, m.State, m.Stalled = "nas:/home", "/mnt", control.StateStalled, 72
	m.Reason = "no reply from 192.0.2.1:20049 to READ, which is a text that needs more than one line"
	var out strings.Builder
	printStatus(&out, []control.MountStatus{m}, now)
	for _, want := range []string{
		`(?m)^nas:/home on /mnt: stalled, mounted since`,
		`reason:\s+no\s+reply\s+from[^(]*\(for\s+72\s+s\)`,
		`3 pending \(late reply 1, reply 1, slot 1\)`,
		`(?m)^  1m12s +0x2a +READ +#0 7 +reply +4711 d\?d uid 1000$`,
		`(?m)^  3.0s +0x2b +LOOKUP +#0 8 +late reply +\(caller exited\)$`,
		`(?m)^  0.5s +- +NULL +#0 - +slot +` + control.OwnerLiveness + `$`,
		`(?m)^ +1m20s ago  #1 disconnected: no message \(3 times\)$`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("got\n%swant a match of %s", out.String(), want)
		}
	}
	for line := range strings.Lines(out.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > columns {
			t.Errorf("got a line of %d columns: %s", n, line)
		}
	}
}
