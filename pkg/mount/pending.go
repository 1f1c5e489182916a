package mount

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// pendingCalls returns the pending calls of all connections, the oldest first. It does not wait for
// the server.
func (s *mountStack) pendingCalls() []control.PendingCall {
	calls := []control.PendingCall{}
	for i, t := range s.transports.all {
		l := t.Calls()
		now := time.Now() // after the copy, so that no call began or was sent later
		for _, c := range l {
			calls = append(calls, pendingCall(i, &c, now))
		}
	}
	slices.SortStableFunc(calls, func(a, b control.PendingCall) int { return cmp.Compare(b.Age, a.Age) })
	return calls
}

func pendingCall(connection int, c *xprt.Call, now time.Time) control.PendingCall {
	p := control.PendingCall{Procedure: procedureName(c), Connection: connection, Slot: c.Slot, WaitsFor: c.Waits,
		Age: now.Sub(c.Began).Seconds(), SinceSent: -1}
	if c.XID != 0 {
		p.XID = fmt.Sprintf("%#x", c.XID)
	}
	if !c.Sent.IsZero() {
		p.SinceSent = now.Sub(c.Sent).Seconds()
	}
	setOwner(&p, c)
	return p
}

// procedureName returns the name of the procedure of c, or its numbers if it is not one of NFS
// version 3.
func procedureName(c *xprt.Call) string {
	if c.Prog == nfs3.Program && c.Vers == nfs3.Version {
		return nfs3.Proc(c.Proc).String()
	}
	return fmt.Sprintf("%d.%d.%d", c.Prog, c.Vers, c.Proc)
}

// setOwner sets the owner of p.
func setOwner(p *control.PendingCall, c *xprt.Call) {
	if c.Ctx == nil {
		p.Owner = control.OwnerGone
		return
	}
	o, ok := fusefs.OwnerOf(c.Ctx)
	switch {
	case ok && o.WriteBack:
		p.Owner = control.OwnerWriteBack
	case ok && o.PID == 0:
		p.Owner, p.UID = control.OwnerKernel, o.UID
	case ok:
		p.Owner, p.UID = control.OwnerProcess, o.UID
		p.PID, p.Command = process(o.PID)
	case nfs3.Proc(c.Proc) == nfs3.ProcNull: // only keepalives call NULL
		p.Owner = control.OwnerLiveness
	default:
		p.Owner = control.OwnerDaemon
	}
}

// process returns the process of a thread and its name; the name is "" if the process has ended. It
// reads status and comm below /proc, which do not block on the process.
func process(tid uint32) (pid uint32, command string) {
	status, err := os.ReadFile(filepath.Join("/proc", strconv.FormatUint(uint64(tid), 10), "status"))
	if err != nil {
		return tid, ""
	}
	pid = tid
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		if string(name) != "Tgid" {
			continue
		}
		if n, err := strconv.ParseUint(string(bytes.TrimSpace(value)), 10, 32); err == nil {
			pid = uint32(n)
		}
		break
	}
	comm, err := os.ReadFile(filepath.Join("/proc", strconv.FormatUint(uint64(pid), 10), "comm"))
	if err != nil {
		return pid, ""
	}
	return pid, string(bytes.TrimSuffix(comm, []byte("\n")))
}

// history returns the latest events of all connections, the oldest first.
func (s *mountStack) history() []control.ConnEvent {
	events := []control.ConnEvent{}
	for i, t := range s.transports.all {
		for _, e := range t.History() {
			events = append(events, control.ConnEvent{Time: e.Time, Connection: i, Event: e.Event, Cause: e.Cause,
				Times: e.Times})
		}
	}
	slices.SortStableFunc(events, func(a, b control.ConnEvent) int { return a.Time.Compare(b.Time) })
	return events
}
