package xprt

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// unconnected returns a transport without a connection, which is closed at the end of the test.
func unconnected(t *testing.T, change func(*Config)) *Transport {
	t.Helper()
	cfg := Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4}
	if change != nil {
		change(&cfg)
	}
	tr, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	return tr
}

// TestStopOfProcessIsLeftOut checks the timeouts after a stop of the process. The time of the stop
// must not count, the calls must get stopGrace, and the log must name the stop once.
func TestStopOfProcessIsLeftOut(t *testing.T) {
	const every, stop = time.Second, time.Hour
	var log bytes.Buffer
	tr := unconnected(t, func(c *Config) {
		c.Recovery, c.Timeout = Soft, time.Second
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	})
	s := <-tr.free
	defer func() { s.end() }()
	s.begin(context.Background(), &sunrpc.Message{}, callStart{at: time.Now(), running: -2 * int64(stop)}) // expired
	now := time.Now()
	stops := running.NewDetector(every, stopGrace, now)
	for _, c := range []struct {
		name    string
		after   time.Duration
		stopped time.Duration
		expired bool
	}{
		{"stop", every + stop, stop, false},
		{"tick during the grace", stopGrace - 1, stop, false},
		{"tick after the grace", every, stop, true},
		{"next tick", every, stop, true},
	} {
		now = now.Add(c.after)
		tr.check(stops, now)
		if got := time.Duration(tr.stopped.Load()); got != c.stopped || s.expired.Load() != c.expired {
			t.Errorf("%s: got %v without the process, call expired %v; want %v, %v", c.name, got, s.expired.Load(),
				c.stopped, c.expired)
		}
	}
	if now := time.Duration(tr.now()); now > 0 || now < -stop {
		t.Errorf("running time after the stop: got %v, want that before, less %v", now, stop)
	}
	if n := strings.Count(log.String(), "process was stopped"); n != 1 {
		t.Errorf("log lines about the stop: got %d, want 1:\n%s", n, log.String())
	}
}
