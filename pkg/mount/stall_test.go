package mount

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestForcedUmountIsBounded checks the bound of a forced unmount: of a server that accepts data for
// ever, and of a layer that does not return.
func TestForcedUmountIsBounded(t *testing.T) {
	kit.NeedsRoot(t)
	synctest.Test(t, func(t *testing.T) {
		s := newFakeMount()
		s.flush = func(ctx context.Context, _ time.Duration) { <-ctx.Done() }
		s.unmount = func(control.UmountMode) (bool, error) { return false, nil } // Wait does not return
		tab := newTable(&shared{log: hclog.NewNullLogger()}, DefaultOptions(), time.Minute,
			func(context.Context, plan) (mountInstance, error) { return s, nil })
		r := control.MountRequest{Spec: "server:/export", Dir: t.TempDir()}
		if _, err := tab.Mount(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		err := tab.Umount(t.Context(), control.UmountRequest{Dir: r.Dir, Mode: control.UmountForce})
		if took := time.Since(begin); took > 5*time.Second { // as the documentation says
			t.Errorf("forced unmount: got %v, want at most 5 s", took)
		}
		isError(t, err, control.CodeMount, "timeout")
		s.end()
		synctest.Wait()
	})
}

// TestFindStall checks what counts as a stall, and from when.
func TestFindStall(t *testing.T) {
	start := time.Now()
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	call := func(began int) *xprt.Call {
		return &xprt.Call{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRead), Began: at(began)}
	}
	request := func(age int) kernel.Waiting {
		return kernel.Waiting{Op: kernel.OpFsync, Age: time.Duration(age) * time.Second}
	}
	var f stallFinder
	for _, step := range []struct {
		what         string
		at           int
		look         sighting
		age, callAge int
		reason       string
	}{
		{"nothing", 0, sighting{}, 0, 0, ""},
		{"a flush with progress", 100, sighting{progress: 1, request: request(100), requests: true}, 0, 0, ""},
		{"a flush whose progress ended", 130, sighting{progress: 1, request: request(130), requests: true}, 30, 0,
			"no reply to a request fsync; the server answers the calls of the mount"},
		{"a call of the flush", 140, sighting{progress: 1, request: request(140), requests: true, call: call(90)},
			50, 50, "no reply from SERVER to READ"},
		{"a lost connection", 150, sighting{progress: 1, lost: true, lastError: errors.New("EOF")}, 0, 0,
			"no connection to SERVER: EOF"},
		{"the same with a call", 160, sighting{progress: 1, lost: true, call: call(155)}, 10, 5,
			"no connection to SERVER"},
		{"a connection", 170, sighting{progress: 1}, 0, 0, ""},
		{"the next loss", 180, sighting{progress: 1, lost: true}, 0, 0, "no connection to SERVER"},
	} {
		got := f.find(at(step.at), "SERVER", &step.look)
		if got.age != time.Duration(step.age)*time.Second || got.callAge != time.Duration(step.callAge)*time.Second ||
			got.age > 0 && got.reason != step.reason {
			t.Errorf("%s: got %+v, want age %d s, call %d s, reason %q", step.what, got, step.age, step.callAge,
				step.reason)
		}
	}
	sent, waits := call(0), call(0)
	sent.Sent, sent.Waits, waits.Waits = at(1), xprt.WaitReply, xprt.WaitSlot
	late, reconnects := *sent, *sent
	late.Waits, reconnects.Waits = xprt.WaitLate, xprt.WaitReconnect
	for _, c := range []struct {
		call       *xprt.Call
		lost, want bool
	}{{sent, false, true}, {waits, false, false}, {&late, false, false}, {&reconnects, true, true},
		{&reconnects, false, false}} {
		if got := countsForStall(c.call, c.lost); got != c.want {
			t.Errorf("call that waits for %s, lost %t: counts %t, want %t", c.call.Waits, c.lost, got, c.want)
		}
	}
}

// TestStall checks what a stall changes: list, log, and with stallabort the mount itself.
func TestStall(t *testing.T) {
	kit.NeedsRoot(t)
	var log bytes.Buffer
	s := newFakeMount()
	common := &shared{log: hclog.New(&hclog.LoggerOptions{Output: &log})}
	tab := newTable(common, DefaultOptions(), time.Minute,
		func(context.Context, plan) (mountInstance, error) { return s, nil })
	dir := t.TempDir()
	_, err := tab.Mount(t.Context(), control.MountRequest{Spec: "server:/export", Dir: dir,
		Options: "stall=10,stallabort=20"})
	kit.Must(t, err)
	logged := func(want int, text string) {
		t.Helper()
		if n := strings.Count(log.String(), text); n != want {
			t.Errorf("log has %q %d times, want %d: %s", text, n, want, &log)
		}
	}
	state := func(want control.MountState, reason string, seconds float64) {
		t.Helper()
		l := tab.List()
		if len(l) != 1 || l[0].State != want || l[0].Reason != reason || l[0].Stalled != seconds {
			t.Errorf("list: got %+v, want state %s, reason %q, %v s", l, want, reason, seconds)
		}
	}
	began := time.Now().Add(-time.Hour)
	s.stalled = func() stall { return stall{age: 11 * time.Second, callAge: 11 * time.Second, reason: "no reply"} }
	for range 2 {
		tab.checkStalls(began)
		state(control.StateStalled, "no reply", 11)
	}
	logged(1, "the mount does not answer")
	if snaps := tab.Snapshots(); len(snaps) != 1 || snaps[0].Stalled != 11*time.Second || snaps[0].Stalls != 1 {
		t.Errorf("snapshots: got %+v, want one stalled mount", snaps)
	}
	if n := tab.states(); n["stalled"] != 1 || n["mounted"] != 0 || n["kept"] != 0 ||
		len(n) != len(control.MountStates) {
		t.Errorf("states: got %v, want all states and one stalled mount", n)
	}
	s.stalled = func() stall { return stall{} }
	tab.checkStalls(began)
	state(control.StateMounted, "", 0)
	logged(1, "the mount answers again")
	logged(0, "aborting")
	if snaps := tab.Snapshots(); snaps[0].Stalled != 0 || snaps[0].Stalls != 1 {
		t.Errorf("snapshots: got %+v, want one stall that has ended", snaps)
	}

	s.stalled = func() stall { return stall{age: 21 * time.Second, callAge: 19 * time.Second, reason: "try later"} }
	tab.checkStalls(began)
	logged(0, "aborting") // the calls have replies
	tab.checkStalls(time.Now().Add(-5 * time.Second))
	state(control.StateMounted, "", 0) // this process was stopped until 5 s ago

	s.stalled = func() stall { return stall{age: 21 * time.Second, callAge: 21 * time.Second, reason: "no reply"} }
	forced := 0
	s.unmount = func(m control.UmountMode) (bool, error) {
		if m == control.UmountForce {
			forced++
		}
		return true, nil
	}
	tab.checkStalls(began)
	tab.checkStalls(began) // does not abort again
	<-s.isClosed
	tab.work.Wait()
	if n := tab.stallAborts.Load(); n != 1 {
		t.Errorf("aborts: got %d, want 1", n)
	}
	if l := tab.List(); len(l) != 0 || forced != 1 {
		t.Errorf("after the abort: got mounts %+v and %d forced unmounts, want none and 1", l, forced)
	}
	logged(1, "aborting the mount, because it does not answer")
}

// TestStallOfRestoringMount checks that a mount of an earlier process counts as stalled when its
// server has not replied for some time, and not while it waits for its turn to connect.
func TestStallOfRestoringMount(t *testing.T) {
	tab := newTable(&shared{log: hclog.NewNullLogger()}, DefaultOptions(), time.Minute, nil)
	opts := DefaultOptions()
	began := time.Now().Add(-time.Hour)
	e := &entry{plan: plan{dir: "/mnt", opts: opts}, state: control.StateRestoring, reason: "connects", since: began}
	tab.mu.entries[e.dir] = e
	tab.checkStalls(began)
	if l := tab.List(); l[0].Stalled != 0 {
		t.Errorf("list before the first attempt failed: got %+v, want no stall", l)
	}
	tab.setReason(e, control.StateRestoring, errors.New("no route"))
	tab.checkStalls(began)
	if l := tab.List(); l[0].Stalled != 0 {
		t.Errorf("list before the bound: got %+v, want no stall", l)
	}
	e.refused = time.Now().Add(-2 * opts.Stall)
	tab.checkStalls(began)
	if l := tab.List(); l[0].Stalled < opts.Stall.Seconds() || l[0].State != control.StateRestoring ||
		l[0].Reason != "no route" {
		t.Errorf("list after the bound: got %+v, want a stall", l)
	}
}

// TestLooked checks that the table looks again and again, that a mount that hangs stops this, and
// that a closed table reports no time.
func TestLooked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab := newTable(&shared{log: hclog.NewNullLogger()}, DefaultOptions(), time.Minute, nil)
		go tab.watchStalls()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if ago := time.Since(tab.Looked()); ago > stallTick {
			t.Errorf("the table looked %v ago, want at most %v", ago, stallTick)
		}
		s, hang := newFakeMount(), make(chan struct{})
		s.stalled = func() stall { <-hang; return stall{} }
		tab.mu.Lock()
		tab.mu.entries["/mnt"] = &entry{plan: plan{opts: DefaultOptions()}, instance: s}
		tab.mu.Unlock()
		time.Sleep(10 * time.Second)
		if ago := time.Since(tab.Looked()); ago < 8*time.Second {
			t.Errorf("during a hang: the table looked %v ago, want 8 s or more", ago)
		}
		close(hang)
		tab.mu.Lock()
		tab.refuse()
		tab.mu.Unlock()
		synctest.Wait()
		if !tab.Looked().IsZero() {
			t.Error("after the close: got a time, want none")
		}
	})
}
