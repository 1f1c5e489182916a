package doctor

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// The sample of keys.
const (
	sampleCalls   = 256
	sampleWorkers = 4
	// samplePart is the part of the time of the step after which the sample ends on a slow network.
	samplePart = 2
	// sampleEvents is the size of the ring of trace events. A call has about ten events.
	sampleEvents = 32 * sampleCalls
	// sampleBytes is how much a READ exceeds the inline threshold. It is odd, so that a window that
	// covers whole pages or words is found.
	sampleBytes = 4219
)

// A Basis says how a KeyCheck knows its result.
type Basis string

// Bases.
const (
	Measured Basis = "measured" // on the connection, with registrations of calls
	Design   Basis = "design"   // stated by the code or the specification of the provider
)

// A Verdict is the result of a KeyCheck.
type Verdict string

// Verdicts.
const (
	Holds   Verdict = "holds"
	Weak    Verdict = "weak"
	Unknown Verdict = "unknown" // the sample is too small, or the provider does not say
)

// A KeyCheck compares the connection with one way to attack remote keys. The values of Name do not
// change between versions.
type KeyCheck struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Basis   Basis   `json:"basis"`
	Text    string  `json:"text"`
	// Attack is the publication of the attack.
	Attack string `json:"attack"`
}

// A KeySample has the figures of a sample of registrations. It contains no key and no address.
type KeySample struct {
	Calls         int `json:"calls"`
	Registrations int `json:"registrations"`
	DistinctKeys  int `json:"distinct_keys"`
	// ReuseDistance is the smallest number of registrations from one use of a key to the next; 0 if
	// no key was used twice.
	ReuseDistance int `json:"reuse_distance"`
	// Indices are the upper 24 bits of keys, in the order of their first use.
	DistinctIndices int     `json:"distinct_indices"`
	SharedPrefix    int     `json:"shared_prefix_bits"` // bits at the top that all indices share
	Ascending       float64 `json:"ascending"`          // share of indices above their predecessor
	CommonStep      float64 `json:"common_step"`        // share of the most frequent difference
	// KeyIncrements is the share of registrations of an index whose 8-bit key is that of the
	// previous one plus 1, of KeyPairs pairs.
	KeyIncrements float64 `json:"key_increments"`
	KeyPairs      int     `json:"key_pairs"`
	// ExactWindows is the number of calls whose registrations have exactly the bytes of the call.
	ExactWindows int `json:"exact_windows"`
	// XIDAddresses is the number of registrations whose address has the XID of the call in its
	// upper half, instead of an address of this process.
	XIDAddresses int `json:"xid_addresses"`
	// UnpredictableBits estimates how many bits of a key an attacker must guess: the bits in which
	// indices differ, and keyBits, unless they follow a pattern. It is 0 if the sample is too
	// small.
	UnpredictableBits int `json:"unpredictable_bits"`
	// StillValid is the number of registrations that were valid after all calls had returned.
	StillValid int `json:"still_valid"`
}

// A KeyReport compares a connection with the published attacks on remote keys.
type KeyReport struct {
	Provider string     `json:"provider"`
	Device   string     `json:"device"`
	Sample   KeySample  `json:"sample"`
	Checks   []KeyCheck `json:"checks"`
}

// sampleKeys makes READs of the root of the export, which is a directory. The server refuses them
// without any effect, but each offers a window with a fresh key first.
func (s *server) sampleKeys(ctx context.Context) finding {
	ring := s.transport.Trace()
	from, connects := ring.Next(), s.transport.Stats().Connects
	l := s.transport.Link()
	size := max(l.InlineRecv, s.cfg.Options.InlineBytes) + sampleBytes
	calls, err := s.readRoot(ctx, size)
	if err != nil {
		return s.callFailed(err, "see the step getattr")
	}
	if s.transport.Stats().Connects != connects {
		return fail(errors.New("the RDMA connection was lost"), "see the log of the server")
	}
	events, _, lost := ring.Read(from, nil)
	if lost > 0 {
		return fail(fmt.Errorf("%d trace events were lost", lost), "run the command again")
	}
	s.keys = &KeyReport{Provider: s.provider.Name(), Device: l.Device.Name, Sample: evaluate(events, size)}
	s.keys.Sample.Calls = calls
	s.keys.Checks = s.keyChecks(&l.Device)
	text := fmt.Sprintf("%d registrations, %d distinct keys, about %d unpredictable bits", s.keys.Sample.Registrations,
		s.keys.Sample.DistinctKeys, s.keys.Sample.UnpredictableBits)
	for _, c := range s.keys.Checks {
		if c.Verdict == Weak && c.Basis == Measured {
			return warn("do not use this device with a network or a server that you do not trust", "%s; weak: %s", text,
				c.Name)
		}
	}
	return ok("%s; measured checks hold", text)
}

// readRoot makes READs of size bytes, sampleCalls of them unless the time is short. It returns
// their number.
func (s *server) readRoot(ctx context.Context, size int) (calls int, err error) {
	arena, err := membuf.Alloc(sampleWorkers * size) // a device reaches no other memory
	if err != nil {
		return 0, err
	}
	defer membuf.Free(arena)
	end := time.Now().Add(s.cfg.Timeout / samplePart)
	done, errs := make([]int, sampleWorkers), make([]error, sampleWorkers)
	var workers sync.WaitGroup
	for w := range sampleWorkers {
		workers.Go(func() {
			buf := arena[w*size : (w+1)*size : (w+1)*size]
			var res nfs3.ReadResult
			for done[w] < sampleCalls/sampleWorkers && (done[w] == 0 || time.Now().Before(end)) {
				err := s.client.Read(ctx, s.cred, s.root, 0, buf, &res)
				var status *nfs3.Error
				if err != nil && !errors.As(err, &status) {
					errs[w] = err
					return
				}
				done[w]++
			}
		})
	}
	workers.Wait()
	for _, n := range done {
		calls += n
	}
	return calls, errors.Join(errs...)
}

// evaluate computes the figures of the registrations in events. Each call offers a window of size
// bytes.
func evaluate(events []trace.Event, size int) (k KeySample) {
	type use struct {
		at  int   // number of the registration
		key uint8 // of the last registration of an index
	}
	lastKey, lastOfIndex := map[uint32]int{}, map[uint32]use{}
	offered, valid := map[uint32]uint64{}, map[uint32]bool{} // by XID, by MR
	var indices []uint32
	increments := 0
	for i := range events {
		e := &events[i]
		switch e.Kind {
		case trace.Unmap:
			delete(valid, e.MR)
		case trace.Map:
			k.Registrations++
			valid[e.MR] = true
			offered[e.XID] += e.A
			if uint32(e.B>>32) == e.XID {
				k.XIDAddresses++
			}
			if before, again := lastKey[e.Handle]; again {
				if d := k.Registrations - before; k.ReuseDistance == 0 || d < k.ReuseDistance {
					k.ReuseDistance = d
				}
			} else {
				k.DistinctKeys++
			}
			lastKey[e.Handle] = k.Registrations
			index, key := e.Handle>>8, uint8(e.Handle)
			if before, again := lastOfIndex[index]; again {
				k.KeyPairs++
				if key == before.key+1 {
					increments++
				}
			} else {
				indices = append(indices, index)
			}
			lastOfIndex[index] = use{k.Registrations, key}
		}
	}
	for _, n := range offered {
		if n == uint64(size) {
			k.ExactWindows++
		}
	}
	k.StillValid = len(valid)
	if k.KeyPairs > 0 {
		k.KeyIncrements = float64(increments) / float64(k.KeyPairs)
	}
	k.indices(indices)
	return k
}

// indexBits is the number of bits of an index. keyBits is the number of unpredictable bits of an
// 8-bit key: pkg/memreg chooses one of the 128 keys that were not used for the longest time.
const indexBits, keyBits = 24, 7

// indices computes the figures of the indices, which are distinct and in the order of their first
// use.
func (k *KeySample) indices(l []uint32) {
	k.DistinctIndices = len(l)
	if len(l) < 2 {
		return
	}
	differ := uint32(0)
	steps := map[uint32]int{}
	ascending := 0
	for i := 1; i < len(l); i++ {
		differ |= l[i] ^ l[0]
		steps[l[i]-l[i-1]]++
		if l[i] > l[i-1] {
			ascending++
		}
	}
	common := 0
	for _, n := range steps {
		common = max(common, n)
	}
	pairs := float64(len(l) - 1)
	k.SharedPrefix = indexBits - bits.Len32(differ)
	k.Ascending, k.CommonStep = float64(ascending)/pairs, float64(common)/pairs
}

// Bounds of the verdicts. Random keys break one with a probability below 1 in a million.
const (
	fewIndices    = 16
	fewPairs      = 32
	maxShared     = 8    // bits
	maxAscending  = 0.95 // share; and at least 1 - maxAscending
	maxCommonStep = 0.25 // share
	maxIncrements = 0.5  // share
	minReuse      = 128  // registrations; pkg/memreg promises as many for each index
)

// Publications of attacks.
const (
	redmark   = "ReDMArk (USENIX Security 2021)"
	nevermore = "NeVerMore (CCS 2022)"
	rfc5042   = "RFC 5042"
)

// measure returns a check that has a figure.
func measure(name, attack string, verdict Verdict, format string, args ...any) KeyCheck {
	return KeyCheck{name, verdict, Measured, fmt.Sprintf(format, args...), attack}
}

func unless(bad bool, otherwise Verdict) Verdict {
	if bad {
		return Weak
	}
	return otherwise
}

// keyChecks returns the checks: first what the sample shows, then what the provider states.
func (s *server) keyChecks(d *verbs.DeviceAttrs) []KeyCheck {
	return slices.Concat(measuredChecks(&s.keys.Sample, d.Caps), s.lifetimeChecks(), designChecks(s.keys.Provider, d))
}

// measuredChecks compares the figures of a sample with the bounds, and sets UnpredictableBits.
func measuredChecks(k *KeySample, caps verbs.Caps) []KeyCheck {
	index := measure("index-randomness", redmark, Holds,
		"%d indices: %d of %d bits at the top shared, %.0f%% ascending, most common step %.0f%%", k.DistinctIndices,
		k.SharedPrefix, indexBits, 100*k.Ascending, 100*k.CommonStep)
	switch {
	case k.DistinctIndices < fewIndices:
		index.Verdict = Unknown
	case k.SharedPrefix >= maxShared, k.Ascending > maxAscending, k.Ascending < 1-maxAscending,
		k.CommonStep > maxCommonStep:
		index.Verdict = Weak
	}
	key := measure("key-randomness", redmark, Holds, "8-bit keys: %.0f%% of %d successors are the key plus 1",
		100*k.KeyIncrements, k.KeyPairs)
	switch {
	case caps.Has(verbs.CapPerIOReg), k.KeyPairs < fewPairs: // the device chooses the whole key
		key.Verdict = Unknown
	case k.KeyIncrements > maxIncrements:
		key.Verdict = Weak
	}
	reuse := "no key was used twice"
	if k.ReuseDistance > 0 {
		reuse = fmt.Sprintf("a key was used again after %d registrations", k.ReuseDistance)
	}
	address := measure("address", redmark, Holds,
		"the upper 32 bits of all %d addresses are the XID of the call, the lower 32 bits those of the memory",
		k.Registrations)
	if k.XIDAddresses < k.Registrations { // the device does not let the program choose
		address.Verdict, address.Text = Unknown, "addresses are those of the memory, as random as the kernel places it"
	}
	if index.Verdict == Holds {
		k.UnpredictableBits += indexBits - k.SharedPrefix
	}
	if key.Verdict == Holds {
		k.UnpredictableBits += keyBits
	}
	return []KeyCheck{
		index, key,
		measure("key-reuse", redmark, unless(k.ReuseDistance > 0 && k.ReuseDistance < minReuse, Holds),
			"%d keys in %d registrations: %s", k.DistinctKeys, k.Registrations, reuse),
		measure("window-bounds", rfc5042, unless(k.ExactWindows < k.Calls, Holds),
			"%d of %d windows have exactly the bytes of their call", k.ExactWindows, k.Calls),
		address,
		measure("key-lifetime", redmark, unless(k.StillValid > 0, Holds),
			"%d keys valid after their calls returned", k.StillValid),
	}
}

// lifetimeChecks reports keys that outlive a call.
func (s *server) lifetimeChecks() []KeyCheck {
	c := KeyCheck{"long-lived-keys", Holds, Design, "no key lives longer than its call", redmark}
	if s.cfg.Options.WritePad {
		c.Verdict, c.Text = Weak, "the option writepad gives the server a key of 4 bytes for the whole connection"
	}
	return []KeyCheck{c}
}

// designChecks returns what the code of a provider states.
func designChecks(provider string, d *verbs.DeviceAttrs) []KeyCheck {
	state := func(name, attack string, v Verdict, text string) KeyCheck {
		return KeyCheck{name, v, Design, text, attack}
	}
	checks := []KeyCheck{
		state("protection-domain", redmark, Holds, "each connection has a separate protection domain"),
		state("least-rights", rfc5042, Holds,
			"a window permits remote writes or remote reads, as its call needs, and never both"),
	}
	if provider == softiwarp.Name {
		return append(checks,
			state("index-source", redmark, Holds, "indices come from a CSPRNG, over all 24 bits"),
			state("bound-to-connection", redmark, Holds, "a key is valid on one connection only (RFC 5041 §8.2)"),
			state("bounds-check", rfc5042, Holds, "the program checks key, rights and bounds before each byte moves"),
			state("injection", nevermore, Weak, "TCP without encryption: a host on the path can read and change "+
				"everything; use a network that you trust, WireGuard or IPsec"))
	}
	bound := state("bound-to-connection", redmark, Holds, "a window of type 2 is valid on one queue pair only")
	if d.Caps.Has(verbs.CapPerIOReg) {
		bound = state("bound-to-connection", redmark, Weak,
			"the device has no windows: a key is valid on each queue pair of its protection domain")
	}
	check := state("bounds-check", rfc5042, Unknown, "the device checks key, rights and bounds; the provider does not")
	if softDevice(d.Name) && d.Transport == verbs.TransportIB {
		check.Verdict, check.Text = Weak, "rxe does not check the bounds of windows; do not use it with hostile peers"
	}
	return append(checks, bound, check,
		state("index-source", redmark, Unknown, "the device chooses the indices; see index-randomness"),
		state("injection", nevermore, Weak, "RDMA without encryption: a host on the path, and on some cards a local "+
			"user, can inject requests; use a network that you trust"))
}

// softDevice reports whether a device is one of the soft devices of the kernel.
func softDevice(name string) bool {
	target, err := os.Readlink("/sys/class/infiniband/" + name)
	return err == nil && strings.Contains(target, "/virtual/")
}
