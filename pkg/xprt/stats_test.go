package xprt

import (
	"reflect"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
)

// TestNumbersOfSeveralConnections adds an idle transport and two connected ones.
func TestNumbersOfSeveralConnections(t *testing.T) {
	idle, connected := map[string]uint64{StateIdle: 1}, map[string]uint64{StateConnected: 1}
	var total Numbers
	for _, one := range []Numbers{{Connections: idle, MaxPayload: 3, Counters: Counters[uint64]{Sends: 1}},
		{Connections: connected, Connected: 1, IdleTime: 9, Counts: memreg.Counts[uint64]{MRsFailed: 5}},
		{Connections: connected, Connected: 1, IdleTime: 5, MaxPayload: 2, Counters: Counters[uint64]{Sends: 2}}} {
		total.Add(&one)
	}
	want := Numbers{Connections: map[string]uint64{StateIdle: 1, StateConnected: 2}, Connected: 1, IdleTime: 5,
		MaxPayload: 3, Counters: Counters[uint64]{Sends: 3}, Counts: memreg.Counts[uint64]{MRsFailed: 5}}
	if !reflect.DeepEqual(total, want) {
		t.Errorf("got %+v, want %+v", total, want)
	}
}
