package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
)

// A sample is one run of one workload on one target.
type sample struct {
	Target string `json:"target"`
	bench.Sample
}

// A round gives the samples of one round to the formulas of goals. The targets of a round run
// consecutively, so their ratios are better than those of medians.
type round struct {
	samples map[[2]string]*bench.Sample
	missing []string
}

// of returns a sample. If the sample is missing, of records this and returns an invalid one.
func (r *round) of(target, workload string) *bench.Sample {
	if s := r.samples[[2]string{target, workload}]; s != nil && s.Seconds > 0 && s.Calls > 0 {
		return s
	}
	r.missing = append(r.missing, target+": "+workload)
	return &bench.Sample{Seconds: 1, Calls: 1, Bytes: 1}
}

func (r *round) us(target, workload string) float64  { return r.of(target, workload).Micros() }
func (r *round) mib(target, workload string) float64 { return r.of(target, workload).MiB() }

// faster returns how many times faster a target is than another, call by call.
func (r *round) faster(target, than, workload string) float64 {
	return r.us(than, workload) / r.us(target, workload)
}

// cost returns the value of a watched process.
func (r *round) cost(target, workload, process string, value func(*bench.Sample, string) float64) float64 {
	s := r.of(target, workload)
	if _, ok := s.Processes[process]; !ok && s.Workload != "" {
		r.missing = append(r.missing, target+": "+workload+": process "+process)
	}
	return value(s, process)
}

// relayTime is what a READ of 4 KiB costs through the relay more than without it.
func (r *round) relayTime() float64 { return r.us(targetXR, call4K) - r.us(targetXP, call4K) }

// A goal is a bound for a value.
type goal struct {
	name  string
	most  bool // the value must be at most the bound, otherwise at least
	bound float64
	unit  string // "" for a ratio
	value func(r *round) float64
	once  bool // only round 0 has the value
}

// least and most return a goal for a ratio.
func least(bound float64, name string, value func(r *round) float64) goal {
	return goal{name: name, bound: bound, value: value}
}

func most(bound float64, name string, value func(r *round) float64) goal {
	return goal{name: name, bound: bound, most: true, value: value}
}

// goals returns all goals. D, R, F, T, S and P are the targets. The goals that compare with P use
// R, because both have the same server.
func goals() []goal {
	all := []goal{
		most(1.3, "READ 4 KiB without FUSE: time / T",
			func(r *round) float64 { return r.us(targetXD, call4K) / r.us(targetT, call4K) }),
		most(1, "D, "+bench.RandomRead+": time / (F + 1.5 T)", func(r *round) float64 {
			return r.us(targetD, bench.RandomRead) / (r.us(targetF, bench.RandomRead) + 1.5*r.us(targetT, call4K))
		}),
		most(1, "R, "+bench.RandomRead+": (time - relay) / P", func(r *round) float64 {
			return (r.us(targetR, bench.RandomRead) - r.relayTime()) / r.us(targetP, bench.RandomRead)
		}),
		least(0.7, "D, "+bench.RandomRead4+": speed / min(F, 4 T)", func(r *round) float64 {
			return max(r.us(targetF, bench.RandomRead4), r.us(targetT, call4K)/4) / r.us(targetD, bench.RandomRead4)
		}),
		least(1.5, "R, "+bench.RandomRead4+": speed / P",
			func(r *round) float64 { return r.faster(targetR, targetP, bench.RandomRead4) }),
	}
	for _, w := range []string{bench.Read1M, bench.Read4K} {
		all = append(all,
			least(0.8, "D, "+w+": speed / min(F, T, S)", func(r *round) float64 { return r.stream(w, callRead1M) }),
			least(1, "R, "+w+": speed / P", func(r *round) float64 { return r.faster(targetR, targetP, w) }))
	}
	all = append(all,
		least(0.7, "D, "+bench.Write1M+": speed / min(F, T, S)",
			func(r *round) float64 { return r.stream(bench.Write1M, callWrite1M) }),
		least(0.7, "D, "+bench.Write4K+": speed / F",
			func(r *round) float64 { return r.faster(targetD, targetF, bench.Write4K) }))
	for _, w := range []string{bench.Create, bench.Stat, bench.Rename, bench.Unlink} {
		all = append(all,
			least(1.5, "R, "+w+": speed / P", func(r *round) float64 { return r.faster(targetR, targetP, w) }))
	}
	for _, p := range largePrograms[1:] {
		g := most(2, "D, "+p.workload+": time / ls -l",
			func(r *round) float64 { return r.us(targetD, p.workload) / r.us(targetD, largeList) })
		g.once = true
		all = append(all, g)
	}
	return append(all,
		cost("context switches of the daemon", 2, "per call", daemonProcess, (*bench.Sample).Switches),
		cost("processor time of the daemon", 25, "us", daemonProcess, (*bench.Sample).CPU),
		cost("processor time of serve DIR", 30, "us", serverProcess, (*bench.Sample).CPU))
}

// cost returns the goal for what a random read on D costs a process.
func cost(name string, bound float64, unit, process string, of func(*bench.Sample, string) float64) goal {
	g := most(bound, "D, "+bench.RandomRead+": "+name,
		func(r *round) float64 { return r.cost(targetD, bench.RandomRead, process, of) })
	g.unit = unit
	return g
}

// stream compares a sequential workload of D with the slowest of F, T and S.
func (r *round) stream(workload, call string) float64 {
	return r.mib(targetD, workload) / min(r.mib(targetF, workload), r.mib(targetT, call), r.mib(targetXD, call))
}

// An outcome is the value of a goal in one run of TestBench.
type outcome struct {
	Name  string      `json:"name"`
	Most  bool        `json:"at_most"` // otherwise at least
	Bound float64     `json:"bound"`
	Unit  string      `json:"unit,omitempty"`
	Value bench.Range `json:"value"` // of the rounds
	Met   bool        `json:"met"`   // by the median
}

func (o *outcome) bound() string {
	sign := ">="
	if o.Most {
		sign = "<="
	}
	return fmt.Sprintf("%s %s", sign, bench.Digits(o.Bound))
}

func (o *outcome) verdict() string {
	if o.Met {
		return "met"
	}
	return "not met"
}

// evaluate returns the outcomes of all goals. Each needs its samples in all rounds.
func evaluate(goals []goal, samples []sample) ([]outcome, error) {
	rounds := make(map[int]*round)
	for i := range samples {
		s := &samples[i]
		if rounds[s.Run] == nil {
			rounds[s.Run] = &round{samples: make(map[[2]string]*bench.Sample)}
		}
		rounds[s.Run].samples[[2]string{s.Target, s.Workload}] = &s.Sample
	}
	if rounds[0] == nil {
		return nil, errors.New("no samples of round 0")
	}
	all := make([]outcome, 0, len(goals))
	var missing []string
	for _, g := range goals {
		var values []float64
		for n, r := range rounds {
			if g.once && n != 0 {
				continue
			}
			values = append(values, g.value(r))
			missing, r.missing = append(missing, r.missing...), nil
		}
		o := outcome{Name: g.name, Most: g.most, Bound: g.bound, Unit: g.unit, Value: bench.RangeOf(values)}
		o.Met = o.Value.Median >= g.bound
		if g.most {
			o.Met = o.Value.Median <= g.bound
		}
		all = append(all, o)
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return nil, fmt.Errorf("samples missing: %s", strings.Join(slices.Compact(missing), "; "))
	}
	return all, nil
}
