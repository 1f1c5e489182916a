package beside

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var (
	roundsFlag = flag.Int("rounds", 1, "number of `rounds` of TestBeside; use 3 for docs/performance.md")
	onlyFlag   = flag.String("only", "", "`regexp` of the workloads of TestBeside")
)

// These lines enclose the results in docs/performance.md, for each provider and device.
const (
	pageFile  = "../../../docs/performance.md"
	pageBegin = "<!-- written by TestBeside in test/lab/beside, -rounds 3 -update: %s -->\n"
	pageEnd   = "<!-- end of %s -->\n"
)

// A measurement is one line of JSON that the program prints for one run of a workload.
type measurement struct {
	Workload, Side    string
	Round             int
	Seconds, CPU, MiB float64
}

// ratios are the ratios of a workload, one for each round.
type ratios []float64

func (r ratios) String() string {
	s := slices.Sorted(slices.Values(r))
	return fmt.Sprintf("%.2f (%.2f..%.2f)", (s[(len(s)-1)/2]+s[len(s)/2])/2, s[0], s[len(s)-1])
}

// table compares our client with the kernel's, round by round. Our client is better if the ratio of
// speeds is above 1, or the ratio of processor times below 1.
func table(list []measurement) (string, error) {
	var b strings.Builder
	b.WriteString("| workload | speed | processor time |\n|---|---|---|\n")
	var order []string
	type key struct {
		workload, side string
		round          int
	}
	by := make(map[key]measurement)
	rounds := 0
	for _, m := range list {
		if !slices.Contains(order, m.Workload) {
			order = append(order, m.Workload)
		}
		by[key{m.Workload, m.Side, m.Round}] = m
		rounds = max(rounds, m.Round+1)
	}
	for _, w := range order {
		var speed, cpu ratios
		for round := range rounds {
			k, o := by[key{w, "kernel", round}], by[key{w, "ours", round}]
			if k.Seconds <= 0 || o.Seconds <= 0 || k.CPU <= 0 || o.CPU <= 0 {
				return "", fmt.Errorf("%s, round %d: measurement missing: kernel %+v, ours %+v", w, round, k, o)
			}
			speed, cpu = append(speed, k.Seconds/o.Seconds), append(cpu, o.CPU/k.CPU)
		}
		fmt.Fprintf(&b, "| %s | %v | %v |\n", w, speed, cpu)
	}
	return b.String(), nil
}

// splice replaces the results of name in a page, or appends them.
func splice(page, name, text string) (string, error) {
	return kit.Splice(page, fmt.Sprintf(pageBegin, name), fmt.Sprintf(pageEnd, name), text)
}

// TestBeside measures the two clients alternately, on an export in the server's memory. It checks
// only that all workloads succeed. A routine run has only the large sequential workloads.
func TestBeside(t *testing.T) {
	s := start(t, lab.ExportFast)
	if *profileFlag {
		s.profile()
		return
	}
	if *onlyFlag == "" && !lab.FullRun() && !*updateFlag {
		*onlyFlag = "sequential .*, 1 MiB"
	}
	out, err := s.RunFor(fmt.Sprintf("program bench -kernel %s/kernel -ours %s/ours -rounds %d -only '%s'", kernelDir,
		oursDir, *roundsFlag, *onlyFlag), 30*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var list []measurement
	for line := range strings.Lines(out) {
		var m measurement
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("parse measurement %q: %v", line, err)
		}
		t.Logf("%-28s %-6s round %d: %6.2f s, %6.2f s processor time, %5.0f MiB", m.Workload, m.Side, m.Round,
			m.Seconds, m.CPU, m.MiB)
		list = append(list, m)
	}
	if len(list) == 0 {
		t.Fatalf("-only %q: no matching workload", *onlyFlag)
	}
	text, err := table(list)
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + text)
	if !*updateFlag {
		return
	}
	name := *providerFlag + " on " + *linkFlag
	if *optionsFlag != "" {
		name += ", " + *optionsFlag
	}
	head := fmt.Sprintf("### %s\n\nKernel %s in an emulated guest with %s virtual processors, %d rounds, %s.\n\n",
		name, strings.TrimSpace(s.must("uname -r")), strings.TrimSpace(
			s.must("nproc")), *roundsFlag, time.Now().UTC().Format(time.DateOnly))
	page, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	changed, err := splice(string(page), name, head+text)
	if err != nil {
		t.Fatal(err)
	}
	tmp := filepath.Join(filepath.Dir(pageFile), ".performance.md.new")
	if err := os.WriteFile(tmp, []byte(changed), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, pageFile); err != nil {
		t.Fatal(err)
	}
}

// profile writes CPU profiles of our daemon for several workloads.
func (s *sides) profile() {
	s.t.Helper()
	s.must("umount " + oursDir)
	s.mountOurs("program mount -profile /share/cpu")
	for i, w := range []string{"sequential write, 1 MiB", "sequential read, 1 MiB", "sequential write, 4 KiB",
		"random read, 4 KiB", "create"} {
		bench := fmt.Sprintf("program bench -kernel %s/kernel -ours %s/ours -side ours -rounds 1 -profiled $pid "+
			"-only '%s'", kernelDir, oursDir, w)
		s.must(fmt.Sprintf("pid=$(pidof program) && %s && "+
			"for i in $(seq 600); do [ -e /share/cpu%d ] && exit 0; sleep 0.1; done; exit 1", bench, i+1))
		from, to := filepath.Join(s.share, fmt.Sprintf("cpu%d", i+1)), filepath.Join(s.t.ArtifactDir(),
			strings.ReplaceAll(w, " ", "-")+".pprof")
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, data, 0o644)
		}
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Logf("profile of %s (kept with go test -artifacts): %s", w, to)
	}
}

// TestTable checks the table of results and its place in the page.
func TestTable(t *testing.T) {
	list := []measurement{{"a", "kernel", 0, 1, 2, 3}, {"a", "ours", 0, 2, 1, 3}, {"a", "ours", 1, 1, 2, 3},
		{"a", "kernel", 1, 1, 2, 3}, {"a", "kernel", 2, 4, 2, 3}, {"a", "ours", 2, 1, 8, 3}}
	got, err := table(list)
	if want := "| a | 1.00 (0.50..4.00) | 1.00 (0.50..4.00) |\n"; err != nil || !strings.HasSuffix(got, want) {
		t.Errorf("got table %q, error %v, want %q", got, err, want)
	}
	if _, err := table(list[:1]); err == nil {
		t.Error("table without a measurement: got no error")
	}
	page, err := splice("# Page\n", "x", "one\n")
	if err != nil {
		t.Fatal(err)
	}
	page += "after\n"
	if again, err := splice(page, "x", "two\n"); err != nil || !strings.Contains(again, "\ntwo\n") ||
		strings.Contains(again, "one") || !strings.HasSuffix(again, "after\n") {
		t.Errorf("got page %q, error %v", again, err)
	}
}
