package statview

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/lipgloss"
	"github.com/guptarohit/asciigraph"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const (
	maxHistory = 600 // intervals that a plot can show
	plotHeight = 6   // rows of a plot
	minRows    = 3   // of a table
)

// Watch shows reports in a full-screen terminal view until the user ends it, until ctx ends, or
// after count intervals; 0 is no limit. fetch reads the counters of the mounts; an error is shown,
// and fetch is called again after the interval. out must be a terminal.
func Watch(ctx context.Context, in io.Reader, out io.Writer, interval time.Duration, count int,
	fetch func(context.Context) ([]control.MountStats, error)) error {
	m := newWatch(ctx, interval, count, fetch)
	_, err := tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out),
		tea.WithAltScreen()).Run()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil || errors.Is(err, tea.ErrInterrupted) {
		return nil
	}
	return err
}

func newWatch(ctx context.Context, interval time.Duration, count int,
	fetch func(context.Context) ([]control.MountStats, error)) *watch {
	return &watch{ctx: ctx, interval: interval, count: count, fetch: fetch,
		mounts: make(map[control.MountKey]*history)}
}

// A history holds the latest reports of a mount.
type history struct {
	last                control.MountStats
	report              Report
	read, written, rate []float64 // newest last
	p99                 []float64 // in milliseconds
}

// A watch is the state of the view. It implements tea.Model. Only the event loop uses it.
type watch struct {
	ctx      context.Context
	interval time.Duration
	count    int // of intervals; 0 for no limit
	fetch    func(context.Context) ([]control.MountStats, error)

	readings      int
	mounts        map[control.MountKey]*history
	order         []control.MountKey // keys of mounts
	shown         int                // index in order
	paused        bool
	err           error
	width, height int
}

// A reading is the result of one fetch.
type reading struct {
	mounts []control.MountStats
	err    error
}

// A tick starts the next fetch.
type tick struct{}

// Init implements tea.Model.
func (m *watch) Init() tea.Cmd { return m.read }

func (m *watch) read() tea.Msg {
	l, err := m.fetch(m.ctx)
	return reading{l, err}
}

// Update implements tea.Model.
func (m *watch) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyMsg:
		return m, m.key(msg.String())
	case reading:
		if m.err = msg.err; msg.err == nil && !m.paused {
			m.add(msg.mounts)
		}
		if m.readings++; m.count > 0 && m.readings > m.count { // the first reading ends no interval
			return m, tea.Quit
		}
		return m, tea.Tick(m.interval, func(time.Time) tea.Msg { return tick{} })
	case tick:
		return m, m.read
	}
	return m, nil
}

func (m *watch) key(key string) tea.Cmd {
	switch key {
	case "q", "esc", "ctrl+c":
		return tea.Quit
	case " ", "p":
		m.paused = !m.paused
	case "right", "tab", "down", "n":
		m.shown++
	case "left", "shift+tab", "up", "N":
		m.shown += len(m.order) - 1
	}
	if len(m.order) > 0 {
		m.shown %= len(m.order)
	}
	return nil
}

// add adds a reading to the histories.
func (m *watch) add(l []control.MountStats) {
	var shown control.MountKey
	if m.shown < len(m.order) {
		shown = m.order[m.shown]
	}
	m.order = m.order[:0]
	for i := range l {
		s := &l[i]
		key := s.Key()
		m.order = append(m.order, key)
		h := m.mounts[key]
		if h == nil {
			h = &history{last: *s}
			m.mounts[key] = h
			h.report = Between(&control.MountStats{}, s)
			continue // a mean over a long time is no point of the plots
		}
		h.report = Between(&h.last, s)
		h.last = *s
		h.read = push(h.read, h.report.ReadBytes/1e6)
		h.written = push(h.written, h.report.WrittenBytes/1e6)
		h.rate = push(h.rate, h.report.Requests)
		h.p99 = push(h.p99, h.report.All.P99*1e3)
	}
	for key := range m.mounts {
		if !slices.Contains(m.order, key) {
			delete(m.mounts, key)
		}
	}
	m.shown = max(0, slices.Index(m.order, shown))
}

func push(l []float64, v float64) []float64 {
	if l = append(l, v); len(l) > maxHistory {
		l = slices.Delete(l, 0, len(l)-maxHistory)
	}
	return l
}

var (
	titleStyle = lipgloss.NewStyle().Bold(true)
	errorStyle = lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Color("1"))
	headStyle  = lipgloss.NewStyle().Bold(true).Foreground(lipgloss.Color("6"))
	helpStyle  = lipgloss.NewStyle().Faint(true)
)

// View implements tea.Model.
func (m *watch) View() string {
	if m.width == 0 {
		return ""
	}
	lines := m.lines()
	help := "q quit   space pause"
	if len(m.order) > 1 {
		help += "   left, right: other mount"
	}
	if len(lines) > m.height-1 {
		lines = lines[:max(m.height-1, 0)]
	}
	for len(lines) < m.height-1 {
		lines = append(lines, "")
	}
	cut := lipgloss.NewStyle().MaxWidth(m.width)
	for i := range lines {
		lines[i] = cut.Render(lines[i])
	}
	return strings.Join(append(lines, cut.Render(helpStyle.Render(help))), "\n")
}

// lines returns the view without the last line.
func (m *watch) lines() []string {
	var lines []string
	if m.err != nil {
		lines = append(lines, errorStyle.Render(printable(m.err.Error())+"; retrying"))
	}
	if len(m.order) == 0 {
		return append(lines, "no mounts")
	}
	h := m.mounts[m.order[m.shown]]
	r := &h.report
	title := fmt.Sprintf("%s from %s: %s", printable(r.Dir), printable(r.Spec), r.State)
	if len(m.order) > 1 {
		title += fmt.Sprintf(" (mount %d of %d)", m.shown+1, len(m.order))
	}
	if m.paused {
		title += " PAUSED"
	}
	lines = append(lines, titleStyle.Render(title))
	lines = append(lines, r.summary()...)
	if plots := m.plots(h); plots != nil {
		lines = append(append(lines, ""), plots...)
	}
	return append(lines, m.tables(r, m.height-1-len(lines))...)
}

// plots returns two plots, beside each other if there is room.
func (m *watch) plots(h *history) []string {
	if m.height < 24 || len(h.rate) == 0 {
		return nil
	}
	wide := m.width >= 100
	width := m.width
	if wide {
		width = m.width/2 - 1
	}
	throughput := plot(width, "MB/s", []string{"read", "written"}, h.read, h.written)
	requests := plot(width, "requests/s", []string{"requests"}, h.rate)
	latency := plot(width, "ms, 99th percentile of FUSE requests", []string{"p99"}, h.p99)
	switch {
	case wide && m.height >= 40:
		top := lipgloss.JoinHorizontal(lipgloss.Top, throughput, "  ", requests)
		return strings.Split(top+"\n"+latency, "\n")
	case wide:
		return strings.Split(lipgloss.JoinHorizontal(lipgloss.Top, throughput, "  ", requests), "\n")
	}
	return strings.Split(throughput, "\n")
}

// plot draws series in width columns.
func plot(width int, caption string, legends []string, series ...[]float64) string {
	const axis = 10 // columns of the numbers
	points := max(width-axis, 10)
	top := 1.0
	shown := make([][]float64, len(series))
	for i, s := range series {
		shown[i] = s[max(0, len(s)-points):]
		for range points - len(shown[i]) { // the newest point is at the right border
			shown[i] = append([]float64{0}, shown[i]...)
		}
		top = max(top, slices.Max(shown[i]))
	}
	options := []asciigraph.Option{asciigraph.Height(plotHeight), asciigraph.Width(points), asciigraph.LowerBound(0),
		asciigraph.UpperBound(top), asciigraph.YAxisValueFormatter(number), asciigraph.Caption(caption),
		asciigraph.SeriesColors(asciigraph.Green, asciigraph.Yellow)}
	if len(legends) > 1 {
		options = append(options, asciigraph.SeriesLegends(legends...))
	}
	return lipgloss.NewStyle().Width(width).MaxWidth(width).Render(asciigraph.PlotMany(shown, options...))
}

// tables returns the tables of r in at most height lines.
func (m *watch) tables(r *Report, height int) []string {
	all := r.tables(0)
	if len(all) == 0 {
		return nil
	}
	// Each table has an empty line, a head, and perhaps a line about rows that are left out.
	rows := max(minRows, height/len(all)-3)
	var out strings.Builder
	printTables(&out, r.tables(rows))
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	for i := 1; i < len(lines); i++ {
		if lines[i-1] == "" {
			lines[i] = headStyle.Render(lines[i])
		}
	}
	return lines
}
