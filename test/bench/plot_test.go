package bench

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Colors that differ also without red or green (Okabe and Ito).
const (
	orange = "#e69f00"
	sky    = "#56b4e9"
	green  = "#009e73"
	blue   = "#0072b2"
	red    = "#d55e00"
	gray   = "#999999"
)

var targetColors = map[string]string{targetF: gray, targetS: sky, targetP: orange, targetD: blue, targetR: green}

// draw writes the pictures to dir.
func (rep *report) draw(dir string) error {
	for name, picture := range map[string][]byte{"times.svg": rep.drawTimes(), "ratios.svg": rep.drawRatios(),
		"cpu.svg": rep.drawCPU()} {
		if err := os.WriteFile(filepath.Join(dir, name), picture, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// A bar is a horizontal rectangle.
type bar struct {
	from, to float64
	color    string
}

// A line of a chart has bars, a name at their left and a text at their right.
type line struct {
	name, text string
	bars       []bar
	gap        bool // before the line
}

// chart draws lines. With log, the axis is logarithmic, with the powers of ten from lo to hi.
func chart(title string, legend [][2]string, lines []line, lo, hi float64, log bool) []byte {
	const left, width, height, top = 320, 560, 13, 46
	s := &kit.SVG{}
	s.Text(left, 16, "start", title)
	s.Legend(left/2, 34, legend)
	x := func(v float64) float64 {
		if log {
			return left + width*(math.Log10(v)-math.Log10(lo))/(math.Log10(hi)-math.Log10(lo))
		}
		return left + width*(v-lo)/(hi-lo)
	}
	y := float64(top)
	for _, l := range lines {
		if l.gap {
			y += height / 2
		}
		s.Text(left-8, y+height-3, "end", l.name)
		end := x(lo)
		for _, b := range l.bars {
			from, to := x(min(b.from, b.to)), x(max(b.from, b.to))
			s.Rect(from, y+1, to-from, height-2, b.color)
			end = max(end, to)
		}
		s.Text(end+4, y+height-3, "start", l.text)
		y += height
	}
	for v := lo; log && v <= hi*1.01; v *= 10 {
		s.Line([][2]float64{{x(v), top}, {x(v), y}}, "#cccccc", "0.5")
		s.Text(x(v), y+14, "middle", bench.Digits(v))
	}
	return s.Bytes(left+width+120, y+22)
}

// drawTimes shows the time of a call of each workload on each target.
func (rep *report) drawTimes() []byte {
	var lines []line
	var legend [][2]string
	lo, hi := math.Inf(1), 0.0
	for _, target := range directories {
		legend = append(legend, [2]string{target, targetColors[target]})
	}
	for _, w := range bench.Workloads() {
		for i, target := range directories {
			r, _ := rep.of(target, w.Name, (*bench.Sample).Micros)
			lo, hi = min(lo, r.Median), max(hi, r.Median)
			l := line{text: bench.Digits(r.Median), bars: []bar{{0, r.Median, targetColors[target]}}, gap: i == 0}
			if i == len(directories)/2 {
				l.name = w.Name
			}
			lines = append(lines, l)
		}
	}
	lo, hi = math.Pow(10, math.Floor(math.Log10(lo))), math.Pow(10, math.Ceil(math.Log10(hi)))
	for i := range lines {
		lines[i].bars[0].from = lo
	}
	return chart("Time of a call in us (median; shorter is better)", legend, lines, lo, hi, true)
}

// drawRatios shows how far each goal is met.
func (rep *report) drawRatios() []byte {
	const lo, hi = 0.01, 100
	lines := make([]line, len(rep.Goals))
	for i := range rep.Goals {
		o := &rep.Goals[i]
		// A difference can be negative: the goal is then met by far.
		v := o.Value.Median / o.Bound
		if o.Most {
			v = 1 / max(v, 1e-9)
		}
		b := bar{1, min(max(v, lo), hi), green}
		if !o.Met {
			b.color = red
		}
		lines[i] = line{o.Name, fmt.Sprintf("%s (%s)", bench.Digits(o.Value.Median),
			strings.TrimSpace(o.bound()+" "+o.Unit)), []bar{b}, false}
	}
	legend := [][2]string{{"met", green}, {"not met", red}}
	return chart("Goals: 1 and more is met (median)", legend, lines, lo, hi, true)
}

// drawCPU shows the processor time of the processes behind a call.
func (rep *report) drawCPU() []byte {
	legend := [][2]string{{"daemon of the mount", blue}, {"serve DIR or relay", orange}, {"Ganesha", gray}}
	var lines []line
	hi := 0.0
	for _, w := range []string{bench.RandomRead, bench.RandomRead4, bench.Create, bench.Stat, bench.Rename,
		bench.Unlink} {
		for i, target := range []string{targetF, targetP, targetD, targetR} {
			l := line{name: w + ": " + target[:1], gap: i == 0}
			sum := 0.0
			for k, process := range []string{daemonProcess, serverProcess, ganeshaProcess} {
				r, _ := rep.of(target, w, func(s *bench.Sample) float64 { return s.CPU(process) })
				l.bars = append(l.bars, bar{sum, sum + r.Median, legend[k][1]})
				sum += r.Median
			}
			l.text, hi = bench.Digits(sum), max(hi, sum)
			lines = append(lines, l)
		}
	}
	return chart("Processor time of a call in us (median; shorter is better)", legend, lines, 0, hi, false)
}
