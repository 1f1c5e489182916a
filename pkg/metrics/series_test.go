package metrics

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nfsrdmad/nfsrdmad/pkg/stats"
)

// setField sets a field of statistics to a value other than zero.
func setField(f reflect.Value) {
	switch v := f.Addr().Interface().(type) {
	case *uint64:
		*v = 1 << 40
	case *time.Duration:
		*v = 1 << 40
	case *map[string]uint64:
		*v = map[string]uint64{stats.Connected: 1}
	}
}

func TestEveryFieldHasOneSeries(t *testing.T) { everyField(t, transportSeries, "MRStates") }

// everyField fails t unless each field of T but those of labeled has exactly one series.
func everyField[T any](t *testing.T, all []series[T], labeled ...string) {
	shown := make(map[int]string)
	kind := reflect.TypeFor[T]()
	for i := range kind.NumField() {
		name := kind.Field(i).Name
		if slices.Contains(labeled, name) {
			continue
		}
		var counted T
		setField(reflect.ValueOf(&counted).Elem().Field(i))
		n := 0
		for s := range all {
			if all[s].value(&counted) == 0 {
				continue
			}
			n++
			if other, twice := shown[s]; twice {
				t.Errorf("%s shows both %s and %s", all[s].desc, other, name)
			}
			shown[s] = name
		}
		if n != 1 {
			t.Errorf("series of field %s: got %d, want 1", name, n)
		}
	}
	if len(shown) != len(all) {
		t.Errorf("series that show a field of %v: got %d, want %d", kind, len(shown), len(all))
	}
}

func TestCollectorShowsFaults(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(FaultInjection(true), NewCollector(func() []Snapshot {
		return []Snapshot{{Mount: "/m", Server: "192.0.2.1:20049", Provider: "softiwarp",
			Faults:    map[string]uint64{"disconnect-every": 3, "lose-reply": 0},
			Transport: stats.Transport{Connections: map[string]uint64{"connected": 1, "idle": 0}}}}
	}))
	problems, err := promtest.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: got %+v and error %v, want none", problems, err)
	}
	const want = `
# HELP nfsrdmad_connections Connections by state.
# TYPE nfsrdmad_connections gauge
nfsrdmad_connections{mount="/m",provider="softiwarp",server="192.0.2.1:20049",state="connected"} 1
nfsrdmad_connections{mount="/m",provider="softiwarp",server="192.0.2.1:20049",state="idle"} 0
# HELP nfsrdmad_fault_injection_enabled 1 if the daemon injects faults; always 0 in production.
# TYPE nfsrdmad_fault_injection_enabled gauge
nfsrdmad_fault_injection_enabled 1
# HELP nfsrdmad_faults_injected_total Faults injected on purpose.
# TYPE nfsrdmad_faults_injected_total counter
nfsrdmad_faults_injected_total{fault="disconnect-every",mount="/m",provider="softiwarp",server="192.0.2.1:20049"} 3
nfsrdmad_faults_injected_total{fault="lose-reply",mount="/m",provider="softiwarp",server="192.0.2.1:20049"} 0
`
	if err := promtest.GatherAndCompare(registry, strings.NewReader(want), "nfsrdmad_connections",
		"nfsrdmad_fault_injection_enabled", "nfsrdmad_faults_injected_total"); err != nil {
		t.Error(err)
	}
	if v := promtest.ToFloat64(FaultInjection(false)); v != 0 {
		t.Errorf("gauge without faults: got %v, want 0", v)
	}
}
