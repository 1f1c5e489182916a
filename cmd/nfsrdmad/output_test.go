package main

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

func TestForegroundMountPrintsJSON(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	cmd := program(t, "nfsrdmad", "mount", "--foreground", "--output", "json", "127.0.0.1:/", dir, "-o",
		w.opts(w.server.RDMAAddr))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	printed := make(chan control.MountInfo, 1)
	go func() {
		var i control.MountInfo
		_ = json.NewDecoder(stdout).Decode(&i)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		printed <- i
	}()
	if i := <-printed; i.Dir != dir || i.State != control.StateMounted {
		t.Errorf("got %+v, want the mount", i)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

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
