package archtest

import (
	"go/ast"
	"slices"
	"testing"
)

// timedPackages have timeouts on which calls of a mount depend.
var timedPackages = []string{"internal/rpctcp", "internal/running", "pkg/fusefs", "pkg/memreg", "pkg/mount", "pkg/nfs3",
	"pkg/nfs3/mountd", "pkg/nfs3/nfsacl", "pkg/nlm", "pkg/verbs/rdmacore", "pkg/verbs/softiwarp", "pkg/xprt"}

// wallClock lists the methods and functions of package time whose results have no reading of the
// monotonic clock. A time computed with them jumps when the clock of the host is set.
var wallClock = []string{"AddDate", "Date", "In", "Local", "UTC", "Unix", "UnixMicro", "UnixMilli", "UnixNano"}

// wallClockUses lists the files that may use wallClock: for the times of files, and for a deadline
// that has passed.
var wallClockUses = map[string]string{
	"pkg/nfs3/types.go":             "nfstime3",
	"pkg/verbs/rdmacore/channel.go": "time.Unix(1, 0) is a passed deadline",
	"pkg/verbs/rdmacore/cq.go":      "time.Unix(1, 0) is a passed deadline",
	"pkg/verbs/rdmacore/device.go":  "time.Unix(1, 0) is a passed deadline",
	"pkg/verbs/softiwarp/dial.go":   "time.Unix(1, 0) is a passed deadline",
	"pkg/verbs/softiwarp/listen.go": "time.Unix(1, 0) is a passed deadline",
	"pkg/verbs/softiwarp/qp.go":     "time.Unix(1, 0) is a passed deadline",
}

// TestTimeoutsUseMonotonicClock checks that no timeout depends on the wall clock, which an
// administrator or NTP may set by any amount.
func TestTimeoutsUseMonotonicClock(t *testing.T) {
	used := make(map[string]bool)
	for _, f := range goFiles(t) {
		if f.test || !slices.Contains(timedPackages, f.pkg) {
			continue
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains(wallClock, sel.Sel.Name) {
				return true
			}
			if used[f.path] = true; wallClockUses[f.path] == "" {
				t.Errorf("%s: %s has no reading of the monotonic clock; use time.Now, Since and Sub",
					f.fset.Position(call.Pos()), sel.Sel.Name)
			}
			return true
		})
	}
	for path := range wallClockUses {
		if !used[path] {
			t.Errorf("%s does not use the wall clock; remove it from the list", path)
		}
	}
}
