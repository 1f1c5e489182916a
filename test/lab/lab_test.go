package lab_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { kit.Main(m) }

// A recorder stands for a test whose failures are expected.
type recorder struct {
	testing.TB
	errors  []string
	cleanup []func()
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}
func (r *recorder) Failed() bool     { return len(r.errors) > 0 }
func (r *recorder) Cleanup(f func()) { r.cleanup = append(r.cleanup, f) }
func (r *recorder) end() {
	for i := len(r.cleanup) - 1; i >= 0; i-- {
		r.cleanup[i]()
	}
	r.cleanup = nil
}

// TestKernelErrorsFailTheTest checks that a kernel warning and a panic fail the test, and that an
// expected warning does not.
func TestKernelErrorsFailTheTest(t *testing.T) {
	r := &recorder{TB: t}
	g := lab.Start(r, lab.Options{MemoryMiB: 512, ExpectedKernelErrors: []string{"WARNING: .* at expected"}})
	defer r.end()
	g.MustRun(twoWarnings)
	if _, err := g.RunFor("echo c >/proc/sysrq-trigger", time.Minute); !errors.Is(err, lab.ErrPanic) {
		t.Errorf("command that causes a panic: got error %v, want ErrPanic", err)
	}
	if err := g.Reset(); err != nil { // a panicked kernel does nothing until then
		t.Fatal(err)
	}
	g.MustRun("true")
	r.end()
	all := strings.Join(r.errors, "\n")
	for what, want := range map[string]bool{"expected.c": false, "other.c": true, "Kernel panic": true} {
		if strings.Contains(all, what) != want {
			t.Errorf("kernel error of %s: got reported %v, want %v; all reports:\n%s", what, !want, want, all)
		}
	}
}

// twoWarnings is a shell command that logs two kernel warnings.
const twoWarnings = "echo '<4>WARNING: CPU: 0 PID: 1 at expected.c:1' >/dev/kmsg; " +
	"echo '<4>WARNING: CPU: 0 PID: 1 at other.c:1' >/dev/kmsg"
