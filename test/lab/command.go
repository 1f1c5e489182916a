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
	// commandPorts is the number of commands that a guest can run at once.
	commandPorts = 4
	// commandTimeout is the time limit of Run.
	commandTimeout = 2 * time.Minute
	// commandGrace is the time that a guest has to report that it killed a command.
	commandGrace = 20 * time.Second
)

// A CommandError reports a command that ran in the guest and failed.
type CommandError struct {
	Command  string
	ExitCode int // 137 if the command was killed, for example at its time limit
	Output   string
}

func (e *CommandError) Error() string {
	return fmt.Sprintf("command in the guest: exit code %d: %s\n%s", e.ExitCode, e.Command, e.Output)
}

// ErrPower reports that the guest was reset, or lost its power, while a command ran.
var ErrPower = errors.New("guest was reset or lost its power")

// A commandPort is a serial port through which the guest runs commands.
type commandPort struct {
	mu   sync.Mutex // one command at a time
	conn net.Conn
	r    *bufio.Reader
}

// run runs a command in the boot with this ID and returns its standard output and standard error.
// It returns early when stop ends.
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
		if !began { // output of an earlier command
			began = strings.HasSuffix(line, nonce+" begin\n")
			continue
		}
		code, ended := strings.CutPrefix(line, nonce+" end ")
		if !ended {
			out.WriteString(line)
			continue
		}
		// command-port writes a newline before the marker; it is not part of the output.
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

// Run runs a shell command in the guest and returns its standard output and standard error. It
// returns a *CommandError if the command fails or takes longer than two minutes, and ErrPower or
// ErrPanic if the guest stops while the command runs. Four commands can run at once; further calls
// wait.
func (g *Guest) Run(command string) (string, error) {
	return g.RunFor(command, commandTimeout)
}

// RunFor is Run with another time limit.
func (g *Guest) RunFor(command string, limit time.Duration) (string, error) {
	if g.remote != nil {
		a := g.remote.ask(remoteRequest{Op: opRun, Command: command, Limit: limit})
		return a.Text, a.Err.unpack()
	}
	g.mu.Lock()
	m := g.machine
	g.mu.Unlock()
	if m == nil {
		return "", fmt.Errorf("command in the guest: guest is off: %s", command)
	}
	return m.run(command, limit)
}

// MustRun is Run, and ends the test if the command fails.
func (g *Guest) MustRun(command string) string {
	g.t.Helper()
	out, err := g.Run(command)
	if err != nil {
		g.t.Fatalf("%s: %v", g.opts.Name, err)
	}
	return out
}
