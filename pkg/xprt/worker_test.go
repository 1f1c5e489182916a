package xprt

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
)

// TestFailedCompletionsAreLogged makes LOCAL_INVs fail. Each failure must be logged once, with its
// status and the code of the vendor. The flushes that follow must not be logged (docs/features.md
// S25).
func TestFailedCompletionsAreLogged(t *testing.T) {
	var log bytes.Buffer
	p := faulty(t, "linv-error=10")
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Provider, c.Logger = p, hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Error,
			Mutex: &sync.Mutex{}})
	})
	for range 30 {
		if err := tr.Call(testContext(t), readOf(9000)); err != nil {
			t.Error(err)
		}
	}
	tr.Close()
	lines := strings.Count(log.String(), "\n")
	injected := p.Counts()[0].Injected
	if injected == 0 || uint64(lines) != injected {
		t.Errorf("log lines for %d failures: got %d:\n%s", injected, lines, log.String())
	}
	for line := range strings.Lines(log.String()) {
		if !strings.Contains(line, "work request failed") || !strings.Contains(line, "localinv") ||
			!strings.Contains(line, "status=") || !strings.Contains(line, "vendor=") {
			t.Errorf("log line: got %q, want the failed request, its status and the vendor code", line)
		}
	}
}

// TestEventsAreLoggedAfterFailure checks that the end of a connection logs the last trace events
// unless the end is normal, and that another failure soon after logs nothing.
func TestEventsAreLoggedAfterFailure(t *testing.T) {
	failure := errors.New("defect")
	for _, events := range []int{0, 2 * historyEvents} {
		var log bytes.Buffer
		inBubble(t, func(c *Config, _ *stepServer) {
			c.TraceEvents, c.Logger = events, hclog.New(&hclog.LoggerOptions{Output: &log})
		}, func(t *testing.T, b *bubble) {
			for i, c := range []struct {
				pause time.Duration
				err   error
				want  int
			}{{0, io.EOF, 0}, {0, failure, 1}, {0, failure, 0}, {historyPause, failure, 1}} {
				for range historyEvents {
					b.mustSucceed(echo(1, nil, 0))
				}
				sleep(c.pause)
				log.Reset()
				b.qp().lose(c.err)
				settle()
				want := min(c.want*historyEvents, events)
				if got := strings.Count(log.String(), "trace event before connection loss"); got != want {
					t.Errorf("loss %d, %v: got %d events, want %d", i, c.err, got, want)
				}
			}
		})
	}
}
