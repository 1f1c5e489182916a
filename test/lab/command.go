package lab

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// commandPorts is how many commands a guest runs at once.
	commandPorts = 4
	// commandTimeout is the limit of Run.
	commandTimeout = 2 * time.Minute
	// commandGrace is what the guest has for saying that it killed a command.
	commandGrace = 20 * time.Second
)

// A CommandError is a command that ran in the guest and failed.
type CommandError struct {
	Command  string
	ExitCode int // 137 is a command that was killed, at its time limit for example
	Output   string
}

func (e *CommandError) Error() string {
	return fmt.Sprintf("command in the guest: exit code %d: %s\n%s", e.ExitCode, e.Command, e.Output)
}

// ErrPower is what a command ends with when the guest was reset, or lost its power, under it.
var ErrPower = errors.New("the guest was reset or lost its power")

// A commandPort is one way into the guest.
type commandPort struct {
	mu   sync.Mutex // one command at a time
	conn net.Conn
	r    *bufio.Reader
}

// run runs a command in the boot with this id, and returns what it wrote to both its outputs. stop
// ends the wait early.
func (p *commandPort) run(stop context.Context, boot, command string, limit time.Duration) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn.SetDeadline(time.Now().Add(limit + commandGrace))
	defer context.AfterFunc(stop, func() { p.conn.SetDeadline(time.Unix(1, 0)) })()
	nonce := rand.Text()
	line := fmt.Sprintf("%s %s %d %s\n", boot, nonce, max(1, int(limit/time.Second)),
		base64.StdEncoding.EncodeToString([]byte(command)))
	fail := func(err error) (string, error) {
		if stop.Err() != nil {
			err = context.Cause(stop)
		}
		return "", fmt.Errorf("command in the guest: %w: %s", err, command)
	}
	if _, err := p.conn.Write([]byte(line)); err != nil {
		return fail(err)
	}
	var out strings.Builder
	for began := false; ; {
		line, err := p.r.ReadString('\n')
		if err != nil {
			return fail(err)
		}
		if !began { // what an earlier command left behind
			began = strings.HasSuffix(line, nonce+" begin\n")
			continue
		}
		code, ended := strings.CutPrefix(line, nonce+" end ")
		if !ended {
			out.WriteString(line)
			continue
		}
		// the line end before the marker is not the command's
		text := strings.TrimSuffix(out.String(), "\n")
		rc, err := strconv.Atoi(strings.TrimSpace(code))
		if err != nil {
			return fail(err)
		}
		if rc != 0 {
			return text, &CommandError{command, rc, text}
		}
		return text, nil
	}
}

// Run runs a shell command in the guest and returns what it wrote, to both outputs. A command that
// fails, or takes longer than two minutes, gives a *CommandError; ErrPower and ErrPanic are for a
// guest that went away under it. Up to four may run at once; more wait for one another.
func (g *Guest) Run(command string) (string, error) {
	return g.RunFor(command, commandTimeout)
}

// RunFor is Run with another limit.
func (g *Guest) RunFor(command string, limit time.Duration) (string, error) {
	if g.remote != nil {
		a := g.remote.ask(remoteRequest{Op: opRun, Command: command, Limit: limit})
		return a.Text, a.Err.unpack()
	}
	g.mu.Lock()
	m := g.machine
	g.mu.Unlock()
	if m == nil {
		return "", fmt.Errorf("command in the guest: it is off: %s", command)
	}
	return m.run(command, limit)
}

// MustRun is Run for a command that must succeed.
func (g *Guest) MustRun(command string) string {
	g.t.Helper()
	out, err := g.Run(command)
	if err != nil {
		g.t.Fatalf("%s: %v", g.opts.Name, err)
	}
	return out
}
