package nfsd

import (
	"fmt"
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// namespaceEnv makes this binary run the second half of a test in a user namespace.
const namespaceEnv = "NFSD_TEST_NAMESPACE"

func TestMain(m *testing.M) {
	if dir, ok := os.LookupEnv(namespaceEnv); ok {
		if err := inNamespace(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	kit.Main(m)
}
