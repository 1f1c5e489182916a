package mount

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
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
	p := control.PendingCall{Procedure: procedureName(c.Prog, c.Vers, c.Proc), Connection: connection,
		Slot: c.Slot, WaitsFor: c.Waits, CallOwner: ownerOf(c.Ctx, c.Proc),
		Age: now.Sub(c.Began).Seconds(), SinceSent: -1}
	if c.XID != 0 {
		p.XID = fmt.Sprintf("%#x", c.XID)
	}
	if !c.Sent.IsZero() {
		p.SinceSent = now.Sub(c.Sent).Seconds()
	}
	return p
}

// procedureName returns the name of a procedure of NFS version 3 or NFSACL, or else its numbers.
func procedureName(prog, vers, proc uint32) string {
	switch {
	case prog == nfs3.Program && vers == nfs3.Version:
		return nfs3.Proc(proc).String()
	case prog == nfsacl.Program && vers == nfsacl.Version:
		return nfsacl.Proc(proc).String()
	}
	return fmt.Sprintf("%d.%d.%d", prog, vers, proc)
}

// ownerOf returns the owner of a call of a procedure with the context ctx, which is nil after the
// caller has returned.
func ownerOf(ctx context.Context, proc uint32) control.CallOwner {
	if ctx == nil {
		return control.CallOwner{Owner: control.OwnerGone}
	}
	o, ok := vfs.OwnerOf(ctx)
	switch {
	case ok:
		return describeOwner(o)
	case nfs3.Proc(proc) == nfs3.ProcNull: // only keepalives call NULL
		return control.CallOwner{Owner: control.OwnerLiveness}
	}
	return control.CallOwner{Owner: control.OwnerDaemon}
}

func describeOwner(o vfs.Owner) control.CallOwner {
	switch {
	case o.WriteBack:
		return control.CallOwner{Owner: control.OwnerWriteBack}
	case o.PID == 0:
		return control.CallOwner{Owner: control.OwnerKernel, UID: o.UID}
	}
	pid, command := process(o.PID)
	return control.CallOwner{Owner: control.OwnerProcess, UID: o.UID, PID: pid, Command: command}
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
