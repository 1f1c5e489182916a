package stats

import (
	"reflect"
	"testing"
	"time"
)

// Add must sum every field that somebody adds to Transport later.
func TestAddSumsEveryField(t *testing.T) {
	largest := map[string]bool{"MaxPayload": true, "IdleTime": true}
	kind := reflect.TypeFor[Transport]()
	for i := range kind.NumField() {
		var sum Transport
		for range 2 {
			one := Transport{Connections: map[string]uint64{Connected: 1}}
			switch f := reflect.ValueOf(&one).Elem().Field(i); f.Kind() {
			case reflect.Uint64:
				f.SetUint(7)
			case reflect.Int64: // a duration
				f.SetInt(7)
			case reflect.Map:
				f.Set(reflect.ValueOf(map[string]uint64{"x": 7}))
			}
			sum.Add(&one)
		}
		var got uint64
		switch f := reflect.ValueOf(&sum).Elem().Field(i); f.Kind() {
		case reflect.Uint64:
			got = f.Uint()
		case reflect.Int64:
			got = uint64(f.Int())
		case reflect.Map:
			got = f.Interface().(map[string]uint64)["x"]
		}
		want := uint64(14)
		if largest[kind.Field(i).Name] {
			want = 7
		}
		if got != want {
			t.Errorf("sum of %s: got %d, want %d", kind.Field(i).Name, got, want)
		}
	}
}

func TestAddKeepsIdleTimeOfLastCall(t *testing.T) {
	var sum Transport
	connected := map[string]uint64{Connected: 1}
	for _, one := range []Transport{
		{Connections: map[string]uint64{"idle": 1}, MRStates: map[string]uint64{"VALID": 1}},
		{Connections: connected, IdleTime: 9 * time.Second, MRStates: map[string]uint64{"VALID": 2}},
		{Connections: connected, IdleTime: 5 * time.Second},
		{Connections: connected, IdleTime: 7 * time.Second},
	} {
		sum.Add(&one)
	}
	want := Transport{Connections: map[string]uint64{"idle": 1, Connected: 3}, IdleTime: 5 * time.Second,
		MRStates: map[string]uint64{"VALID": 3}}
	if !reflect.DeepEqual(sum, want) {
		t.Errorf("got %+v, want %+v", sum, want)
	}
}
