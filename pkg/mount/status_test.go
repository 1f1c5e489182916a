package mount

import (
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

func TestSnapshotHasObservedOperations(t *testing.T) {
	log := hclog.NewNullLogger()
	s := &mountStack{provider: softiwarp.New(softiwarp.Config{}), shared: &shared{}}
	observe := s.fsOptions(log).Observe
	observe(fusefs.Sample{Op: fusefs.OpRead, Duration: 2 * time.Millisecond})
	observe(fusefs.Sample{Op: fusefs.OpRead, Duration: 3 * time.Millisecond})
	observe(fusefs.Sample{Op: fusefs.OpAccess, Duration: time.Second})
	ops := s.Snapshot().Ops
	if len(ops) != 2 || ops[0].Name != "read" || ops[0].Count != 2 || ops[0].Sum != 5*time.Millisecond ||
		ops[1].Name != "access" {
		t.Errorf("operations: got %+v, want 2 of read with 5 ms, and access", ops)
	}
}
