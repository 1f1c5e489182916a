package bench

import (
	"errors"
	"image/color"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
)

// Colors that differ also without red or green (Okabe and Ito).
var (
	orange = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	sky    = color.RGBA{0x56, 0xb4, 0xe9, 0xff}
	green  = color.RGBA{0x00, 0x9e, 0x73, 0xff}
	blue   = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	red    = color.RGBA{0xd5, 0x5e, 0x00, 0xff}
	gray   = color.RGBA{0x99, 0x99, 0x99, 0xff}
)

var targetColors = map[string]color.Color{targetF: gray, targetS: sky, targetP: orange, targetD: blue, targetR: green}

// pictures are the files of draw.
var pictures = []string{"times.png", "ratios.png", "cpu.png"}

// draw writes the pictures to dir.
func (rep *report) draw(dir string) error {
	for i, draw := range []func(file string) error{rep.drawTimes, rep.drawRatios, rep.drawCPU} {
		if err := draw(filepath.Join(dir, pictures[i])); err != nil {
			return err
		}
	}
	return nil
}

func newPlot(title string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.Padding = vg.Points(8)
	p.BackgroundColor = color.Transparent // save fills the whole picture
	return p
}

// save draws p with its legend beside it.
func save(p *plot.Plot, width, height vg.Length, file string) error {
	const margin, legendWidth = 14, 190
	legend := p.Legend
	legend.Top, legend.Left, legend.Padding, legend.ThumbnailWidth = true, true, vg.Points(4), vg.Points(16)
	legend.XOffs = vg.Points(4)
	p.Legend = plot.NewLegend()
	img := vgimg.PngCanvas{Canvas: vgimg.New(width, height)}
	all := draw.Crop(draw.New(img), margin, -margin, margin, -margin)
	p.Draw(draw.Crop(all, 0, -legendWidth, 0, 0))
	legend.Draw(draw.Crop(all, width-2*margin-legendWidth, 0, 0, -2*margin))
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = img.WriteTo(f)
	return errors.Join(err, f.Close())
}

// logTicks are powers of ten on an axis of logarithms.
type logTicks struct{}

func (logTicks) Ticks(lo, hi float64) (ticks []plot.Tick) {
	for e := math.Floor(lo); e <= hi; e++ {
		ticks = append(ticks, plot.Tick{Value: e, Label: bench.Digits(math.Pow(10, e))})
		for m := 2.0; m < 10; m++ {
			ticks = append(ticks, plot.Tick{Value: e + math.Log10(m)})
		}
	}
	return ticks
}

// nameTicks have a label at each whole number.
type nameTicks []string

func (n nameTicks) Ticks(_, _ float64) (ticks []plot.Tick) {
	for i, name := range n {
		ticks = append(ticks, plot.Tick{Value: float64(i), Label: name})
	}
	return ticks
}

// A bar is a horizontal rectangle.
type bar struct {
	from, to float64 // x
	y        float64
	color    color.Color
}

// bars draws bars of one height.
type bars struct {
	list   []bar
	height float64 // in units of y
}

// Plot implements plot.Plotter.
func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, r := range b.list {
		c.FillPolygon(r.color, c.ClipPolygonXY([]vg.Point{{X: x(r.from), Y: y(r.y - b.height/2)},
			{X: x(r.to), Y: y(r.y - b.height/2)}, {X: x(r.to), Y: y(r.y + b.height/2)},
			{X: x(r.from), Y: y(r.y + b.height/2)}}))
	}
}

// Thumbnail implements plot.Thumbnailer.
func (b bars) Thumbnail(c *draw.Canvas) {
	if len(b.list) > 0 {
		c.FillPolygon(b.list[0].color, []vg.Point{{X: c.Min.X, Y: c.Min.Y}, {X: c.Min.X, Y: c.Max.Y},
			{X: c.Max.X, Y: c.Max.Y}, {X: c.Max.X, Y: c.Min.Y}})
	}
}

// labels writes texts to the right of points.
func labels(points plotter.XYs, texts []string) (*plotter.Labels, error) {
	l, err := plotter.NewLabels(plotter.XYLabels{XYs: points, Labels: texts})
	if err != nil {
		return nil, err
	}
	for i := range l.TextStyle {
		l.TextStyle[i].Font.Size = vg.Points(8)
		l.TextStyle[i].YAlign = text.YCenter
	}
	l.Offset = vg.Point{X: vg.Points(3)}
	return l, nil
}

// drawTimes shows the time of a call of each workload on each target.
func (rep *report) drawTimes(file string) error {
	p := newPlot("Time of a call in us (median; shorter is better)")
	var names []string
	for _, w := range bench.Workloads() {
		names = append(names, w.Name)
	}
	slices.Reverse(names) // the first one is at the top
	lo, hi := math.Inf(1), math.Inf(-1)
	height := 0.8 / float64(len(directories))
	all := make([]bars, len(directories))
	var points plotter.XYs
	var texts []string
	for i, target := range directories {
		all[i].height = height
		for y, w := range names {
			r, ok := rep.of(target, w, (*bench.Sample).Micros)
			if !ok {
				continue
			}
			v := math.Log10(r.Median)
			lo, hi = min(lo, math.Floor(v)), max(hi, v)
			at := float64(y) + 0.4 - height*(float64(i)+0.5)
			all[i].list = append(all[i].list, bar{to: v, y: at, color: targetColors[target]})
			points, texts = append(points, plotter.XY{X: v, Y: at}), append(texts, bench.Digits(r.Median))
		}
	}
	for i, target := range directories {
		for j := range all[i].list {
			all[i].list[j].from = lo
		}
		p.Add(all[i])
		p.Legend.Add(target, all[i])
	}
	l, err := labels(points, texts)
	if err != nil {
		return err
	}
	p.Add(l)
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = lo, math.Ceil(hi)+0.3, -0.5, float64(len(names))-0.5
	p.X.Tick.Marker, p.Y.Tick.Marker = logTicks{}, nameTicks(names)
	return save(p, 11*vg.Inch, 11*vg.Inch, file)
}

// drawRatios shows how far each goal is met.
func (rep *report) drawRatios(file string) error {
	p := newPlot("Goals: 1 and more is met (median)")
	met, missed := bars{height: 0.6}, bars{height: 0.6}
	names := make([]string, len(rep.Goals))
	var points plotter.XYs
	var texts []string
	lo, hi := -1.0, 1.0
	for i := range rep.Goals {
		o := &rep.Goals[i]
		y := len(rep.Goals) - 1 - i
		names[y] = o.Name
		// A difference can be negative: the goal is then met by far.
		v := o.Value.Median / o.Bound
		if o.Most {
			v = 1 / max(v, 1e-9)
		}
		v = math.Log10(min(max(v, 0.01), 100))
		lo, hi = min(lo, math.Floor(v)), max(hi, math.Ceil(v))
		b := bar{to: v, y: float64(y), color: green}
		if o.Met {
			met.list = append(met.list, b)
		} else {
			b.color = red
			missed.list = append(missed.list, b)
		}
		points = append(points, plotter.XY{X: max(v, 0), Y: float64(y)})
		texts = append(texts, bench.Digits(o.Value.Median)+" ("+strings.TrimSpace(o.bound()+" "+o.Unit)+")")
	}
	for _, b := range []struct {
		name string
		bars bars
	}{{"met", met}, {"not met", missed}} {
		if len(b.bars.list) > 0 {
			p.Add(b.bars)
			p.Legend.Add(b.name, b.bars)
		}
	}
	l, err := labels(points, texts)
	if err != nil {
		return err
	}
	one, err := plotter.NewLine(plotter.XYs{{X: 0, Y: -0.5}, {X: 0, Y: float64(len(names)) - 0.5}})
	if err != nil {
		return err
	}
	p.Add(one, l)
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = lo, hi+0.8, -0.5, float64(len(names))-0.5
	p.X.Tick.Marker, p.Y.Tick.Marker = logTicks{}, nameTicks(names)
	return save(p, 12*vg.Inch, 7*vg.Inch, file)
}

// drawCPU shows the processor time of the processes behind a call.
func (rep *report) drawCPU(file string) error {
	p := newPlot("Processor time of a call in us (median; shorter is better)")
	processes := []string{daemonProcess, serverProcess, ganeshaProcess}
	colors := []color.Color{blue, orange, gray}
	legend := []string{"daemon of the mount", "serve DIR or relay", "Ganesha"}
	all := make([]bars, len(processes))
	var ticks plot.ConstantTicks
	var texts []string
	var points plotter.XYs
	y := 0.0
	for _, w := range []string{bench.RandomRead, bench.RandomRead4, bench.Create, bench.Stat, bench.Rename,
		bench.Unlink} {
		for _, target := range []string{targetF, targetP, targetD, targetR} {
			sum := 0.0
			for i, process := range processes {
				r, ok := rep.of(target, w, func(s *bench.Sample) float64 { return s.CPU(process) })
				if !ok || r.Median == 0 {
					continue
				}
				all[i].height = 0.7
				all[i].list = append(all[i].list, bar{from: sum, to: sum + r.Median, y: y, color: colors[i]})
				sum += r.Median
			}
			ticks = append(ticks, plot.Tick{Value: y, Label: w + ": " + target[:1]})
			points, texts = append(points, plotter.XY{X: sum, Y: y}), append(texts, bench.Digits(sum))
			p.X.Max = max(p.X.Max, sum)
			y--
		}
		y -= 0.6 // between workloads
	}
	for i := range all {
		if len(all[i].list) > 0 {
			p.Add(all[i])
			p.Legend.Add(legend[i], all[i])
		}
	}
	l, err := labels(points, texts)
	if err != nil {
		return err
	}
	p.Add(l)
	p.X.Min, p.Y.Min, p.Y.Max = 0, y+0.5, 0.5
	p.X.Max *= 1.1
	p.Y.Tick.Marker = ticks
	return save(p, 11*vg.Inch, 9*vg.Inch, file)
}

func TestDraw(t *testing.T) {
	dir := t.TempDir()
	if err := exampleReport(t).draw(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range pictures {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(f)
		f.Close()
		if err != nil || img.Bounds().Dx() < 500 {
			t.Errorf("%s: got %v, error %v", name, img, err)
		}
	}
}
