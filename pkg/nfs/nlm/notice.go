package nlm

import (
	"context"
	"errors"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A notice of a restart is one datagram, and its sender may be forged. So the client asks the status
// monitor of the server itself, over TCP: the state number of the server grows with each restart of
// the host. A notice without a new number costs no lock.
//
// The number is known only if it was that of the server when the locks were set. So the client asks
// for it while the connection shows that the server has not restarted since the locks were set or
// reclaimed.

// A serverState is the state number of the server when the locks were set or reclaimed.
type serverState struct {
	known  bool
	number uint32
	losses uint64 // lost connections when the number was learned
}

// learnState asks for the state number of the server, unless it is known or the server may have
// restarted since a lock was set. Only run calls it.
func (c *Client) learnState() {
	losses, state := c.link.losses(), c.knownState()
	if !c.cfg.Service.state().callbacks || losses != c.reclaimed || c.link.current() == nil ||
		state.known && state.losses == losses {
		return
	}
	number, err := c.askState()
	if err != nil {
		c.log.Debug("notices of server restarts are not verified", "server", c.cfg.Host, "reason", err)
		return
	}
	// The end of the connection would mean that the server has perhaps restarted before it replied.
	_, _ = c.link.call(c.ctx, nlmwire.ProcNull, sunrpc.AppendAuthNone(nil), nil, nil)
	if c.link.losses() == losses {
		c.mu.Lock()
		c.mu.state = serverState{known: true, number: number, losses: losses}
		c.mu.Unlock()
	}
}

func (c *Client) knownState() serverState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.state
}

// hasRestarted reports whether the server has restarted since the locks were set, or whether this is
// unknown.
func (c *Client) hasRestarted() bool {
	state := c.knownState()
	if !state.known {
		return true
	}
	number, err := c.askState()
	return err != nil || number != state.number
}

// errNoState means that the status monitor of the server does not tell its state number.
var errNoState = errors.New("status monitor of the server does not tell its state number")

// askState asks the status monitor of the server for its state number (SM_STAT).
func (c *Client) askState() (number uint32, err error) {
	ctx, cancel := context.WithTimeout(c.ctx, remoteTimeout)
	defer cancel()
	port, err := mountd.GetPort(ctx, mountd.Args{Host: c.cfg.Host, PortmapPort: c.mapper, Timeout: remoteTimeout},
		nlmwire.NSMProgram, nlmwire.NSMVersion)
	if err != nil {
		return 0, err
	}
	// SM_STAT needs no reserved source port, of which there are few. The monitor replies only for a
	// host whose name it can resolve.
	results, err := callOnce(ctx, resvport.DialAny, c.cfg.Host, port, &sunrpc.Message{Prog: nlmwire.NSMProgram,
		Vers: nlmwire.NSMVersion, Proc: nlmwire.NSMStat, Args: nlmwire.AppendNSMStat(nil, loopback)})
	if err != nil {
		return 0, err
	}
	ok, number, err := nlmwire.ParseMonRes(results)
	if err == nil && (!ok || number%2 == 0) { // a number is odd while its host is up (XNFS chapter 11)
		err = errNoState
	}
	return number, err
}
