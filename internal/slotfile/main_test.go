package slotfile

import (
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

// childEnv holds the role of a process that a test started from the test binary.
const childEnv = "SLOTFILE_TEST_CHILD"

func TestMain(m *testing.M) {
	if role := os.Getenv(childEnv); role != "" {
		child(role)
	}
	testutil.Main(m)
}
