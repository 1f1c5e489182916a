package mount

import (
	"reflect"
	"sync/atomic"
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

// Every number that a file system counts reaches the metrics.
func TestFileCountersAreComplete(t *testing.T) {
	kind := reflect.TypeFor[fusefs.Counters]()
	for i := range kind.NumField() {
		var c fusefs.Counters
		f := reflect.ValueOf(&c).Elem().Field(i)
		if f.Kind() == reflect.Array { // by operation; errors are errors of something
			c.Ops[fusefs.OpForget].Add(7)
			f = f.Index(int(fusefs.OpForget))
		}
		empty := files(&c)
		f.Addr().Interface().(*atomic.Uint64).Add(7)
		if reflect.DeepEqual(files(&c), empty) {
			t.Errorf("%s is not shown", kind.Field(i).Name)
		}
	}
	var c fusefs.Counters
	c.Ops[fusefs.OpForget].Add(3)
	if f := files(&c); !reflect.DeepEqual(f.Ops, map[string]uint64{"forget": 3}) ||
		!reflect.DeepEqual(f.OpErrors, map[string]uint64{"forget": 0}) {
		t.Errorf("got %v, %v", f.Ops, f.OpErrors)
	}
}
