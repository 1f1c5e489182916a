package monitoring

import (
	"errors"
	"fmt"
	"image/color"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Sizes of a picture in points.
const (
	panelWidth, panelHeight = 470, 250
	panelGap                = 8
	panelMargin             = 9
	headHeight, footHeight  = 26, 18
	legendLine              = 12
	panelColumns            = 2
)

// footnote is at the bottom of each picture.
const footnote = "Drawn by \"make panels\" from the queries of deploy/grafana/nfsrdmad.json. This is not a picture " +
	"of Grafana."

// seriesColors are the first colors of Grafana's classic palette.
var seriesColors = []color.RGBA{rgb(0x7eb26d), rgb(0xeab839), rgb(0x6ed0e0), rgb(0xef843c), rgb(0xe24d42),
	rgb(0x1f78c1), rgb(0xba43a9), rgb(0x705da0), rgb(0x508642), rgb(0xcca300), rgb(0x447ebc), rgb(0xc15c17),
	rgb(0x890f02), rgb(0x0a437c), rgb(0x6d1f62), rgb(0x584477)}

var (
	pageColor   = rgb(0xf4f5f5)
	borderColor = rgb(0xd8dbe0)
	gridColor   = rgb(0xe8eaee)
	textColor   = rgb(0x24292e)
	faintColor  = rgb(0x6e7781)
)

func rgb(v uint32) color.RGBA { return color.RGBA{uint8(v >> 16), uint8(v >> 8), uint8(v), 0xff} }

// A series is one line of a panel. A value that is NaN is a gap.
type series struct {
	name   string
	values []float64 // at the times of the range
}

// A timeRange has the times of the values of all series.
type timeRange struct {
	begin time.Time
	step  time.Duration
	count int
}

// x returns the time of a value in seconds since begin.
func (r *timeRange) x(i int) float64 { return float64(i) * r.step.Seconds() }

// drawRow writes the picture of a row of the dashboard: its panels with their series.
func drawRow(r *row, data [][]series, times *timeRange, file string) error {
	lines := (len(r.panels) + panelColumns - 1) / panelColumns
	width := vg.Length(panelColumns*(panelWidth+panelGap) + panelGap)
	height := vg.Length(headHeight + lines*(panelHeight+panelGap) + footHeight)
	img := vgimg.PngCanvas{Canvas: vgimg.New(width, height)}
	page := draw.New(img)
	page.FillPolygon(pageColor, rectangle(page.Rectangle))
	write(page, style(13, textColor), panelGap, height-18, r.title)
	write(page, style(7.5, faintColor), panelGap, 6, footnote)
	for i := range r.panels {
		left := vg.Length(panelGap + i%panelColumns*(panelWidth+panelGap))
		top := height - vg.Length(headHeight+i/panelColumns*(panelHeight+panelGap))
		right := left + panelWidth
		if i == len(r.panels)-1 {
			right = width - panelGap // no empty place in the last line
		}
		c := draw.Canvas{Canvas: page.Canvas, Rectangle: vg.Rectangle{Min: vg.Point{X: left, Y: top - panelHeight},
			Max: vg.Point{X: right, Y: top}}}
		if err := r.panels[i].draw(c, data[i], times); err != nil {
			return fmt.Errorf("panel %s: %w", r.panels[i].title, err)
		}
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = img.WriteTo(f)
	return errors.Join(err, f.Close())
}

func rectangle(r vg.Rectangle) []vg.Point {
	return []vg.Point{r.Min, {X: r.Max.X, Y: r.Min.Y}, r.Max, {X: r.Min.X, Y: r.Max.Y}}
}

func style(size font.Length, c color.Color) text.Style {
	return text.Style{Color: c, Font: font.From(font.Font{Typeface: "Liberation", Variant: "Sans"}, size),
		Handler: plot.DefaultTextHandler}
}

// write writes a text. It places each letter, because the library moves letters such as those of
// "VA" into each other.
func write(c draw.Canvas, s text.Style, x, y vg.Length, text string) {
	for _, letter := range text {
		c.FillText(s, vg.Point{X: x, Y: y}, string(letter))
		x += s.Width(string(letter))
	}
}

// widthOf returns the width of a text of write.
func widthOf(s text.Style, text string) (w vg.Length) {
	for _, letter := range text {
		w += s.Width(string(letter))
	}
	return w
}

// draw draws a panel as Grafana arranges it: the title, the graph, and the legend below.
func (p *panel) draw(c draw.Canvas, all []series, times *timeRange) error {
	c.FillPolygon(color.White, rectangle(c.Rectangle))
	c.StrokeLines(draw.LineStyle{Color: borderColor, Width: 0.7}, append(rectangle(c.Rectangle), c.Min))
	c = draw.Crop(c, panelMargin, -panelMargin, panelMargin, -panelMargin)
	write(c, style(9.5, textColor), c.Min.X, c.Max.Y-8, p.title)
	legend := legendLines(all, c.Max.X-c.Min.X)
	drawLegend(c, legend)
	graph, err := p.graph(all, times)
	if err != nil {
		return err
	}
	graph.Draw(draw.Crop(c, 0, -4, vg.Length(len(legend))*legendLine+6, -20))
	return nil
}

// A legendEntry is the name of a series at a place of its line.
type legendEntry struct {
	name  string
	color color.Color
	at    vg.Length
}

// legendLines breaks the names of series into lines of the given width.
func legendLines(all []series, width vg.Length) (lines [][]legendEntry) {
	const mark, space = 14, 12
	font := style(7.5, textColor)
	at := width + 1 // no line has room
	for i, s := range all {
		need := mark + widthOf(font, s.name)
		if at+need > width {
			lines, at = append(lines, nil), 0
		}
		last := &lines[len(lines)-1]
		*last = append(*last, legendEntry{s.name, seriesColors[i%len(seriesColors)], at})
		at += need + space
	}
	return lines
}

func drawLegend(c draw.Canvas, lines [][]legendEntry) {
	for i, line := range lines {
		y := c.Min.Y + vg.Length(len(lines)-1-i)*legendLine
		for _, e := range line {
			x := c.Min.X + e.at
			c.StrokeLine2(draw.LineStyle{Color: e.color, Width: 2.5}, x, y+2.5, x+10, y+2.5)
			write(c, style(7.5, textColor), x+14, y, e.name)
		}
	}
}

// graph returns the plot of a panel.
func (p *panel) graph(all []series, times *timeRange) (*plot.Plot, error) {
	g := plot.New()
	g.BackgroundColor = color.Transparent
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = gridColor, gridColor
	g.Add(grid)
	below := make([]float64, times.count) // top of the stack
	areas := make([]area, len(all))
	top := 0.0
	for i, s := range all {
		areas[i] = area{times: times, from: make([]float64, times.count), to: s.values, stacked: p.stack,
			color: seriesColors[i%len(seriesColors)]}
		if p.stack {
			to := make([]float64, times.count)
			for k, v := range s.values {
				areas[i].from[k] = below[k]
				if !math.IsNaN(v) {
					below[k] += v
				}
				to[k] = below[k]
			}
			areas[i].to = to
		}
		for _, v := range areas[i].to {
			if v > top { // false for NaN
				top = v
			}
		}
	}
	for i := range areas {
		g.Add(&areas[i])
	}
	step := niceStep(top, p.unit)
	g.X.Min, g.X.Max, g.Y.Min, g.Y.Max = 0, times.x(times.count-1), 0, math.Max(math.Ceil(top/step), 1)*step
	g.Y.Tick.Marker = plot.TickerFunc(func(_, hi float64) (ticks []plot.Tick) {
		for v := 0.0; v <= hi*1.0001; v += step {
			ticks = append(ticks, plot.Tick{Value: v, Label: inUnit(v, p.unit)})
		}
		return ticks
	})
	g.X.Tick.Marker = plot.TickerFunc(times.ticks)
	for _, a := range []*plot.Axis{&g.X, &g.Y} {
		a.Tick.Label.Font = style(7.5, faintColor).Font
		a.Tick.Label.Color, a.Tick.LineStyle.Color, a.LineStyle.Color = faintColor, gridColor, gridColor
		a.Tick.Length = 2
	}
	return g, nil
}

// ticks returns about six times of day.
func (r *timeRange) ticks(_, hi float64) (ticks []plot.Tick) {
	step := 5 * time.Second
	for _, s := range []time.Duration{10, 15, 30, 60, 120, 300, 600} {
		if step.Seconds()*7 < hi {
			step = s * time.Second
		}
	}
	first := r.begin.Truncate(step).Add(step)
	for at := first; at.Sub(r.begin).Seconds() <= hi; at = at.Add(step) {
		ticks = append(ticks, plot.Tick{Value: at.Sub(r.begin).Seconds(), Label: at.UTC().Format("15:04:05")})
	}
	return ticks
}

// An area is a line and the space below it. It implements plot.Plotter.
type area struct {
	times    *timeRange
	from, to []float64
	stacked  bool
	color    color.RGBA
}

// Plot implements plot.Plotter.
func (a *area) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	fill := color.NRGBA{a.color.R, a.color.G, a.color.B, 0x1a} // fillOpacity 10
	if a.stacked {
		fill.A = 0x66
	}
	for begin := 0; begin < len(a.to); begin++ {
		end := begin
		var line, base []vg.Point
		for ; end < len(a.to) && !math.IsNaN(a.to[end]); end++ {
			line = append(line, vg.Point{X: x(a.times.x(end)), Y: y(a.to[end])})
			base = append(base, vg.Point{X: x(a.times.x(end)), Y: y(a.from[end])})
		}
		if len(line) > 0 {
			slices.Reverse(base)
			c.FillPolygon(fill, append(slices.Clone(line), base...))
			c.StrokeLines(draw.LineStyle{Color: a.color, Width: 1}, line)
		}
		begin = end
	}
}

// niceStep returns the distance of ticks for values from 0 to top: four to eight ticks, on round
// numbers in the unit.
func niceStep(top float64, unit string) float64 {
	if top <= 0 {
		return 1
	}
	scale := 1.0
	if unit == "bytes" {
		for scale*1024 <= top {
			scale *= 1024
		}
	}
	raw := top / scale / 5
	power := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 5} {
		if raw <= m*power {
			return m * power * scale
		}
	}
	return 10 * power * scale
}

// A prefix is a unit with its size.
type prefix struct {
	size float64
	name string
}

// prefixes are the units of Grafana that the dashboard uses, the largest first.
var prefixes = map[string][]prefix{
	"Bps":         {{1e9, " GB/s"}, {1e6, " MB/s"}, {1e3, " kB/s"}, {1, " B/s"}},
	"bytes":       {{1 << 30, " GiB"}, {1 << 20, " MiB"}, {1 << 10, " KiB"}, {1, " B"}},
	"s":           {{60, " min"}, {1, " s"}, {1e-3, " ms"}, {1e-6, " µs"}},
	"ops":         {{1e6, "M ops/s"}, {1e3, "K ops/s"}, {1, " ops/s"}},
	"short":       {{1e9, " Bil"}, {1e6, " Mil"}, {1e3, " K"}, {1, ""}},
	"percentunit": {{0.01, "%"}},
}

// inUnit formats a value as Grafana does.
func inUnit(v float64, unit string) string {
	all := prefixes[unit]
	if v == 0 {
		if unit == "s" {
			return "0 s"
		}
		return "0" + all[len(all)-1].name
	}
	for _, p := range all {
		if v >= p.size*0.9999 {
			return digits(v/p.size) + p.name
		}
	}
	last := all[len(all)-1]
	return digits(v/last.size) + last.name
}

// digits returns v with at most three digits, and without zeros at its end.
func digits(v float64) string {
	s := strconv.FormatFloat(v, 'f', max(0, 2-int(math.Floor(math.Log10(v)+1e-9))), 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s
}

// TestPictures draws a row with an empty panel, gaps and stacks.
func TestPictures(t *testing.T) {
	times := &timeRange{begin: time.Unix(1000, 0), step: time.Second, count: 50}
	r := row{title: "row", panels: []panel{{unit: "s"}, {unit: "ops", stack: true}}}
	values := make([]float64, times.count)
	for k := range values {
		if values[k] = float64(k); k%20 == 7 {
			values[k] = math.NaN()
		}
	}
	file := filepath.Join(t.TempDir(), "row.png")
	kit.Must(t, drawRow(&r, [][]series{nil, {{"one", values}, {"two", values}}}, times, file))
	f, err := os.Open(file)
	kit.Must(t, err)
	defer f.Close()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dx() < 1000 {
		t.Errorf("got %v, error %v", img, err)
	}
}

func TestUnits(t *testing.T) {
	for _, c := range []struct {
		v          float64
		unit, want string
	}{
		{0, "Bps", "0 B/s"}, {1500, "Bps", "1.5 kB/s"}, {2e7, "Bps", "20 MB/s"}, {0, "s", "0 s"}, {0.25, "s", "250 ms"},
		{5e-6, "s", "5 µs"}, {90, "s", "1.5 min"}, {1000, "ops", "1K ops/s"}, {40, "ops", "40 ops/s"},
		{0.5, "ops", "0.5 ops/s"}, {3 << 20, "bytes", "3 MiB"}, {0.2, "percentunit", "20%"}, {0, "percentunit", "0%"},
		{128, "short", "128"}, {0, "short", "0"}, {2000, "short", "2 K"},
	} {
		if got := inUnit(c.v, c.unit); got != c.want {
			t.Errorf("%v in %s: got %q, want %q", c.v, c.unit, got, c.want)
		}
	}
	for _, r := range dashboard {
		for _, p := range r.panels {
			if prefixes[p.unit] == nil {
				t.Errorf("panel %s: no format for its unit %s", p.title, p.unit)
			}
		}
	}
}
