package lab

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// A boot is one start of a guest's kernel, as the console tells it.
type boot struct {
	after string // boot id of the boot before, which may still be heard

	settled chan struct{} // closed when id or err is set
	id      string        // boot id, once the guest serves
	err     error         // why it never will
}

// A console is what a guest's kernel and its first process say, over all boots. Safe for concurrent
// use.
type console struct {
	mu    sync.Mutex
	lines []string
	void  bool // what the current boot says is not kept
	cur   *boot
	died  chan struct{} // closed at the first panic of the current boot
	dead  bool
}

// ErrPanic is what a command ends with when the guest's kernel panicked. The guest stands still
// then, until it is reset.
var ErrPanic = errors.New("the guest's kernel panicked")

// expect begins a new boot.
func (c *console) expect(after string) *boot {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cur = &boot{after: after, settled: make(chan struct{})}
	c.died = make(chan struct{})
	c.dead, c.void = false, false
	return c.cur
}

// panicked is closed when the current boot's kernel panics.
func (c *console) panicked() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.died
}

// note adds a line of the lab's own.
func (c *console) note(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lines = append(c.lines, fmt.Sprintf("==== lab: "+format, args...))
}

// read takes in what r has until its end.
func (c *console) read(r io.Reader) {
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadString('\n')
		if line = strings.TrimRight(line, "\r\n"); line != "" {
			c.line(line)
		}
		if err != nil {
			return
		}
	}
}

func (c *console) line(line string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.void {
		c.lines = append(c.lines, line)
	}
	b := c.cur
	settle := func(id string, err error) {
		select {
		case <-b.settled:
		default:
			b.id, b.err = id, err
			close(b.settled)
		}
	}
	if id, ok := strings.CutPrefix(line, "LAB ready "); ok && id != b.after {
		settle(id, nil)
	}
	if why, ok := strings.CutPrefix(line, "LAB failed "); ok {
		settle("", fmt.Errorf("the guest did not get ready: %s", why))
	}
	if strings.Contains(line, "Kernel panic - not syncing") && !c.dead {
		c.dead = true
		close(c.died)
		settle("", ErrPanic)
	}
}

// tripped finds what a kernel says that has met a breakpoint of its own where there is none any
// more. It patches itself by way of breakpoints while it boots, and QEMU's emulation of several
// processors may run one that was taken back.
var tripped = regexp.MustCompile(`Oops: int3`)

// mark is a place in the log: here.
func (c *console) mark() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.lines)
}

// forgetTripped tells whether the kernel tripped since a mark. Then a note takes the place of all
// that it said, and will say until the next boot.
func (c *console) forgetTripped(mark int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.ContainsFunc(c.lines[mark:], tripped.MatchString) {
		return false
	}
	c.lines = append(c.lines[:mark], "==== lab: a boot that does not count: its kernel tripped over the emulator")
	c.void = true
	return true
}

// text is everything so far, one line each.
func (c *console) text() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.lines...)
}
