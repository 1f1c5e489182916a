package bench

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"text/tabwriter"
)

// A Sample is one run of one workload.
type Sample struct {
	Workload  string  `json:"workload"`
	Run       int     `json:"run"`
	Callers   int     `json:"callers"`
	Seconds   float64 `json:"seconds"`
	Calls     int     `json:"calls"`
	Bytes     int64   `json:"bytes,omitempty"`
	Processes Usages  `json:"processes,omitempty"`
}

// Micros returns the time of the run in microseconds, divided by the calls of all callers.
func (s *Sample) Micros() float64 { return s.Seconds * 1e6 / float64(s.Calls) }

// MiB returns the MiB per second, 0 without data.
func (s *Sample) MiB() float64 { return float64(s.Bytes) / (1 << 20) / s.Seconds }

// CPU returns the microseconds of processor time of a watched process for each call.
func (s *Sample) CPU(process string) float64 {
	return s.Processes[process].Seconds * 1e6 / float64(s.Calls)
}

// Switches returns the voluntary context switches of a watched process for each call.
func (s *Sample) Switches(process string) float64 {
	return float64(s.Processes[process].Switches) / float64(s.Calls)
}

// A Range has the median and the extremes of several runs.
type Range struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// RangeOf returns the Range of values, of which there must be one or more.
func RangeOf(values []float64) Range {
	s := slices.Sorted(slices.Values(values))
	return Range{(s[(len(s)-1)/2] + s[len(s)/2]) / 2, s[0], s[len(s)-1]}
}

// String returns the median and the extremes with three digits.
func (r Range) String() string {
	return fmt.Sprintf("%s (%s..%s)", Digits(r.Median), Digits(r.Min), Digits(r.Max))
}

// Digits formats a value with about three digits.
func Digits(v float64) string {
	switch a := math.Abs(v); {
	case a >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case a >= 9.995:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// A Result has the runs of one workload.
type Result struct {
	Workload string `json:"workload"`
	Callers  int    `json:"callers"`
	Runs     int    `json:"runs"`
	Micros   Range  `json:"us_per_call"`
	// MiB is nil for workloads without data, and for create.
	MiB       *Range          `json:"mib_per_second,omitempty"`
	Processes map[string]Cost `json:"processes,omitempty"`
}

// A Cost is what a process used for each call.
type Cost struct {
	CPU      Range `json:"cpu_us_per_call"`
	Switches Range `json:"voluntary_context_switches_per_call"`
}

// Summarize returns one Result for each workload, in the order of the samples.
func Summarize(samples []Sample) []Result {
	var results []Result
	by := make(map[string][]Sample)
	for _, s := range samples {
		if by[s.Workload] == nil {
			results = append(results, Result{Workload: s.Workload, Callers: s.Callers})
		}
		by[s.Workload] = append(by[s.Workload], s)
	}
	for i := range results {
		r := &results[i]
		runs := by[r.Workload]
		of := func(value func(*Sample) float64) Range {
			values := make([]float64, len(runs))
			for i := range runs {
				values[i] = value(&runs[i])
			}
			return RangeOf(values)
		}
		r.Runs, r.Micros = len(runs), of((*Sample).Micros)
		if runs[0].Bytes > 0 && r.Workload != Create {
			mib := of((*Sample).MiB)
			r.MiB = &mib
		}
		for name := range runs[0].Processes {
			if r.Processes == nil {
				r.Processes = make(map[string]Cost)
			}
			r.Processes[name] = Cost{of(func(s *Sample) float64 { return s.CPU(name) }),
				of(func(s *Sample) float64 { return s.Switches(name) })}
		}
	}
	return results
}

// WriteTable writes results as a table of at most 80 columns.
func WriteTable(w io.Writer, results []Result) error {
	var processes []string
	for _, r := range results {
		processes = slices.AppendSeq(processes, maps.Keys(r.Processes))
	}
	slices.Sort(processes)
	processes = slices.Compact(processes)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprint(t, "WORKLOAD\tus/call\t(range)\tMiB/s")
	for range processes {
		fmt.Fprint(t, "\tCPU us\tswitches")
	}
	fmt.Fprintln(t)
	for _, r := range results {
		mib := "-"
		if r.MiB != nil {
			mib = Digits(r.MiB.Median)
		}
		fmt.Fprintf(t, "%s\t%s\t%s..%s\t%s", r.Workload, Digits(r.Micros.Median), Digits(r.Micros.Min),
			Digits(r.Micros.Max), mib)
		for _, name := range processes {
			c := r.Processes[name]
			fmt.Fprintf(t, "\t%s\t%s", Digits(c.CPU.Median), Digits(c.Switches.Median))
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}
