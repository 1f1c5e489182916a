package bench

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// tiny are Options for a test of the order of the workloads, not of a speed.
func tiny(dir string) Options {
	return Options{Path: dir, Size: 2 << 20, Time: 20 * time.Millisecond, Files: 20}
}

// checkEmpty checks that a directory is empty.
func checkEmpty(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("got %v, %v in the directory, want nothing", left, err)
	}
}

func TestMeasureRunsAllWorkloads(t *testing.T) {
	dir := t.TempDir()
	o := tiny(dir)
	o.Watch = Processes{Daemon: os.Getpid()}
	shown := 0
	r, err := Measure(t.Context(), o, 2, func(int, string) { shown++ })
	kit.Must(t, err)
	checkEmpty(t, dir)
	if len(r.Results) != len(workloads) || len(r.Samples) != 2*len(workloads) || shown != len(r.Samples) {
		t.Errorf("got %d results, %d samples, progress for %d", len(r.Results), len(r.Samples), shown)
	}
	for i, s := range r.Samples {
		if w := workloads[i%len(workloads)]; s.Workload != w.Name || s.Callers != w.Callers || s.Seconds <= 0 ||
			s.Calls <= 0 || s.Run != i/len(workloads) {
			t.Errorf("sample %d: got %+v, want a run of %s", i, s, w.Name)
		}
		if s.Processes[Daemon].Seconds <= 0 {
			t.Errorf("%s: got no processor time", s.Workload)
		}
		if s.Callers > 1 && s.Processes[Daemon].Switches == 0 {
			t.Errorf("%s: got no context switches of %d callers", s.Workload, s.Callers)
		}
		if data := strings.Contains(s.Workload, "iB"); data != (s.Bytes > 0) && s.Workload != Create {
			t.Errorf("%s: got %d bytes", s.Workload, s.Bytes)
		}
	}
	if r.FileSystem == "" || r.Source == "" || r.Kernel == "" || r.Caches.Data == "" || r.Caches.Names == "" ||
		r.Daemon != os.Getpid() || r.Size != 2<<20 || r.Files != 20 || r.Runs != 2 {
		t.Errorf("got %+v, want all fields", r)
	}
}

// TestWorkloadsRunAlone runs each workload in a new directory, so that none needs an earlier one.
func TestWorkloadsRunAlone(t *testing.T) {
	for _, w := range Workloads() {
		t.Run(w.Name, func(t *testing.T) {
			dir := t.TempDir()
			d, err := Open(tiny(dir))
			if err != nil {
				t.Fatal(err)
			}
			if s, err := d.Run(t.Context(), w); err != nil || s.Calls == 0 {
				t.Errorf("got %+v, %v", s, err)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			checkEmpty(t, dir)
		})
	}
}

// TestTimeLimit checks that a measurement ends in time, also if its work is not complete, and that
// the next workloads use what is there.
func TestTimeLimit(t *testing.T) {
	d, err := Open(Options{Path: t.TempDir(), Size: 64 << 20, Time: time.Nanosecond, Files: 10_000})
	kit.Must(t, err)
	defer d.Close()
	for _, w := range workloads {
		if s, err := d.Run(t.Context(), w); err != nil || s.Calls != w.Callers {
			t.Errorf("%s: got %+v, %v; want one call of each caller", w.Name, s, err)
		}
	}
}

// TestListInParts lists a directory of three parts.
func TestListInParts(t *testing.T) {
	o := tiny(t.TempDir())
	want := 2*listBatch + 1
	o.Files, o.Time = want, time.Minute
	d, err := Open(o)
	kit.Must(t, err)
	defer d.Close()
	for _, w := range workloads {
		if w.Name != List && w.Name != Find {
			continue
		}
		if s, err := d.Run(t.Context(), w); err != nil || s.Calls != want {
			t.Errorf("%s: got %+v, %v; want %d calls", w.Name, s, err, want)
		}
	}
}

// TestInterruptRemovesFiles ends the context before each of the workloads.
func TestInterruptRemovesFiles(t *testing.T) {
	for i, w := range workloads {
		dir := t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		_, err := Measure(ctx, tiny(dir), 1, func(int, string) {
			if n++; n > i {
				cancel()
			}
		})
		cancel()
		if !errors.Is(err, context.Canceled) || n != i+1 {
			t.Errorf("interrupt of %s: got %v after %d workloads, want context.Canceled after %d", w.Name, err, n, i+1)
		}
		checkEmpty(t, dir)
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	file := dir + "/file"
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		o    Options
		want error
	}{
		{"missing", tiny(dir + "/none"), fs.ErrNotExist},
		{"file", tiny(file), unix.ENOTDIR},
		{"size", Options{Path: dir, Size: 5000}, nil},
		{"files", Options{Path: dir, Files: MaxFiles + 1}, nil},
	} {
		if _, err := Open(tt.o); err == nil || tt.want != nil && !errors.Is(err, tt.want) {
			t.Errorf("%s: got error %v, want %v", tt.name, err, tt.want)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("got %v, %v in the directory, want one file", left, err)
	}
}

func TestUsageOfMissingProcess(t *testing.T) {
	if u, err := (Processes{"none": 1 << 22}).Usage(); err == nil {
		t.Errorf("got %v, want an error", u)
	}
}

func TestSummarize(t *testing.T) {
	run := func(seconds, cpu float64, switches uint64) Sample {
		return Sample{Workload: "w", Callers: 1, Seconds: seconds, Calls: 1000, Bytes: 4 << 20,
			Processes: Usages{"daemon": {cpu, switches}}}
	}
	got := Summarize([]Sample{run(1, .03, 2000), {Workload: "names", Callers: 1, Seconds: 2, Calls: 4},
		run(4, .01, 4000), run(2, .02, 3000)})
	if len(got) != 2 || got[0].Workload != "w" || got[1].Workload != "names" {
		t.Fatalf("got %+v, want the results of w and names", got)
	}
	w, names := got[0], got[1]
	if w.Micros != (Range{2000, 1000, 4000}) || *w.MiB != (Range{2, 1, 4}) || w.Runs != 3 {
		t.Errorf("got %+v, MiB %v", w, *w.MiB)
	}
	if c := w.Processes["daemon"]; c.CPU != (Range{20, 10, 30}) || c.Switches != (Range{3, 2, 4}) {
		t.Errorf("got cost %+v", c)
	}
	if names.Micros.Median != 500000 || names.MiB != nil || names.Processes != nil {
		t.Errorf("got %+v", names)
	}
	var b strings.Builder
	if err := WriteTable(&b, got); err != nil {
		t.Fatal(err)
	}
	want := `WORKLOAD  us/call  (range)         MiB/s  CPU us  switches
w         2000     1000..4000      2.00   20.0    3.00
names     500000   500000..500000  -      0.00    0.00
`
	if b.String() != want {
		t.Errorf("got table\n%swant\n%s", b.String(), want)
	}
}

func TestRangeOfEvenNumber(t *testing.T) {
	if got := RangeOf([]float64{4, 1, 3, 2}); got != (Range{2.5, 1, 4}) || got.String() != "2.50 (1.00..4.00)" {
		t.Errorf("got %v", got)
	}
}
