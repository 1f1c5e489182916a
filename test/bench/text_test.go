package bench

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var updateFlag = flag.Bool("update", false, "make TestPage write docs/performance.md from the file of -results")

var resultsFlag = flag.String("results", "../../bin/bench/results/bench.json", "`FILE` for TestPage -update")

// The results in docs/performance.md are between these lines.
const (
	pageFile   = "../../docs/performance.md"
	pictureDir = "../../docs/bench"
	pageBegin  = "<!-- written by go test ./test/bench -run TestPage -update -->\n"
	pageEnd    = "<!-- end of make bench -->\n"
)

// A table has a title, and a head and rows of cells.
type table struct {
	title string
	rows  [][]string // the first one is the head
}

// results finds the samples of a workload on a target.
func (rep *report) results(target, workload string) (list []*bench.Sample) {
	for i := range rep.Samples {
		if s := &rep.Samples[i]; s.Target == target && s.Workload == workload {
			list = append(list, &s.Sample)
		}
	}
	return list
}

// of returns the range of a value over the rounds, and false without samples.
func (rep *report) of(target, workload string, value func(*bench.Sample) float64) (bench.Range, bool) {
	list := rep.results(target, workload)
	values := make([]float64, len(list))
	for i, s := range list {
		values[i] = value(s)
	}
	if len(values) == 0 {
		return bench.Range{}, false
	}
	return bench.RangeOf(values), true
}

// none is the text of a cell without samples.
const none = "-"

// cell formats a range.
func (rep *report) cell(target, workload string, value func(*bench.Sample) float64) string {
	r, ok := rep.of(target, workload, value)
	if !ok {
		return none
	}
	return r.String()
}

// ratio formats how many times faster a target is than another, from the ratios of the rounds.
func (rep *report) ratio(target, than, workload string) string {
	a, b := rep.results(target, workload), rep.results(than, workload)
	values := make([]float64, min(len(a), len(b)))
	for i := range values {
		values[i] = b[i].Micros() / a[i].Micros()
	}
	if len(values) == 0 {
		return none
	}
	return bench.RangeOf(values).String()
}

// directories are the targets on which the workloads of internal/bench run.
var directories = []string{targetF, targetS, targetP, targetD, targetR}

// callTargets are the targets of the other calls.
var callTargets = []string{targetT, targetXD, targetXR, targetXP}

// Titles of the tables of docs/performance.md. The page has pictures of the goals and of the
// processor times, and the rates and ratios follow from the times.
const (
	timesTitle   = "Time of a call in us"
	withoutTitle = "Calls without FUSE: time of a call in us"
)

// tables returns all tables of a report.
func (rep *report) tables() []table {
	goals := table{"Goals", [][]string{{"goal", "bound", "value", "result"}}}
	for i := range rep.Goals {
		o := &rep.Goals[i]
		goals.rows = append(goals.rows, []string{o.Name, strings.TrimSpace(o.bound() + " " + o.Unit), o.Value.String(),
			o.verdict()})
	}
	times := table{timesTitle, [][]string{append([]string{"workload"}, directories...)}}
	rates := table{"MiB/s", [][]string{append([]string{"workload"}, directories...)}}
	ratios := table{"Speed, as a ratio", [][]string{{"workload", "D / F", "R / F", "R / P"}}}
	costs := table{"Processor time of a call in us (voluntary context switches)", [][]string{{"workload",
		"F", "P", "D", "R", "serve DIR (D)", "relay (R)", "Ganesha (P)"}}}
	for _, w := range bench.Workloads() {
		var us, mib []string
		for _, name := range directories {
			us = append(us, rep.cell(name, w.Name, (*bench.Sample).Micros))
			mib = append(mib, rep.cell(name, w.Name, (*bench.Sample).MiB))
		}
		times.rows = append(times.rows, append([]string{w.Name}, us...))
		if strings.HasPrefix(w.Name, "sequential") {
			rates.rows = append(rates.rows, append([]string{w.Name}, mib...))
		}
		ratios.rows = append(ratios.rows, []string{w.Name, rep.ratio(targetD, targetF, w.Name),
			rep.ratio(targetR, targetF, w.Name), rep.ratio(targetR, targetP, w.Name)})
		cost := func(target, process string) string {
			cpu, _ := rep.of(target, w.Name, func(s *bench.Sample) float64 { return s.CPU(process) })
			switches, _ := rep.of(target, w.Name, func(s *bench.Sample) float64 { return s.Switches(process) })
			return fmt.Sprintf("%s (%s)", bench.Digits(cpu.Median), bench.Digits(switches.Median))
		}
		costs.rows = append(costs.rows, []string{w.Name, cost(targetF, daemonProcess), cost(targetP, daemonProcess),
			cost(targetD, daemonProcess), cost(targetR, daemonProcess), cost(targetD, serverProcess),
			cost(targetR, serverProcess), cost(targetP, ganeshaProcess)})
	}
	large := table{"Large directory: time of an entry in us", [][]string{{"program", targetD}}}
	for _, p := range largePrograms {
		large.rows = append(large.rows, []string{p.workload, rep.cell(targetD, p.workload, (*bench.Sample).Micros)})
	}
	without := table{withoutTitle, [][]string{append([]string{"call"}, callTargets...)}}
	for _, w := range []string{call4K, callRead1M, callWrite1M} {
		row := []string{w}
		for _, name := range callTargets {
			row = append(row, rep.cell(name, w, (*bench.Sample).Micros))
		}
		without.rows = append(without.rows, row)
	}
	return []table{goals, times, large, rates, without, ratios, costs}
}

// head describes the run in one sentence.
func (rep *report) head() string {
	c := rep.Config
	return fmt.Sprintf("Linux %s, %d processors, %s. Files of %d MiB, at most %v for each measurement, at most %d "+
		"files, %d files in the large directory. Values are the median of %d rounds and their range.", rep.Kernel,
		rep.Processors, rep.Date, c.Size>>20, c.Time, c.Files, c.Entries, c.Rounds)
}

// text returns the report for a terminal.
func (rep *report) text() string {
	var b strings.Builder
	b.WriteString(rep.head() + "\n")
	for _, t := range rep.tables() {
		fmt.Fprintf(&b, "\n%s\n\n", t.title)
		w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
		for _, row := range t.rows {
			fmt.Fprintln(w, strings.Join(row, "\t"))
		}
		w.Flush()
	}
	return b.String()
}

// markdown returns the report for docs/performance.md.
func (rep *report) markdown() string {
	var b strings.Builder
	b.WriteString(wrap(rep.head()) + "\n")
	for _, t := range rep.tables() {
		if t.title != timesTitle && t.title != withoutTitle {
			continue
		}
		fmt.Fprintf(&b, "\n%s:\n\n", t.title)
		for i, row := range t.rows {
			b.WriteString("| " + strings.Join(row, " | ") + " |\n")
			if i == 0 {
				b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
			}
		}
	}
	return b.String()
}

// wrap breaks text at 100 columns.
func wrap(text string) string {
	var b strings.Builder
	n := 0
	for _, word := range strings.Fields(text) {
		if n > 0 && n+1+len(word) > 100 {
			b.WriteString("\n")
			n = 0
		}
		if n > 0 {
			b.WriteString(" ")
			n++
		}
		b.WriteString(word)
		n += len(word)
	}
	return b.String()
}

// TestPage writes the results and the pictures of docs/performance.md with -update.
func TestPage(t *testing.T) {
	if !*updateFlag {
		t.Skip("writes docs/performance.md; needs -update")
	}
	text, err := os.ReadFile(*resultsFlag)
	if err != nil {
		t.Fatalf("%v; run make bench first", err)
	}
	rep := &report{}
	kit.Must(t, json.Unmarshal(text, rep))
	page, err := os.ReadFile(pageFile)
	kit.Must(t, err)
	changed, err := kit.Splice(string(page), pageBegin, pageEnd, rep.markdown())
	kit.Must(t, err)
	kit.Must(t, rep.draw(pictureDir))
	kit.Must(t, os.WriteFile(pageFile, []byte(changed), 0o644))
}
