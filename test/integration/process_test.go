package integration

import (
	"flag"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfstest"
)

const (
	// ownProcessEnv makes the test binary the process of one test. The value is the test's name.
	ownProcessEnv = "NFSRDMAD_OWN_PROCESS"
	// atOnce is how many tests run at the same time. A test waits most of the time, so this is more
	// than the number of processors.
	atOnce = "6"
)

// inOwnProcess runs the test again in a process with new network and mount namespaces, at the same
// time as other tests. It returns true in that process. Every test of this package calls it first.
//
// Tests that run at the same time in one process would block each other: a program that one test
// starts closes its copies of the files that another test has open on a mount, and these calls wait
// for the server.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownProcessEnv) == t.Name() {
		return true
	}
	file, err := nfstest.Program() // builds once for all tests
	if err != nil {
		t.Fatal(err)
	}
	t.Parallel()
	args := []string{os.Args[0], "-test.v", "-test.run=" + ownPattern(t.Name(), flag.Lookup("test.run").Value.String())}
	if deadline, ok := t.Deadline(); ok {
		left := time.Until(deadline) - 30*time.Second // so that this process can print the output of the test
		args = append(args, "-test.timeout="+max(left, time.Second).String())
	}
	cmd := exec.CommandContext(t.Context(), "../isolate", args...)
	cmd.Env = append(os.Environ(), ownProcessEnv+"="+t.Name(), nfstest.ProgramEnv+"="+file)
	cmd.WaitDelay = nfstest.ProcessTimeout
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
