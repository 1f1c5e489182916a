package archtest

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

var (
	// newDescriptor lists system calls that return a file descriptor. Flags make it close-on-exec.
	newDescriptor = []string{"Accept4", "Dup3", "EpollCreate1", "Eventfd", "Open", "OpenTree", "Openat",
		"Pipe2", "Socket", "Socketpair"}
	// sharedDescriptor lists those without such flags.
	sharedDescriptor = []string{"Accept", "Creat", "Dup", "EpollCreate", "Pipe"}
)

// TestDescriptorsCloseOnExec checks that programs which this process starts get no descriptor by
// accident. They would keep files open, for example those of a mount.
func TestDescriptorsCloseOnExec(t *testing.T) {
	found := 0
	for _, f := range goFiles(t) {
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if pkg, ok := sel.X.(*ast.Ident); !ok || pkg.Name != "unix" && pkg.Name != "syscall" {
				return true
			}
			at := f.fset.Position(call.Pos())
			text := string(f.src[at.Offset:f.fset.Position(call.End()).Offset])
			switch {
			case slices.Contains(sharedDescriptor, sel.Sel.Name):
				t.Errorf("%s: %s is not close-on-exec; use a call with flags", at, text)
			case slices.Contains(newDescriptor, sel.Sel.Name):
				if found++; !strings.Contains(text, "CLOEXEC") {
					t.Errorf("%s: %s is not close-on-exec", at, text)
				}
			}
			return true
		})
	}
	if found < 10 {
		t.Errorf("found %d system calls, want 10 or more", found)
	}
}
