package mount

import (
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// Operations of the kernel appear by name once they were made, and only those.
func TestSnapshotHasOperations(t *testing.T) {
	s := &mountStack{provider: softiwarp.New(softiwarp.Config{})}
	observe := s.fsOptions().Observe
	observe(fusefs.OpRead, 2*time.Millisecond)
	observe(fusefs.OpRead, 3*time.Millisecond)
	observe(fusefs.OpAccess, time.Second)
	ops := s.Snapshot().Ops
	if len(ops) != 2 || ops[0].Name != "read" || ops[0].Count != 2 || ops[0].Sum != 5*time.Millisecond ||
		ops[1].Name != "access" {
		t.Errorf("got %+v", ops)
	}
}
