// Package screen writes lines and progress to a terminal or a file.
package screen

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Intervals of progress. On a terminal, progress replaces one line. In a file, each report is a new
// line.
const (
	terminalTick = 200 * time.Millisecond
	fileTick     = 2 * time.Second
)

// eraseLine moves a terminal to the start of the line and erases the line (ECMA-48, EL).
const eraseLine = "\r\x1b[K"

// A Screen writes lines and progress to a terminal or a file. It is safe for concurrent use.
type Screen struct {
	w     io.Writer
	width int // columns of the terminal; 0 if w is not a terminal

	state struct {
		sync.Mutex
		progress bool // the last line of the terminal is progress
	}
}

// New returns a Screen on w.
func New(w io.Writer) *Screen {
	s := &Screen{w: w}
	f, ok := w.(*os.File)
	if !ok {
		return s
	}
	if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
		s.width = max(int(size.Col), 1)
		if size.Col == 0 { // unknown width
			s.width = 80
		}
	}
	return s
}

// Width returns the number of columns of the terminal, or 0 if w is no terminal.
func (s *Screen) Width() int { return s.width }

// Tick returns the interval of reports of progress.
func (s *Screen) Tick() time.Duration {
	if s.width > 0 {
		return terminalTick
	}
	return fileTick
}

// Line writes a line that stays on the terminal.
func (s *Screen) Line(format string, args ...any) {
	s.state.Lock()
	defer s.state.Unlock()
	s.erase()
	fmt.Fprintf(s.w, format+"\n", args...)
}

// Progress writes a line. On a terminal, the next line replaces it.
func (s *Screen) Progress(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.state.Lock()
	defer s.state.Unlock()
	if s.width == 0 {
		fmt.Fprintln(s.w, text)
		return
	}
	s.erase()
	fmt.Fprint(s.w, text[:min(len(text), s.width-1)]) // a wrapped line cannot be erased
	s.state.progress = true
}

// EndProgress keeps the last progress and starts a new line.
func (s *Screen) EndProgress() {
	s.state.Lock()
	defer s.state.Unlock()
	if s.state.progress {
		fmt.Fprintln(s.w)
		s.state.progress = false
	}
}

// erase removes progress. The caller holds state.
func (s *Screen) erase() {
	if s.state.progress {
		fmt.Fprint(s.w, eraseLine)
		s.state.progress = false
	}
}

// Write writes log messages, which are whole lines.
func (s *Screen) Write(b []byte) (int, error) {
	s.state.Lock()
	defer s.state.Unlock()
	s.erase()
	return s.w.Write(b)
}
