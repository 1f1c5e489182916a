package demo

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

// A screen writes lines and progress to a terminal or a file. It is safe for concurrent use.
type screen struct {
	w     io.Writer
	width int // columns of the terminal; 0 if w is not a terminal

	state struct {
		sync.Mutex
		progress bool // the last line of the terminal is progress
	}
}

func newScreen(w io.Writer) *screen {
	s := &screen{w: w}
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

func (s *screen) tick() time.Duration {
	if s.width > 0 {
		return terminalTick
	}
	return fileTick
}

// line writes a line that stays on the terminal.
func (s *screen) line(format string, args ...any) {
	s.state.Lock()
	defer s.state.Unlock()
	s.erase()
	fmt.Fprintf(s.w, format+"\n", args...)
}

// progress writes a line. On a terminal, the next line replaces it.
func (s *screen) progress(format string, args ...any) {
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

// endProgress keeps the last progress and starts a new line.
func (s *screen) endProgress() {
	s.state.Lock()
	defer s.state.Unlock()
	if s.state.progress {
		fmt.Fprintln(s.w)
		s.state.progress = false
	}
}

// erase removes progress. The caller holds state.
func (s *screen) erase() {
	if s.state.progress {
		fmt.Fprint(s.w, eraseLine)
		s.state.progress = false
	}
}

// Write writes log messages, which are whole lines.
func (s *screen) Write(b []byte) (int, error) {
	s.state.Lock()
	defer s.state.Unlock()
	s.erase()
	return s.w.Write(b)
}
