package bench

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var (
	fullFlag    = flag.Bool("full", false, "measure with full sizes, and print the results")
	outFlag     = flag.String("out", "", "write the results of TestBench to `DIR`")
	roundsFlag  = flag.Int("rounds", 3, "number of `rounds` with -full")
	sizeFlag    = flag.Int64("size", 256, "size of the file for data with -full, in `MiB`")
	timeFlag    = flag.Duration("time", 600*time.Millisecond, "maximum time of one measurement with -full")
	filesFlag   = flag.Int("files", 1000, "maximum number of files that create makes with -full")
	entriesFlag = flag.Int("entries", 200000, "number of files in the large directory with -full")
)

// A config has the sizes of a run of TestBench.
type config struct {
	Rounds  int           `json:"rounds"`
	Size    int64         `json:"size_bytes"`
	Time    time.Duration `json:"time_ns"` // of one measurement
	Files   int           `json:"files"`
	Entries int           `json:"large_directory_files"`
}

// A report is the file bench.json.
type report struct {
	Date       string       `json:"date"`
	Kernel     string       `json:"kernel"`
	Processors int          `json:"processors"`
	Config     config       `json:"config"`
	Caches     bench.Caches `json:"caches"`
	Goals      []outcome    `json:"goals"`
	Samples    []sample     `json:"samples"`
}

// totalTimeout bounds the measurements of TestBench.
const totalTimeout = 10 * time.Minute

// TestBench measures all targets alternately. Without -full it checks only that all figures exist.
func TestBench(t *testing.T) {
	kit.NeedsFUSE(t)
	kit.NeedsPrograms(t, "gcc")
	cfg := config{Rounds: 1, Size: 2 << 20, Time: 20 * time.Millisecond, Files: 10, Entries: 50}
	if *fullFlag {
		cfg = config{*roundsFlag, *sizeFlag << 20, *timeFlag, *filesFlag, *entriesFlag}
	}
	r := newRig(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), totalTimeout)
	defer cancel()
	rep := &report{Date: time.Now().UTC().Format(time.DateOnly), Kernel: bench.Kernel(), Processors: runtime.NumCPU(),
		Config: cfg, Caches: r.targets[0].dir.Caches()}
	r.warmUp(ctx)
	for n := range cfg.Rounds {
		rep.Samples = append(rep.Samples, r.round(ctx, n)...)
	}
	var err error
	if rep.Goals, err = evaluate(goals(), rep.Samples); err != nil {
		t.Fatal(err)
	}
	checkComplete(t, r, rep)
	dir := *outFlag
	if dir == "" {
		dir = t.TempDir()
	}
	rep.write(t, dir)
	if *fullFlag {
		t.Logf("results in %s:\n%s", dir, rep.text())
	}
}

// warmUp makes each target start its connections, threads and pools.
func (r *rig) warmUp(ctx context.Context) {
	r.t.Helper()
	for _, w := range bench.Workloads() {
		if w.Name != bench.RandomRead4 {
			continue
		}
		for _, target := range r.targets {
			if _, err := target.dir.Run(ctx, w); err != nil {
				r.t.Fatalf("%s: %v", target.name, err)
			}
		}
	}
}

// round measures all workloads on all targets once, and the large directory in round 0. The order
// of the targets changes between rounds, so that no target is always the first.
func (r *rig) round(ctx context.Context, n int) (all []sample) {
	r.t.Helper()
	add := func(target string, s bench.Sample, err error) {
		r.t.Helper()
		if err != nil {
			r.t.Fatalf("%s: %v", target, err)
		}
		s.Run = n
		all = append(all, sample{target, s})
	}
	targets := slices.Clone(r.targets)
	names := []string{targetT, targetXD, targetXR, targetXP}
	if n%2 != 0 {
		slices.Reverse(targets)
		slices.Reverse(names)
	}
	for _, w := range bench.Workloads() {
		if *fullFlag {
			r.t.Logf("round %d: %s", n+1, w.Name)
		}
		for _, target := range targets {
			s, err := target.dir.Run(ctx, w)
			add(target.name, s, err)
		}
	}
	for _, p := range largePrograms {
		if n == 0 { // takes long
			s, err := r.list(ctx, p)
			add(targetD, s, err)
		}
	}
	for i := range r.calls[targetT] {
		for _, name := range names {
			s, err := r.call(ctx, r.calls[name][i])
			add(name, s, err)
		}
	}
	return all
}

// checkComplete checks that every figure exists and is positive.
func checkComplete(t *testing.T, r *rig, rep *report) {
	t.Helper()
	found := make(map[[2]string]int)
	for _, s := range rep.Samples {
		found[[2]string{s.Target, s.Workload}]++
		if s.Seconds <= 0 || s.Calls <= 0 {
			t.Errorf("%s, %s: got %+v", s.Target, s.Workload, s.Sample)
		}
		for name, u := range s.Processes {
			// Caches of the client can answer find and ls -l without the server.
			if u.Seconds <= 0 && (name == daemonProcess || s.Workload == bench.RandomRead) {
				t.Errorf("%s, %s: got no processor time of %s", s.Target, s.Workload, name)
			}
		}
	}
	check := func(target, workload string, want int) {
		if n := found[[2]string{target, workload}]; n != want {
			t.Errorf("%s, %s: got %d samples, want %d", target, workload, n, want)
		}
	}
	for _, target := range r.targets {
		for _, w := range bench.Workloads() {
			check(target.name, w.Name, rep.Config.Rounds)
		}
		if !target.dir.Direct() {
			t.Errorf("%s: random reads did not use O_DIRECT", target.name)
		}
	}
	for _, p := range largePrograms {
		check(targetD, p.workload, 1)
	}
	for name, list := range r.calls {
		for _, c := range list {
			check(name, c.Workload, rep.Config.Rounds)
		}
	}
}

// write writes bench.json, bench.txt and the pictures to dir.
func (rep *report) write(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	text, err := json.MarshalIndent(rep, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"bench.json": text, "bench.txt": []byte(rep.text())} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := rep.draw(dir); err != nil {
		t.Fatal(err)
	}
}
