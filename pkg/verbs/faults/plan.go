package faults

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// anyPosition is the position for K=*.
const anyPosition = -1

// maxDelay bounds D, so that a typing error does not look like a hang.
const maxDelay = time.Hour

// A rule is the argument of one fault.
type rule struct {
	on       bool
	random   bool          // ~N
	every    uint64        // N
	position int           // K, or anyPosition
	delay    time.Duration // D
	value    uint32        // C
}

// A Plan defines which faults are injected and how often, and the seed of their random choices. A
// Plan is immutable and safe for concurrent use.
type Plan struct {
	seed  uint64
	rules [numKinds]rule
}

// Parse parses a plan: words separated by commas. Each word is a fault with its argument (see
// [All]) or seed=S. With an interval N a fault fires at every Nth event, with ~N at random with
// mean N. Without seed=, Parse chooses a seed. An empty string is a plan without faults. An error
// contains the invalid word.
func Parse(spec string) (*Plan, error) {
	p := &Plan{}
	seeded := false
	if strings.TrimSpace(spec) == "" {
		p.seed = rand.Uint64()
		return p, nil
	}
	for word := range strings.SplitSeq(spec, ",") {
		word = strings.TrimSpace(word)
		name, arg, ok := strings.Cut(word, "=")
		if !ok {
			return nil, badWord(word, "missing argument, use name=argument")
		}
		if name == "seed" {
			seed, err := strconv.ParseUint(arg, 0, 64)
			if err != nil || seeded {
				return nil, badWord(word, "the seed must be one number of 64 bits")
			}
			p.seed, seeded = seed, true
			continue
		}
		k, ok := lookup(name)
		if !ok {
			return nil, badWord(word, "no such fault")
		}
		if p.rules[k].on {
			return nil, badWord(word, "fault given twice")
		}
		r, err := parseRule(faults[k].form, arg)
		if err != nil {
			return nil, badWord(word, err.Error())
		}
		p.rules[k] = r
	}
	if !seeded {
		p.seed = rand.Uint64()
	}
	return p, nil
}

func badWord(word, why string) error {
	return fmt.Errorf("faults: parse plan: word %q: %s; known words are %s", word, why, known())
}

// known lists the words of a plan.
func known() string {
	var b strings.Builder
	b.WriteString("seed=S")
	for _, f := range All() {
		b.WriteString(", " + f.Name + "=" + f.Syntax)
	}
	return b.String()
}

func lookup(name string) (kind, bool) {
	for k := range faults {
		if faults[k].Name == name {
			return kind(k), true
		}
	}
	return 0, false
}

func parseRule(f form, arg string) (rule, error) {
	r := rule{on: true, every: 1}
	if f == formValue {
		v, err := strconv.ParseUint(arg, 10, 32)
		if err != nil {
			return r, fmt.Errorf("value C must be a 32-bit number")
		}
		r.value = uint32(v)
		return r, nil
	}
	interval, rest, more := strings.Cut(arg, ":")
	interval, r.random = strings.CutPrefix(interval, "~")
	n, err := strconv.ParseUint(interval, 10, 64)
	if err != nil || n == 0 {
		return r, fmt.Errorf("interval N must be a number from 1, or ~N for random intervals with mean N")
	}
	r.every = n
	switch f {
	case formPosition:
		r.position, err = parsePosition(rest)
	case formDelay:
		r.delay, err = parseDelay(rest)
	case formLateDelay:
		if r.delay = defaultLate; more {
			r.delay, err = parseDelay(rest)
		}
	default:
		if more {
			err = fmt.Errorf("the argument must be N alone")
		}
	}
	return r, err
}

func parsePosition(s string) (int, error) {
	if s == "*" {
		return anyPosition, nil
	}
	k, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("position K must be a number from 0, or * for a random one")
	}
	return int(k), nil
}

func parseDelay(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 || d > maxDelay {
		return 0, fmt.Errorf("delay D must be a duration such as 20ms, at most %v", maxDelay)
	}
	return d, nil
}

// Empty reports whether the plan has no faults.
func (p *Plan) Empty() bool {
	for i := range p.rules {
		if p.rules[i].on {
			return false
		}
	}
	return true
}

// Seed returns the seed of all random choices.
func (p *Plan) Seed() uint64 { return p.seed }

// String returns the plan with its seed. Parse of the result repeats the run.
func (p *Plan) String() string {
	b := []byte("seed=")
	b = strconv.AppendUint(b, p.seed, 10)
	for k := range p.rules {
		r := &p.rules[k]
		if !r.on {
			continue
		}
		b = append(b, ',')
		b = append(b, faults[k].Name...)
		b = append(b, '=')
		if faults[k].form == formValue {
			b = strconv.AppendUint(b, uint64(r.value), 10)
			continue
		}
		if r.random {
			b = append(b, '~')
		}
		b = strconv.AppendUint(b, r.every, 10)
		switch faults[k].form {
		case formPosition:
			if r.position == anyPosition {
				b = append(b, ":*"...)
			} else {
				b = append(b, ':')
				b = strconv.AppendInt(b, int64(r.position), 10)
			}
		case formDelay, formLateDelay:
			b = append(b, ':')
			b = append(b, r.delay.String()...)
		}
	}
	return string(b)
}

// attacks reports whether the plan has faults that post their own requests.
func (p *Plan) attacks() bool {
	for _, k := range []kind{lateWrite, lateRead, staleKey, wildWrite} {
		if p.rules[k].on {
			return true
		}
	}
	return false
}

// fires reports whether the fault k fires at an event, counted from 1. The result depends only on
// the plan and the arguments.
func (p *Plan) fires(k kind, event uint64) bool {
	r := &p.rules[k]
	switch {
	case !r.on:
		return false
	case r.random:
		return p.draw(k, event, saltFire)%r.every == 0
	}
	return event%r.every == 0
}

// Salts separate the random choices for one event.
const (
	saltFire uint64 = iota
	saltPlace
	saltVariant
)

// draw returns a pseudo-random number that depends only on the seed and the arguments. draw applies
// SplitMix64's finalizer to each argument.
func (p *Plan) draw(k kind, event, salt uint64) uint64 {
	x := p.seed
	for _, v := range [...]uint64{uint64(k) + 1, event, salt} {
		x += v*0x9e3779b97f4a7c15 + 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
	}
	return x
}

// choose returns a pseudo-random number from 0 to n-1.
func (p *Plan) choose(k kind, event, salt uint64, n int) int {
	return int(p.draw(k, event, salt) % uint64(n))
}
