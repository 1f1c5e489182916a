package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// roleEnv makes the test program run a role in another process. Its value is the role; the argument
// is JSON.
const roleEnv = "NFSRDMAD_BENCH_ROLE"

// Roles.
const (
	roleNull  = "null"  // serves the file system of F
	roleEcho  = "echo"  // the server of T
	roleCalls = "calls" // the client of T and S
)

func TestMain(m *testing.M) {
	role := os.Getenv(roleEnv)
	if role == "" {
		kit.Main(m)
		return
	}
	var err error
	switch role {
	case roleNull:
		err = serveNull(os.Args[1])
	case roleEcho:
		err = serveEcho()
	case roleCalls:
		var c calls
		if err = json.Unmarshal([]byte(os.Args[1]), &c); err == nil {
			err = c.run(os.Stdout)
		}
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// exitWithInput ends the process when its standard input ends, so that no process stays when the
// test is killed.
func exitWithInput() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(1)
}
