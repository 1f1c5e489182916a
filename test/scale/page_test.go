package scale

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	{"restart.svg", "restart, 1 s"},
	{"outage.svg", "2 min, connects refused"},
}

// Names of policies in TestFleet.
const (
	policyAfter = "after"
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
	var fleet, runs, recoveries [][]string
	for _, s := range r.fleet {
		if s.Alone || s.Policy != policyAfter {
			continue
		}
		per := fmt.Sprintf("%.1f", float64(s.Attempts)/float64(s.Clients))
		fleet = append(fleet, []string{s.Fleet, per, fmt.Sprint(s.Peak), fmt.Sprint(s.Burst), seconds(s.Mean),
			seconds(s.P50), seconds(s.P99), seconds(s.Max)})
	}
	for i := range r.Runs {
		u := &r.Runs[i]
		if u.ConnectRate == 0 {
			continue // takes about as long
		}
		row := append([]string{fmt.Sprintf("%d × %d", u.Mounts, u.NConnect), fmt.Sprintf("%.2f", u.Seconds)},
			u.Daemon.cells()...)
		row = append(row, fmt.Sprint(u.Helpers), mib(float64(u.HelperBytes)))
		server := u.Server.cells()
		runs = append(runs, append(row, server[0], server[1], server[4]))
	}
	for _, v := range r.Recoveries {
		recoveries = append(recoveries, []string{fmt.Sprintf("%d × %d", v.Mounts, v.NConnect), seconds(v.Down),
			bench.RangeOf(v.Seconds).String()})
	}
	table(&b, "Clients of a restarted server, simulated. The outage begins at 0; recovery is counted from its end:",
		"event|connects per client|most in 1 s|most in 10 ms|recovery, mean s|p50|p99|longest", fleet)
	table(&b, "One daemon and `serve DIR`, measured. \"Mounts × nconnect\" were requested at once. %CPU is the\n"+
		"processor time of idle mounts with the default `keepalive=10`, in percent of one processor:",
		"mounts × nconnect|seconds to mount|daemon: MiB|descriptors|threads|goroutines|%CPU|"+
			"helper processes|MiB|server: MiB|descriptors|%CPU", runs)
	table(&b, "Restarts of `serve DIR` by SIGKILL, measured: time from the start of the next server until\nall "+
		"connections are made, median and range:", "mounts × nconnect|seconds without server|seconds", recoveries)
	return b.String()
}

// draw writes the pictures to dir.
func (r *results) draw(dir string) error {
	for _, p := range pictures {
		if err := os.WriteFile(filepath.Join(dir, p.file), r.picture(p.fleet), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// picture shows the connects of a fleet in each second. A second without connects is at the bottom.
func (r *results) picture(fleet string) []byte {
	const left, top, width, height, most = 50, 46, 800, 240, 2e4
	last := 1
	for _, s := range r.fleet {
		if s.Fleet == fleet {
			last = max(last, len(s.PerSecond))
		}
	}
	x := func(second int) float64 { return left + width*float64(second)/float64(last) }
	y := func(n float64) float64 { return top + height*(1-math.Log10(max(n, 1))/math.Log10(most)) }
	g := &kit.SVG{}
	g.Text(left, 16, "start", "Connects per second, "+fleet)
	for n := 1.0; n < most; n *= 10 {
		g.Line([][2]float64{{left, y(n)}, {left + width, y(n)}}, "#cccccc", "0.5")
		g.Text(left-4, y(n)+4, "end", fmt.Sprint(n))
	}
	for second := 0; second <= last; second += 10 {
		g.Text(x(second), top+height+16, "middle", fmt.Sprint(second))
	}
	g.Text(left+width/2, top+height+32, "middle", "seconds after the loss of all connections")
	legend := [][2]string{{"handshakes of the server", "#808080"}}
	g.Line([][2]float64{{left, y(capacity)}, {left + width, y(capacity)}}, legend[0][1], "1")
	for _, s := range r.fleet {
		if s.Fleet != fleet {
			continue
		}
		color := "#e69f00" // colors that differ also without red or green
		if s.Policy == policyAfter {
			color = "#0072b2"
		}
		var points [][2]float64
		for i, n := range s.PerSecond {
			points = append(points, [2]float64{x(i), y(float64(n))}, [2]float64{x(i + 1), y(float64(n))})
		}
		g.Line(points, color, "1.5")
		legend = append(legend, [2]string{s.Policy, color})
	}
	g.Legend(left, 34, legend)
	return g.Bytes(left+width+20, top+height+40)
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

// TestPage writes the results and the pictures of docs/scale.md with -update.
func TestPage(t *testing.T) {
	if !*updateFlag {
		t.Skip("writes docs/scale.md; run make scale")
	}
	r := &results{}
	kit.Must(t, r.read(*resultsFlag))
	page, err := os.ReadFile(pageFile)
	kit.Must(t, err)
	changed, err := kit.Splice(string(page), pageBegin, pageEnd, r.markdown())
	kit.Must(t, err)
	kit.Must(t, os.WriteFile(pageFile, []byte(changed), 0o644))
	kit.Must(t, r.draw(pictureDir))
}
