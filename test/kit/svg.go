package kit

import (
	"fmt"
	"html"
	"strings"
)

// An SVG is a picture with a white ground. Coordinates are in pixels from the top left.
type SVG struct{ body strings.Builder }

// Rect draws a filled rectangle.
func (s *SVG) Rect(x, y, width, height float64, color string) {
	fmt.Fprintf(&s.body, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'/>\n", x, y, width, height, color)
}

// Text writes text. anchor is start, middle or end.
func (s *SVG) Text(x, y float64, anchor, text string) {
	fmt.Fprintf(&s.body, "<text x='%.1f' y='%.1f' text-anchor='%s'>%s</text>\n", x, y, anchor, html.EscapeString(text))
}

// Line draws a line through points.
func (s *SVG) Line(points [][2]float64, color, width string) {
	fmt.Fprintf(&s.body, "<polyline fill='none' stroke='%s' stroke-width='%s' points='", color, width)
	for _, p := range points {
		fmt.Fprintf(&s.body, "%.1f,%.1f ", p[0], p[1])
	}
	s.body.WriteString("'/>\n")
}

// Legend writes names with their colors, from a point to the right.
func (s *SVG) Legend(x, y float64, entries [][2]string) {
	for _, e := range entries {
		s.Rect(x, y-9, 10, 10, e[1])
		s.Text(x+14, y, "start", e[0])
		x += 30 + 6.5*float64(len(e[0]))
	}
}

// Bytes returns the file.
func (s *SVG) Bytes(width, height float64) []byte {
	return fmt.Appendf(nil, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %.0f %.0f' width='%[1]v' "+
		"font-family='sans-serif' font-size='11'>\n<rect width='100%%' height='100%%' fill='white'/>\n%[3]s</svg>\n",
		width, height, s.body.String())
}
