package doctor

import (
	"math/rand/v2"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

const testWindow = 5001 // bytes

// registrations returns the events of n calls. The keys are those of key.
func registrations(n int, key func(i int) uint32, change func(i int, e *trace.Event)) (events []trace.Event) {
	for i := range n {
		xid := uint32(1000 + i)
		e := trace.Event{Kind: trace.Map, XID: xid, MR: uint32(i%64) + 1, Handle: key(i), A: testWindow,
			B: uint64(xid)<<32 | 0x7000}
		if change != nil {
			change(i, &e)
		}
		events = append(events, e, trace.Event{Kind: trace.Unmap, XID: xid, MR: e.MR, Handle: e.Handle})
	}
	return events
}

// TestKeyVerdicts gives patterns of the published attacks to the checks. Each makes one check weak.
func TestKeyVerdicts(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var indices [64]uint32
	var keys [256]uint32
	for i := range indices {
		indices[i] = r.Uint32N(1 << indexBits)
	}
	for i := range keys {
		keys[i] = indices[i%64]<<8 | r.Uint32N(256)
	}
	random := func(i int) uint32 { return keys[i%256] }
	for _, x := range []struct {
		name   string
		n      int
		key    func(i int) uint32
		change func(i int, e *trace.Event)
		caps   verbs.Caps
		check  string // "" if all hold
		want   Verdict
	}{
		{"random keys", 256, random, nil, 0, "", Holds},
		{"consecutive indices", 256, func(i int) uint32 { return uint32(0x1000+i%64)<<8 | keys[i]&0xff }, nil, 0,
			"index-randomness", Weak},
		{"indices with a common prefix", 256, func(i int) uint32 { return 0xabc00000 | keys[i]&0xfffff }, nil, 0,
			"index-randomness", Weak},
		{"descending indices", 256, func(i int) uint32 { return (0xf00000 - uint32(i%64*(9000+i%64))) << 8 }, nil, 0,
			"index-randomness", Weak},
		{"keys of the kernel's client", 256, func(i int) uint32 { return indices[i%64]<<8 | uint32(7+i/64) }, nil, 0,
			"key-randomness", Weak},
		{"key used again at once", 256, func(i int) uint32 { return keys[i/2] }, nil, 0, "key-reuse", Weak},
		{"whole pages", 256, random, func(_ int, e *trace.Event) { e.A = 8192 }, 0, "window-bounds", Weak},
		{"one window too long", 256, random, func(i int, e *trace.Event) {
			if i == 100 {
				e.A++
			}
		}, 0, "window-bounds", Weak},
		{"addresses of the memory", 256, random, func(_ int, e *trace.Event) { e.B = 0x7f0012345000 }, 0,
			"address", Unknown},
		{"few registrations", 8, random, nil, 0, "index-randomness", Unknown},
		{"device that chooses keys", 256, random, nil, verbs.CapPerIOReg, "key-randomness", Unknown},
	} {
		k := evaluate(registrations(x.n, x.key, x.change), testWindow)
		k.Calls = x.n
		found := false
		for _, c := range measuredChecks(&k, x.caps) {
			if c.Name == x.check {
				found = true
				if c.Verdict != x.want {
					t.Errorf("%s: check %s: got %s (%s), want %s", x.name, c.Name, c.Verdict, c.Text, x.want)
				}
			} else if x.check == "" && c.Verdict != Holds {
				t.Errorf("%s: check %s: got %s (%s)", x.name, c.Name, c.Verdict, c.Text)
			}
		}
		if !found && x.check != "" {
			t.Errorf("%s: no check %s", x.name, x.check)
		}
		if x.check == "" && k.UnpredictableBits != indexBits+keyBits-k.SharedPrefix {
			t.Errorf("%s: got %d unpredictable bits", x.name, k.UnpredictableBits)
		}
	}
}

// TestKeyThatStaysValid leaves out the end of one registration.
func TestKeyThatStaysValid(t *testing.T) {
	events := registrations(64, func(i int) uint32 { return uint32(i) << 8 }, nil)
	k := evaluate(events[:len(events)-1], testWindow)
	if k.StillValid != 1 || k.Registrations != 64 {
		t.Errorf("got %d valid of %d registrations, want 1 of 64", k.StillValid, k.Registrations)
	}
}

// TestDesignChecks compares what providers state.
func TestDesignChecks(t *testing.T) {
	for _, x := range []struct {
		provider string
		device   verbs.DeviceAttrs
		check    string
		want     Verdict
	}{
		{"softiwarp", verbs.DeviceAttrs{Transport: verbs.TransportIWARP}, "bounds-check", Holds},
		{"softiwarp", verbs.DeviceAttrs{Transport: verbs.TransportIWARP}, "index-source", Holds},
		{"softiwarp", verbs.DeviceAttrs{Transport: verbs.TransportIWARP}, "injection", Weak},
		{"rdmacore", verbs.DeviceAttrs{Caps: verbs.CapMemWindow2B}, "bound-to-connection", Holds},
		{"rdmacore", verbs.DeviceAttrs{Caps: verbs.CapPerIOReg}, "bound-to-connection", Weak},
		{"rdmacore", verbs.DeviceAttrs{Name: "none"}, "bounds-check", Unknown},
	} {
		found := false
		for _, c := range designChecks(x.provider, &x.device) {
			if c.Basis != Design || c.Text == "" || c.Attack == "" {
				t.Errorf("%s: got check %+v", x.provider, c)
			}
			if c.Name == x.check {
				found = true
				if c.Verdict != x.want {
					t.Errorf("%s, check %s: got %s, want %s", x.provider, c.Name, c.Verdict, x.want)
				}
			}
		}
		if !found {
			t.Errorf("%s: no check %s", x.provider, x.check)
		}
	}
}
