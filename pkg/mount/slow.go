package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// phases holds the times of the calls of one mount in each phase, and its slowest calls. It passes
// sampled calls to traces.
type phases struct {
	procs    [nfs3.NumProcs]metrics.Times
	aclProcs [nfsacl.NumProcs]metrics.Times
	ops      [kernel.NumOps]metrics.Times
	slowRPCs ledger.Slowest[slowCall]
	slowOps  ledger.Slowest[slowCall]
	traces   *traces // nil if traces are off
}

// A slowCall is a control.SlowCall, in less memory.
type slowCall struct {
	control.SlowCall
	times ledger.Times
}

// rpcEnded is xprt.Config.Observe of a connection. peer returns the address of the server.
func (p *phases) rpcEnded(ctx context.Context, connection int, peer func() netip.AddrPort, c *xprt.Ended) {
	r := kernel.RequestOf(ctx)
	if r != nil {
		r.AddCall(&c.Times)
	}
	if p.traces != nil {
		p.traces.rpcEnded(ctx, r, connection, peer, c)
	}
	switch {
	case c.Prog == nfs3.Program && c.Vers == nfs3.Version && c.Proc < uint32(len(p.procs)):
		p.procs[c.Proc].Observe(&c.Times)
	case c.Prog == nfsacl.Program && c.Vers == nfsacl.Version && c.Proc < uint32(len(p.aclProcs)) &&
		nfsacl.Proc(c.Proc) != nfsacl.ProcNull: // its name is that of another procedure
		p.aclProcs[c.Proc].Observe(&c.Times)
	}
	if !p.slowRPCs.Wants(&c.Times) {
		return
	}
	s := control.SlowCall{Name: procedureName(c.Prog, c.Vers, c.Proc), Connection: connection,
		Resends: max(c.Sends-1, 0), Error: errorKind(c.Err), CallOwner: ownerOf(ctx, c.Proc)}
	if c.XID != 0 {
		s.XID = fmt.Sprintf("%#x", c.XID)
	}
	p.slowRPCs.Add(&c.Times, slowCall{s, c.Times})
}

func (p *phases) requestEnded(r *kernel.Request) {
	p.ops[r.Op].Observe(&r.Times)
	if p.traces != nil {
		p.traces.requestEnded(r)
	}
	if !p.slowOps.Wants(&r.Times) {
		return
	}
	owner := vfs.Owner{PID: r.Header.Pid, UID: r.Header.Uid}
	s := control.SlowCall{Name: r.Op.String(), Calls: r.Calls, CallOwner: describeOwner(owner)}
	if r.Status > 0 {
		s.Error = unix.ErrnoName(unix.Errno(r.Status))
	}
	p.slowOps.Add(&r.Times, slowCall{s, r.Times})
}

// errorKind describes the error of a call without names and addresses.
func errorKind(err error) string {
	var interrupted *xprt.InterruptedError
	var timeout *xprt.TimeoutError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &interrupted):
		return "interrupted"
	case errors.As(err, &timeout):
		return "timeout"
	case errors.Is(err, xprt.ErrClosed):
		return "unmounted"
	}
	return "invalid reply"
}

// Slow implements mountInstance.
func (s *mountStack) Slow() control.SlowCalls {
	now := ledger.Now()
	return control.SlowCalls{Requests: slowCalls(s.phases.slowOps.All(now)),
		Calls: slowCalls(s.phases.slowRPCs.All(now))}
}

func slowCalls(all []slowCall) []control.SlowCall {
	calls := make([]control.SlowCall, len(all))
	for i := range all {
		c, t := &calls[i], &all[i].times
		*c = all[i].SlowCall
		c.Ended, c.Total, c.Phases = t.End().Wall(), t.Total().Seconds(), make(map[string]float64)
		for p := range ledger.NumPhases {
			if d := t.Spent(p); d > 0 {
				c.Phases[p.String()] = d.Seconds()
			}
		}
	}
	return calls
}

// named returns those of all that have samples.
func named[N ~uint8 | ~uint32](all []metrics.Times, name func(N) string) []metrics.NamedTimes {
	var l []metrics.NamedTimes
	for i := range all {
		if all[i].Durations().Count > 0 {
			l = append(l, metrics.NamedTimes{Name: name(N(i)), Times: &all[i]})
		}
	}
	return l
}
