package metrics

import (
	"reflect"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	promtest "github.com/prometheus/client_golang/prometheus/testutil"
)

// setNumber sets a number or bool of a Transport to something; it reports false for the maps.
func setNumber(f reflect.Value) bool {
	switch f.Kind() {
	case reflect.Uint64:
		f.SetUint(1 << 40)
	case reflect.Int64: // durations
		f.SetInt(1 << 40)
	case reflect.Bool:
		f.SetBool(true)
	default:
		return false
	}
	return true
}

// Each number of what a mount counts is shown by exactly one series, and each series shows one.
func TestEveryNumberHasItsSeries(t *testing.T) {
	everyNumber(t, transportSeries)
	everyNumber(t, fileSeries)
}

func everyNumber[T any](t *testing.T, all []series[T]) {
	shown := make(map[int]string)
	kind := reflect.TypeFor[T]()
	for i := range kind.NumField() {
		var counted T
		if !setNumber(reflect.ValueOf(&counted).Elem().Field(i)) {
			continue
		}
		name := kind.Field(i).Name
		n := 0
		for s := range all {
			if all[s].value(&counted) == 0 {
				continue
			}
			n++
			if other, twice := shown[s]; twice {
				t.Errorf("%s is shown for %s and for %s", all[s].desc, other, name)
			}
			shown[s] = name
		}
		if n != 1 {
			t.Errorf("%s is shown by %d series", name, n)
		}
	}
	if len(shown) != len(all) {
		t.Errorf("%d of %d series show a field of %v", len(shown), len(all), kind)
	}
}

// The kernel's fields, in the order of net/sunrpc/xprtrdma/transport.c: port and bind_count are
// always 0, as hardway_register is here.
func TestXprtLineFields(t *testing.T) {
	order := strings.Fields(`port bind_count Connects ConnectTime Idle Sends Receives BadXIDs InflightSum BacklogSum
		ReadChunks WriteChunks ReplyChunks TotalRDMARequest TotalRDMAReply PullupCopyBytes FixupCopyBytes HardwayRegister FailedMarshal BadReply
		NomsgCall MRsRecycled MRsOrphaned MRsAllocated LocalInvNeeded EmptySendctx ReplyWaitsForSend`)
	if len(order) != 27 {
		t.Fatalf("%d names", len(order))
	}
	for i, name := range order {
		var tr Transport
		if f := reflect.ValueOf(&tr).Elem().FieldByName(name); f.IsValid() {
			setNumber(f)
		}
		fields := strings.Fields(strings.TrimPrefix(XprtLine(&tr), "\txprt:\trdma "))
		if len(fields) != len(order) {
			t.Fatalf("%d fields", len(fields))
		}
		for at, v := range fields {
			if (v != "0") != (at == i && i > 1) {
				t.Errorf("%s: field %d is %s", name, at, v)
			}
		}
	}
}

func TestFaultsAreShown(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(FaultInjection(true), NewCollector(func() []Snapshot {
		return []Snapshot{{Mount: "/m", Server: "192.0.2.1:20049", Provider: "softiwarp+faults",
			Faults:    map[string]uint64{"disconnect-every": 3, "lose-reply": 0},
			Transport: Transport{Connections: map[string]uint64{"connected": 1, "idle": 0}}}}
	}))
	problems, err := promtest.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %+v", err, problems)
	}
	const want = `
# HELP nfsrdmad_connections Connections by state.
# TYPE nfsrdmad_connections gauge
nfsrdmad_connections{mount="/m",provider="softiwarp+faults",server="192.0.2.1:20049",state="connected"} 1
nfsrdmad_connections{mount="/m",provider="softiwarp+faults",server="192.0.2.1:20049",state="idle"} 0
# HELP nfsrdmad_fault_injection_enabled 1 when this daemon was told to inject faults: never in production.
# TYPE nfsrdmad_fault_injection_enabled gauge
nfsrdmad_fault_injection_enabled 1
# HELP nfsrdmad_faults_injected_total Faults injected on purpose.
# TYPE nfsrdmad_faults_injected_total counter
nfsrdmad_faults_injected_total{fault="disconnect-every",mount="/m",provider="softiwarp+faults",server="192.0.2.1:20049"} 3
nfsrdmad_faults_injected_total{fault="lose-reply",mount="/m",provider="softiwarp+faults",server="192.0.2.1:20049"} 0
`
	if err := promtest.GatherAndCompare(registry, strings.NewReader(want), "nfsrdmad_connections",
		"nfsrdmad_fault_injection_enabled", "nfsrdmad_faults_injected_total"); err != nil {
		t.Error(err)
	}
	if v := promtest.ToFloat64(FaultInjection(false)); v != 0 {
		t.Errorf("off is %v", v)
	}
}
