package demo

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How often progress is shown: a terminal has one line that changes, a file gets a line now and
// then.
const (
	terminalTick = 200 * time.Millisecond
	fileTick     = 2 * time.Second
)

// eraseLine goes to the start of a terminal's line and empties it (ECMA-48, EL).
const eraseLine = "\r\x1b[K"

// A screen is where a person, or a log, reads. Safe for concurrent use.
type screen struct {
	w     io.Writer
	width int // columns of a terminal; 0 where w is none

	mu      sync.Mutex
	passing bool // guarded by mu: the terminal's last line is progress
}

func newScreen(w io.Writer) *screen {
	s := &screen{w: w}
	f, ok := w.(*os.File)
	if !ok {
		return s
	}
	if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
		s.width = max(int(size.Col), 1)
		if size.Col == 0 { // a terminal that does not know
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

// line writes one line that stays.
func (s *screen) line(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	fmt.Fprintf(s.w, format+"\n", args...)
}

// progress writes a line that the next one replaces on a terminal.
func (s *screen) progress(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.width == 0 {
		fmt.Fprintln(s.w, text)
		return
	}
	s.erase()
	fmt.Fprint(s.w, text[:min(len(text), s.width-1)]) // one that wraps could not be erased
	s.passing = true
}

// settle ends the last line, so that what follows starts on its own.
func (s *screen) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.passing {
		fmt.Fprintln(s.w)
		s.passing = false
	}
}

// erase takes progress away. It needs mu.
func (s *screen) erase() {
	if s.passing {
		fmt.Fprint(s.w, eraseLine)
		s.passing = false
	}
}

// Write lets logs in between; they come in whole lines.
func (s *screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	return s.w.Write(b)
}
