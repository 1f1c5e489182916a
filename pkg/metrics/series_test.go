package metrics

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	promtest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// A family is a struct of numbers.
type family interface{ Metrics() []stats.Metric }

func TestEveryFieldHasOneMetric(t *testing.T) {
	everyField(t, new(xprt.Numbers), "Connections", "MRStates")
	everyField(t, new(vfs.Counters), "Ops", "Errors")
	everyField(t, new(vfs.StateStats), "Records")
	everyField(t, new(nlm.Counters))
}

// everyField fails t unless each field of numbers but those of labeled has exactly one metric, and
// each metric a field.
func everyField(t *testing.T, numbers family, labeled ...string) {
	shown := make(map[string]string)
	var walk func(reflect.Value)
	walk = func(all reflect.Value) {
		for i := range all.NumField() {
			field, f := all.Type().Field(i), all.Field(i)
			if field.Anonymous {
				walk(f)
				continue
			}
			if slices.Contains(labeled, field.Name) {
				continue
			}
			size := reflect.NewAt(reflect.TypeFor[uint64](), f.Addr().UnsafePointer()).Elem()
			size.SetUint(1 << 40) // all types of numbers have this memory
			n := 0
			for _, m := range numbers.Metrics() {
				if m.Value() != 0 {
					n++
					if other := shown[m.Name]; other != "" {
						t.Errorf("%s shows both %s and %s", m.Name, other, field.Name)
					}
					shown[m.Name] = field.Name
				}
			}
			if n != 1 {
				t.Errorf("metrics of field %s of %T: got %d, want 1", field.Name, numbers, n)
			}
			size.SetUint(0)
		}
	}
	walk(reflect.ValueOf(numbers).Elem())
	if n := len(numbers.Metrics()); len(shown) != n {
		t.Errorf("metrics that show a field of %T: got %d, want %d", numbers, len(shown), n)
	}
}

func TestCollectorShowsFaults(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(NewCollector(func() []Snapshot {
		return []Snapshot{{Mount: "/m", Server: "192.0.2.1:20049", Provider: "softiwarp",
			Faults:    map[string]uint64{"disconnect-every": 3, "lose-reply": 0},
			Transport: xprt.Numbers{Connections: map[string]uint64{"connected": 1, "idle": 0}}}}
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
# HELP nfsrdmad_faults_injected_total Faults injected on purpose.
# TYPE nfsrdmad_faults_injected_total counter
nfsrdmad_faults_injected_total{fault="disconnect-every",mount="/m",provider="softiwarp",server="192.0.2.1:20049"} 3
nfsrdmad_faults_injected_total{fault="lose-reply",mount="/m",provider="softiwarp",server="192.0.2.1:20049"} 0
`
	if err := promtest.GatherAndCompare(registry, strings.NewReader(want), "nfsrdmad_connections",
		"nfsrdmad_faults_injected_total"); err != nil {
		t.Error(err)
	}
}
