package mounts

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const (
	// ownProcessEnv makes the test binary the process of one test. The value is the test's name.
	ownProcessEnv = "NFSRDMAD_OWN_PROCESS"
	// atOnce is how many tests run at the same time. A test waits most of the time, so this is more
	// than the number of processors.
	atOnce = "6"
)

// MainOwnProcess is kit.MainNeedsRoot for packages whose tests call InOwnProcess.
func MainOwnProcess(m *testing.M, opts ...goleak.Option) {
	flag.Parse()
	if p := flag.Lookup("test.parallel"); os.Getenv(ownProcessEnv) == "" && p.Value.String() == p.DefValue {
		_ = p.Value.Set(atOnce)
	}
	kit.MainNeedsRoot(m, opts...)
}

// InOwnProcess runs the test again in a process with new network and mount namespaces, at the same
// time as other tests. It returns true in that process. Each test of a package that uses
// MainOwnProcess calls it first. The package is a directory beside test/isolate.
//
// Tests that run at the same time in one process would block each other: a program that one test
// starts closes its copies of the files that another test has open on a mount, and these calls wait
// for the server.
func InOwnProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownProcessEnv) == t.Name() {
		return true
	}
	file, err := Program() // builds once for all tests
	if err != nil {
		t.Fatal(err)
	}
	t.Parallel()
	args := []string{os.Args[0], "-test.v", "-test.run=" + ownPattern(t.Name(), flag.Lookup("test.run").Value.String())}
	ctx := t.Context()
	if deadline, ok := t.Deadline(); ok {
		left := time.Until(deadline) - 30*time.Second // so that this process can print the output of the test
		args = append(args, "-test.timeout="+max(left, time.Second).String())
		// A process of the test that waits in the kernel must not keep this process.
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-15*time.Second))
		defer cancel()
	}
	cmd := exec.CommandContext(ctx, "../isolate", args...)
	cmd.Env = append(os.Environ(), ownProcessEnv+"="+t.Name(), ProgramEnv+"="+file)
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()+" (") {
		t.Errorf("test did not pass in its process: %v\n%s", err, out)
	} else {
		t.Logf("in its process:\n%s", out)
	}
	return false
}

// ownPattern returns the value of -run that selects one test, with the pattern of its subtests in
// run.
func ownPattern(name, run string) string {
	_, subtests, found := strings.Cut(run, "/")
	if found {
		return "^" + name + "$/" + subtests
	}
	return "^" + name + "$"
}
