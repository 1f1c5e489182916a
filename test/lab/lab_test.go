package lab_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { verbstest.Main(m) }

// TestGuest goes once through what a guest can do, on each kernel.
func TestGuest(t *testing.T) {
	for _, kernel := range lab.Kernels {
		t.Run(kernel, func(t *testing.T) {
			begin := time.Now()
			g := lab.Start(t, lab.Options{Kernel: kernel})
			t.Logf("%s served after %v", g.Release, time.Since(begin).Round(time.Millisecond))
			if got := strings.TrimSpace(g.MustRun("uname -r")); got != g.Release {
				t.Errorf("the guest runs %s, its image says %s", got, g.Release)
			}
			t.Run("commands", func(t *testing.T) { testCommands(t, g) })
		})
	}
}

func testCommands(t *testing.T, g *lab.Guest) {
	if out := g.MustRun("printf 'one\\ntwo'; echo three >&2"); out != "one\ntwothree\n" {
		t.Errorf("output %q", out)
	}
	if out := g.MustRun("true"); out != "" {
		t.Errorf("output %q of nothing", out)
	}
	_, err := g.Run("echo before; exit 7")
	var failed *lab.CommandError
	if !errors.As(err, &failed) || failed.ExitCode != 7 || failed.Output != "before\n" {
		t.Errorf("exit 7: %v", err)
	}
	_, err = g.RunFor("sleep 1000", time.Second)
	if !errors.As(err, &failed) || failed.ExitCode != 137 {
		t.Errorf("a command over its limit: %v", err)
	}
	big := strings.Repeat("0123456789abcdef\n", 4096)
	if out := g.MustRun("for i in $(seq 4096); do echo 0123456789abcdef; done"); out != big {
		t.Errorf("%d octets of output, want %d", len(out), len(big))
	}
}

