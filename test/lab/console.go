package lab

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
)

// A boot is one start of a guest's kernel, as its console shows it.
type boot struct {
	after string // ID of the previous boot, whose last output may still arrive

	settled chan struct{} // closed when id or err is set
	id      string        // boot ID, set when the guest serves
	err     error         // why the guest will not serve
}

// A console holds the output of a guest's kernel and its first process, over all boots. It is safe
// for concurrent use.
type console struct {
	mu          sync.Mutex
	lines       []string
	current     *boot
	panicC      chan struct{} // closed at the first panic of the current boot
	hasPanicked bool
}

// ErrPanic reports that the guest's kernel panicked while a command ran. The guest then does
// nothing until Reset.
var ErrPanic = errors.New("guest kernel panicked")

// beginBoot begins a new boot.
func (c *console) beginBoot(after string) *boot {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = &boot{after: after, settled: make(chan struct{})}
	c.panicC = make(chan struct{})
	c.hasPanicked = false
	return c.current
}

// panicked returns a channel that is closed when the current boot's kernel panics.
func (c *console) panicked() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.panicC
}

// note adds a line that the lab writes, not the guest.
func (c *console) note(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lines = append(c.lines, fmt.Sprintf("==== lab: "+format, args...))
}

// read adds the lines of r until its end.
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
	c.lines = append(c.lines, line)
	b := c.current
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
		settle("", fmt.Errorf("guest did not get ready: %s", why))
	}
	if strings.Contains(line, "Kernel panic - not syncing") && !c.hasPanicked {
		c.hasPanicked = true
		close(c.panicC)
		settle("", ErrPanic)
	}
}

// text returns all lines so far.
func (c *console) text() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.lines...)
}
