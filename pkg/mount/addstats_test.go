package mount

import (
	"reflect"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// Every number that a transport keeps reaches the metrics, but those named here.
func TestStatsAreComplete(t *testing.T) {
	// of the present connection, in the log
	notShown := map[string]bool{"InlineSend": true, "InlineRecv": true}
	empty := func() metrics.Transport {
		return metrics.Transport{MRs: map[string]uint64{}, Connections: map[string]uint64{}}
	}
	kind := reflect.TypeFor[xprt.Stats]()
	for i := range kind.NumField() {
		s := xprt.Stats{State: xprt.StateConnected}
		switch f := reflect.ValueOf(&s).Elem().Field(i); f.Kind() {
		case reflect.Uint64:
			f.SetUint(7)
		case reflect.Int, reflect.Int64:
			f.SetInt(7)
		default:
			continue
		}
		got, without := empty(), empty()
		addStats(&got, &s)
		addStats(&without, &xprt.Stats{State: xprt.StateConnected})
		if name := kind.Field(i).Name; reflect.DeepEqual(got, without) != notShown[name] {
			t.Errorf("%s: shown is %v", name, notShown[name])
		}
	}
}

// The counters of nconnect connections add up; the mount is as idle as the connection that had the
// last call.
func TestStatsOfSeveralConnections(t *testing.T) {
	sum := metrics.Transport{MRs: map[string]uint64{}, Connections: map[string]uint64{}}
	for _, s := range []xprt.Stats{
		{State: xprt.StateIdle, IdleTime: time.Hour, Sends: 1, MRStates: map[string]int64{"VALID": 1}},
		{State: xprt.StateConnected, IdleTime: 9 * time.Second, Sends: 2, MRStates: map[string]int64{"VALID": 2}},
		{State: xprt.StateConnected, IdleTime: 5 * time.Second, Sends: 4},
		{State: xprt.StateConnected, IdleTime: 7 * time.Second, Sends: 8},
	} {
		addStats(&sum, &s)
	}
	if sum.Sends != 15 || sum.MRs["VALID"] != 3 || sum.Idle != 5*time.Second || sum.Connections["connected"] != 3 ||
		sum.Connections["idle"] != 1 || !sum.Connected {
		t.Errorf("got %+v", sum)
	}
}
