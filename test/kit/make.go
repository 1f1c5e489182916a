package kit

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Make runs make(1) in the directory root. Variables of a make that runs the test do not reach it.
func Make(tb testing.TB, root string, args ...string) {
	tb.Helper()
	cmd := exec.Command("make", append([]string{"-C", root}, args...)...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"}, name)
	})
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}
