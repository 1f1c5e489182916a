package xprt

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
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
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 30 {
				buf := make([]byte, 9000)
				var r nfs3.ReadResult
				if err := nfs3.NewClient(tr, nfs3.Options{}).Read(testContext(t), noCred, testFH(t), 0, buf,
					&r); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
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
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		tr := &Transport{log: hclog.New(&hclog.LoggerOptions{Output: &log})}
		failure := errors.New("defect")
		tr.logHistory(failure) // without tracing
		tr.trace = trace.NewRing(2*historyEvents, func(uint8) string { return "" })
		for range historyEvents + 1 {
			tr.trace.Add(trace.Event{Kind: trace.Connect})
		}
		for _, c := range []struct {
			name  string
			pause time.Duration
			err   error
			want  int
		}{
			{"end of the stream", 0, fmt.Errorf("read: %w", io.EOF), 0},
			{"closed", 0, fmt.Errorf("call: %w", ErrClosed), 0},
			{"failure", 0, failure, historyEvents},
			{"again at once", 0, failure, 0},
			{"again before the pause", historyPause - 1, failure, 0},
			{"again after the pause", 1, failure, historyEvents},
		} {
			log.Reset()
			time.Sleep(c.pause)
			tr.logHistory(c.err)
			if got := strings.Count(log.String(), "trace event before connection loss"); got != c.want {
				t.Errorf("%s: got %d events, want %d", c.name, got, c.want)
			}
		}
	})
}
