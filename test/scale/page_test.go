package scale

import (
	"encoding/json"
	"flag"
	"fmt"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var (
	updateFlag  = flag.Bool("update", false, "make TestPage write docs/scale.md and its pictures from -results")
	resultsFlag = flag.String("results", "../../bin/scale", "`DIR` with scale.json and fleet.json")
)

// The results in docs/scale.md are between these lines.
const (
	pageFile   = "../../docs/scale.md"
	pictureDir = "../../docs/scale"
	pageBegin  = "<!-- written by make scale -->\n"
	pageEnd    = "<!-- end of make scale -->\n"
)

// A simulation is one result of TestFleet of pkg/xprt, which describes the fields.
type simulation struct {
	Fleet, Policy       string
	Clients             int
	Alone               bool
	Outage              float64
	Attempts, SYNs      int
	PerSecond           []int
	Peak, Burst         int
	Mean, P50, P99, Max float64
}

// results are everything that the page shows.
type results struct {
	report
	fleet []simulation
}

// pictures are the simulations that have a picture, by the name of its file.
var pictures = []struct{ file, fleet string }{
	{"restart.png", "restart, 1 s"},
	{"outage.png", "2 min, connects refused"},
}

// Names of policies in TestFleet.
const (
	policyBefore = "before"
	policyAfter  = "after"
)

// capacity is the number of handshakes per second of the simulated server of 10,000 clients.
const capacity = 500

func table(b *strings.Builder, title string, head string, rows [][]string) {
	cells := strings.Split(head, "|")
	fmt.Fprintf(b, "\n%s\n\n| %s |\n%s|\n", title, strings.Join(cells, " | "), strings.Repeat("|---", len(cells)))
	for _, row := range rows {
		fmt.Fprintf(b, "| %s |\n", strings.Join(row, " | "))
	}
}

func seconds(s float64) string { return fmt.Sprintf("%.1f", s) }

func mib(bytes float64) string { return fmt.Sprintf("%.1f", bytes/(1<<20)) }

// cells returns the memory, descriptors, threads, goroutines and processor time.
func (u *usage) cells() []string {
	return []string{mib(float64(u.Resident)), fmt.Sprint(u.Descriptors), fmt.Sprint(u.Threads),
		fmt.Sprint(u.Goroutines), fmt.Sprintf("%.2f", 100*u.CPU)}
}

// markdown returns the part of the page that the results determine.
func (r *results) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Linux %s, %d processors, %s.\n", r.Kernel, r.Processors, r.Date)
	var fleet, alone, runs, recoveries [][]string
	for _, s := range r.fleet {
		per := fmt.Sprintf("%.1f", float64(s.Attempts)/float64(s.Clients))
		if s.Alone {
			alone = append(alone, []string{seconds(s.Outage), s.Policy, per, seconds(s.Mean), seconds(s.P50),
				seconds(s.P99)})
			continue
		}
		fleet = append(fleet, []string{s.Fleet, s.Policy, per, fmt.Sprint(s.Peak), fmt.Sprint(s.Burst), seconds(s.Mean),
			seconds(s.P50), seconds(s.P99), seconds(s.Max)})
	}
	for i := range r.Runs {
		u := &r.Runs[i]
		row := append([]string{fmt.Sprintf("%d × %d", u.Mounts, u.NConnect), fmt.Sprint(u.ConnectRate),
			fmt.Sprintf("%.2f", u.Seconds)}, u.Daemon.cells()...)
		row = append(row, fmt.Sprint(u.Helpers), mib(float64(u.HelperBytes)))
		server := u.Server.cells()
		runs = append(runs, append(row, server[0], server[1], server[4]))
	}
	for _, v := range r.Recoveries {
		recoveries = append(recoveries, []string{fmt.Sprintf("%d × %d", v.Mounts, v.NConnect), seconds(v.Down),
			bench.RangeOf(v.Seconds).String()})
	}
	table(&b, "Clients of a restarted server, simulated. The outage begins at 0; recovery is counted from its end:",
		"event|pauses|connects per client|most in 1 s|most in 10 ms|recovery, mean s|p50|p99|longest", fleet)
	table(&b, "One client, simulated, with outages of 0 to the given time:",
		"outage up to s|pauses|connects|recovery, mean s|p50|p99", alone)
	table(&b, "One daemon and `serve DIR`, measured. \"Mounts × nconnect\" were requested at once. %CPU is the\n"+
		"processor time of idle mounts with the default `keepalive=10`, in percent of one processor:",
		"mounts × nconnect|connect_rate|seconds to mount|daemon: MiB|descriptors|threads|goroutines|%CPU|"+
			"helper processes|MiB|server: MiB|descriptors|%CPU", runs)
	table(&b, "Differences of the table above:",
		"cost|daemon: MiB|descriptors|goroutines|server: MiB|descriptors|helpers: MiB", r.differences())
	table(&b, "Restarts of `serve DIR` by SIGKILL, measured: time from the start of the next server until\nall "+
		"connections are made, median and range:", "mounts × nconnect|seconds without server|seconds", recoveries)
	return b.String()
}

// differences returns the cost of a further mount and of a further connection.
func (r *results) differences() (rows [][]string) {
	find := func(mounts, nconnect int) *run {
		i := slices.IndexFunc(r.Runs, func(u run) bool {
			return u.Mounts == mounts && u.NConnect == nconnect && u.ConnectRate != 0
		})
		if i < 0 {
			return nil
		}
		return &r.Runs[i]
	}
	for _, d := range []struct {
		name       string
		more, less [2]int
		number     int // of mounts or connections by which they differ
	}{
		{"mount with one connection, the first 64", [2]int{64, 1}, [2]int{0, 1}, 64},
		{"mount with one connection, the next 192", [2]int{256, 1}, [2]int{64, 1}, 192},
		{"further connection of a mount", [2]int{64, 4}, [2]int{64, 1}, 192},
	} {
		a, b := find(d.more[0], d.more[1]), find(d.less[0], d.less[1])
		if a == nil || b == nil {
			continue
		}
		n := float64(d.number)
		rows = append(rows, []string{d.name,
			fmt.Sprintf("%.2f", float64(a.Daemon.Resident-b.Daemon.Resident)/n/(1<<20)),
			fmt.Sprintf("%.1f", float64(a.Daemon.Descriptors-b.Daemon.Descriptors)/n),
			fmt.Sprintf("%.1f", float64(a.Daemon.Goroutines-b.Daemon.Goroutines)/n),
			fmt.Sprintf("%.2f", float64(a.Server.Resident-b.Server.Resident)/n/(1<<20)),
			fmt.Sprintf("%.1f", float64(a.Server.Descriptors-b.Server.Descriptors)/n),
			fmt.Sprintf("%.2f", float64(a.HelperBytes-b.HelperBytes)/n/(1<<20))})
	}
	return rows
}

// draw writes the pictures to dir.
func (r *results) draw(dir string) error {
	for _, picture := range pictures {
		p := plot.New()
		p.Title.Text = "Connects per second, " + picture.fleet
		p.X.Label.Text, p.Y.Label.Text = "seconds after the loss of all connections", "connects"
		p.Y.Scale, p.Y.Tick.Marker, p.Y.Min = plot.LogScale{}, plot.LogTicks{Prec: -1}, 1
		p.Legend.Top = true
		last := 0
		for _, s := range r.fleet {
			if s.Fleet != picture.fleet {
				continue
			}
			last = max(last, len(s.PerSecond))
			if err := addLine(p, &s); err != nil {
				return err
			}
		}
		limit, err := plotter.NewLine(plotter.XYs{{X: 0, Y: capacity}, {X: float64(last), Y: capacity}})
		if err != nil {
			return err
		}
		limit.Dashes, limit.Color = []vg.Length{4, 4}, color.Gray{Y: 0x80}
		p.Add(limit)
		p.Legend.Add("handshakes of the server", limit)
		p.Y.Max = 2e4
		p.X.Tick.Marker = plot.TickerFunc(func(lo, hi float64) (ticks []plot.Tick) {
			for x := lo; x <= hi; x += 10 {
				ticks = append(ticks, plot.Tick{Value: x, Label: fmt.Sprint(x)})
			}
			return ticks
		})
		if err := p.Save(9*vg.Inch, 3.5*vg.Inch, filepath.Join(dir, picture.file)); err != nil {
			return err
		}
	}
	return nil
}

// addLine adds the connects of s in each second. A second without connects is at the bottom.
func addLine(p *plot.Plot, s *simulation) error {
	var points plotter.XYs
	for i, n := range s.PerSecond {
		points = append(points, plotter.XY{X: float64(i), Y: max(float64(n), 1)})
	}
	points = append(points, plotter.XY{X: float64(len(points)), Y: 1})
	line, err := plotter.NewLine(points)
	if err != nil {
		return err
	}
	line.StepStyle, line.Width = plotter.PostStep, vg.Points(1)
	line.Color = color.RGBA{0xe6, 0x9f, 0x00, 0xff} // colors that differ also without red or green
	if s.Policy == policyAfter {
		line.Color, line.Width = color.RGBA{0x00, 0x72, 0xb2, 0xff}, vg.Points(1.5)
	}
	p.Add(line)
	p.Legend.Add(s.Policy, line)
	return nil
}

// example returns results with a value for each cell.
func example() *results {
	r := &results{report: report{Date: "2026-01-02", Kernel: "6.0", Processors: 2}}
	for i, n := range [][2]int{{0, 1}, {64, 1}, {64, 4}, {256, 1}} {
		r.Runs = append(r.Runs, run{Mounts: n[0], NConnect: n[1], ConnectRate: 50, Seconds: 1,
			Daemon: usage{int64(i+1) << 26, 64 * i, i, 128 * i, 0.5}, Server: usage{1 << 20, i, i, 0, 0.1},
			Helpers: n[0], HelperBytes: int64(i) * 10 << 20})
	}
	r.Recoveries = []recovery{{64, 4, 1, []float64{1, 2, 3}}}
	for _, p := range pictures {
		for _, policy := range []string{policyBefore, policyAfter} {
			r.fleet = append(r.fleet, simulation{Fleet: p.fleet, Policy: policy, Clients: 10, Attempts: 25,
				PerSecond: []int{10, 0, 15}, Peak: 7, Burst: 3, Mean: 1.25})
		}
	}
	r.fleet = append(r.fleet, simulation{Fleet: "one client", Policy: policyAfter, Clients: 4, Alone: true, Outage: 5,
		Attempts: 6, P99: 2})
	return r
}

// read reads the results of a run of TestScale and of TestFleet.
func (r *results) read(dir string) error {
	for name, to := range map[string]any{"scale.json": &r.report, "fleet.json": &r.fleet} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			err = json.Unmarshal(data, to)
		}
		if err != nil {
			return fmt.Errorf("%w; run make scale first", err)
		}
	}
	return nil
}

// TestPage checks the place of the results in docs/scale.md. With -update it writes them, and draws
// the pictures.
func TestPage(t *testing.T) {
	page, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	r := example()
	if *updateFlag {
		r = &results{}
		if err := r.read(*resultsFlag); err != nil {
			t.Fatal(err)
		}
	}
	changed, err := kit.Splice(string(page), pageBegin, pageEnd, r.markdown())
	if err != nil {
		t.Fatal(err)
	}
	if !*updateFlag {
		for _, want := range []string{"| restart, 1 s | after | 2.5 | 7 | 3 | 1.2 | ", "| 5.0 | after | 1.5 | ",
			"| 64 × 4 | 50 | 1.00 | 192.0 | 128 | 2 | 256 | 50.00 | 64 | 20.0 | 1.0 | 2 | 10.00 |\n",
			"| further connection of a mount | 0.33 | 0.3 | 0.7 | 0.00 | 0.0 | 0.05 |\n",
			"| 64 × 4 | 1.0 | 2.00 (1.00..3.00) |\n"} {
			if strings.Count(changed, pageBegin) != 1 || !strings.Contains(changed, want) {
				t.Errorf("page does not contain %q once:\n%s", want, changed)
			}
		}
		return
	}
	if err := os.WriteFile(pageFile, []byte(changed), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(pictureDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.draw(pictureDir); err != nil {
		t.Fatal(err)
	}
}

// TestDraw checks that the pictures are made, and that docs/scale.md shows them.
func TestDraw(t *testing.T) {
	dir := t.TempDir()
	if err := example().draw(dir); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, picture := range pictures {
		f, err := os.Open(filepath.Join(dir, picture.file))
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(f)
		f.Close()
		if err != nil || img.Bounds().Dx() < 500 {
			t.Errorf("%s: got error %v, want a picture", picture.file, err)
		}
		if !strings.Contains(string(page), "(scale/"+picture.file+")") {
			t.Errorf("docs/scale.md does not show %s", picture.file)
		}
	}
}
