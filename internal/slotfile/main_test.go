package slotfile

import (
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// childEnv holds the role of a process that a test started from the test binary.
const childEnv = "SLOTFILE_TEST_CHILD"

func TestMain(m *testing.M) {
	if role := os.Getenv(childEnv); role != "" {
		child(role)
	}
	kit.Main(m)
}
