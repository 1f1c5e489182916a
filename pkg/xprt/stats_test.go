package xprt

import (
	"reflect"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
)

// TestNumbersOfSeveralConnections adds an idle transport and two connected ones.
func TestNumbersOfSeveralConnections(t *testing.T) {
	var total Numbers
	for _, one := range []Numbers{
		{Connections: map[string]uint64{StateIdle: 1}, MRStates: map[string]uint64{"VALID": 1}, MaxPayload: 3,
			Counters: Counters[uint64]{Sends: 1}},
		{Connections: map[string]uint64{StateConnected: 1}, Connected: 1, IdleTime: 9 * time.Second,
			MRStates: map[string]uint64{"VALID": 2}, Counts: memreg.Counts[uint64]{MRsFailed: 5}},
		{Connections: map[string]uint64{StateConnected: 1}, Connected: 1, IdleTime: 5 * time.Second, Slots: 2,
			MaxPayload: 2, Counters: Counters[uint64]{Sends: 2}},
	} {
		total.Add(&one)
	}
	want := Numbers{Connections: map[string]uint64{StateIdle: 1, StateConnected: 2}, Connected: 1, Slots: 2,
		IdleTime: 5 * time.Second, MaxPayload: 3, MRStates: map[string]uint64{"VALID": 3},
		Counters: Counters[uint64]{Sends: 3}, Counts: memreg.Counts[uint64]{MRsFailed: 5}}
	if !reflect.DeepEqual(total, want) {
		t.Errorf("got %+v, want %+v", total, want)
	}
}
