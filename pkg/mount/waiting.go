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

// pendingCalls lists the calls of all connections that have not ended, the oldest first. It waits for no
// server.
func (s *mountStack) pendingCalls() []control.PendingCall {
	calls := []control.PendingCall{}
	now := time.Now()
	for i, t := range s.transports.all {
		for _, c := range t.Calls() {
			calls = append(calls, explainCall(i, &c, now))
		}
	}
	slices.SortStableFunc(calls, func(a, b control.PendingCall) int { return cmp.Compare(b.Age, a.Age) })
	return calls
}

func explainCall(connection int, c *xprt.Call, now time.Time) control.PendingCall {
	w := control.PendingCall{Procedure: procedure(c), Connection: connection, Slot: c.Slot, WaitsFor: c.Waits,
		Age: now.Sub(c.Began).Seconds(), SinceSent: -1}
	if c.XID != 0 {
		w.XID = fmt.Sprintf("%#x", c.XID)
	}
	if !c.Sent.IsZero() {
		w.SinceSent = now.Sub(c.Sent).Seconds()
	}
	setOwner(&w, c)
	return w
}

// procedure is its name, or its number where it is none of NFS version 3.
func procedure(c *xprt.Call) string {
	if c.Prog == nfs3.Program && c.Vers == nfs3.Version {
		return nfs3.Proc(c.Proc).String()
	}
	return fmt.Sprintf("%d.%d.%d", c.Prog, c.Vers, c.Proc)
}

// setOwner fills in who waits for c.
func setOwner(w *control.PendingCall, c *xprt.Call) {
	if c.Ctx == nil {
		w.Owner = control.OwnerGone
		return
	}
	o, ok := fusefs.OwnerOf(c.Ctx)
	switch {
	case ok && o.WriteBack:
		w.Owner = control.OwnerWriteBack
	case ok && o.PID == 0:
		w.Owner, w.UID = control.OwnerKernel, o.UID
	case ok:
		w.Owner, w.UID = control.OwnerProcess, o.UID
		w.PID, w.Command = process(o.PID)
	case nfs3.Proc(c.Proc) == nfs3.ProcNull: // nobody else calls it
		w.Owner = control.OwnerLiveness
	default:
		w.Owner = control.OwnerDaemon
	}
}

// process finds the process of a thread, and its name: "" when it has ended. The files that it
// reads wait for nobody.
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

// history is that of all connections, the oldest event first.
func (s *mountStack) history() []control.ConnEvent {
	notes := []control.ConnEvent{}
	for i, t := range s.transports.all {
		for _, n := range t.History() {
			notes = append(notes, control.ConnEvent{Time: n.Time, Connection: i, Event: n.Event, Cause: n.Cause,
				Times: n.Times})
		}
	}
	slices.SortStableFunc(notes, func(a, b control.ConnEvent) int { return a.Time.Compare(b.Time) })
	return notes
}
