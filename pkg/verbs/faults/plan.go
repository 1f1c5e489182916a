package faults

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// anyPosition stands for K=*.
const anyPosition = -1

// maxDelay bounds D: a typing error should not look like a hang.
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

// A Plan says which faults are injected, how often, and from which seed. It does not change once
// parsed; safe for concurrent use.
type Plan struct {
	seed  uint64
	rules [numKinds]rule
}

// Parse reads a plan: words with a comma between them, each a fault with its argument (see [All]),
// or seed=S. An interval N strikes at exactly every Nth event, ~N at random with mean N. Without
// seed= one is chosen. The empty string is a plan without faults. Errors name the word.
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
			return nil, badWord(word, "it has the form name=argument")
		}
		if name == "seed" {
			seed, err := strconv.ParseUint(arg, 0, 64)
			if err != nil || seeded {
				return nil, badWord(word, "a seed is one number of 64 bits")
			}
			p.seed, seeded = seed, true
			continue
		}
		k, ok := lookup(name)
		if !ok {
			return nil, badWord(word, "there is no such fault")
		}
		if p.rules[k].on {
			return nil, badWord(word, "the fault is given twice")
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
	return fmt.Errorf("faults: bad word %q in the plan: %s; known are %s", word, why, known())
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
			return r, fmt.Errorf("its C is a number of 32 bits")
		}
		r.value = uint32(v)
		return r, nil
	}
	interval, rest, more := strings.Cut(arg, ":")
	interval, r.random = strings.CutPrefix(interval, "~")
	n, err := strconv.ParseUint(interval, 10, 64)
	if err != nil || n == 0 {
		return r, fmt.Errorf("its N is a number from 1, ~N for random intervals of that mean")
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
			err = fmt.Errorf("the argument is N alone")
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
		return 0, fmt.Errorf("its K is a position from 0, or * for any")
	}
	return int(k), nil
}

func parseDelay(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 || d > maxDelay {
		return 0, fmt.Errorf("its D is a duration like 20ms, at most %v", maxDelay)
	}
	return d, nil
}

// Empty tells that the plan has no faults.
func (p *Plan) Empty() bool {
	for i := range p.rules {
		if p.rules[i].on {
			return false
		}
	}
	return true
}

// Seed is what all decisions are drawn from.
func (p *Plan) Seed() uint64 { return p.seed }

// String is the whole plan with its seed: Parse of it repeats the run.
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

// attacks tells whether the plan has faults that post requests of their own.
func (p *Plan) attacks() bool {
	for _, k := range []kind{lateWrite, lateRead, staleKey, wildWrite} {
		if p.rules[k].on {
			return true
		}
	}
	return false
}

// strikes decides the event'th event of kind k, counted from 1: a pure function of the plan.
func (p *Plan) strikes(k kind, event uint64) bool {
	r := &p.rules[k]
	switch {
	case !r.on:
		return false
	case r.random:
		return p.draw(k, event, saltStrike)%r.every == 0
	}
	return event%r.every == 0
}

// Salts keep the draws for one event apart.
const (
	saltStrike uint64 = iota
	saltPlace
	saltVariant
)

// draw is a pseudo-random number that depends on nothing but the seed and its arguments
// (SplitMix64's finalizer over each).
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

// choose draws one of n.
func (p *Plan) choose(k kind, event, salt uint64, n int) int {
	return int(p.draw(k, event, salt) % uint64(n))
}
