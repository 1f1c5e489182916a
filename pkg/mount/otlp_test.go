package mount

import (
	"context"
	"encoding/binary"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/collector"
)

// newTracedStack returns a mount without layers, whose phases have traces of a ratio.
func newTracedStack(t *testing.T, endpoint string, ratio float64) *mountStack {
	t.Helper()
	x, err := otlp.New(otlp.Config{Endpoint: endpoint, Ratio: ratio, Log: hclog.NewNullLogger()})
	if err != nil {
		t.Fatal(err)
	}
	s := &mountStack{plan: plan{spec: Spec{Host: "nas", Export: "/e"}, dir: "/mnt"}, shared: &shared{traces: x}}
	s.phases.traces = s.newTraces()
	return s
}

func somePeer() netip.AddrPort { return netip.MustParseAddrPort("192.0.2.1:20049") }

// callTimes returns times of a call with some phases.
func callTimes() (times ledger.Times) {
	now := ledger.Now()
	times.Begin(now)
	times.Mark(ledger.PhaseServer, now+1000)
	return times
}

// TestTracesOfCalls passes RPCs that belong to no request.
func TestTracesOfCalls(t *testing.T) {
	c := collector.Start(t)
	s := newTracedStack(t, c.URL, 1)
	result := func(status nfs3.Status) []byte { return binary.BigEndian.AppendUint32(nil, uint32(status)) }
	all := []struct {
		ended              xprt.Ended
		result             []byte
		name, owner        string
		status, errorType  any
		failed             bool
		argBytes, resBytes int64
	}{
		{xprt.Ended{Prog: nfs3.Program, Vers: 3, Proc: uint32(nfs3.ProcWrite)}, result(nfs3.OK), "nfs/WRITE",
			control.OwnerDaemon, "NFS3_OK", nil, false, 12, 11},
		{xprt.Ended{Prog: nfs3.Program, Vers: 3, Proc: uint32(nfs3.ProcRead)}, result(nfs3.ErrStale), "nfs/READ",
			control.OwnerDaemon, "NFS3ERR_STALE", "NFS3ERR_STALE", true, 12, 11},
		{xprt.Ended{Prog: nfs3.Program, Vers: 3, Proc: uint32(nfs3.ProcLookup)}, result(nfs3.ErrNoEnt), "nfs/LOOKUP",
			control.OwnerDaemon, "NFS3ERR_NOENT", "NFS3ERR_NOENT", false, 12, 11},
		{xprt.Ended{Prog: nfs3.Program, Vers: 3}, nil, "nfs/NULL", control.OwnerLiveness, nil, nil, false, 12, 7},
		{xprt.Ended{Prog: nfsacl.Program, Vers: 3, Proc: uint32(nfsacl.ProcGetACL), Err: &xprt.TimeoutError{}}, nil,
			"nfs_acl/GETACL", control.OwnerDaemon, nil, "timeout", true, 12, 0},
		{xprt.Ended{Prog: 7, Vers: 8, Proc: 9, Err: xprt.ErrClosed}, nil, "7/7.8.9", control.OwnerDaemon, nil,
			"unmounted", true, 12, 0},
	}
	for _, tt := range all {
		e := tt.ended
		e.Message = &sunrpc.Message{Args: make([]byte, 8), ArgData: make([]byte, 4), Result: tt.result,
			ResultDataLen: 7}
		e.Times = callTimes()
		s.phases.rpcEnded(t.Context(), 1, somePeer, &e)
	}
	s.shared.traces.Close(time.Minute)
	spans := make(map[string]collector.Span)
	for _, span := range c.Spans() {
		spans[span.Name] = span
	}
	for _, tt := range all {
		a := spans[tt.name].Attributes
		if a["nfsrdmad.owner.type"] != tt.owner || a["rpc.response.status_code"] != tt.status ||
			a["error.type"] != tt.errorType || spans[tt.name].Failed != tt.failed ||
			a["nfsrdmad.rpc.args.size"] != tt.argBytes || a["nfsrdmad.rpc.results.size"] != tt.resBytes ||
			a["server.address"] != "nas" || a["network.peer.address"] != "192.0.2.1" {
			t.Errorf("%s: got %+v, want %+v", tt.name, spans[tt.name], tt)
		}
	}
}

// TestTracesOfRequests passes requests with and without a process.
func TestTracesOfRequests(t *testing.T) {
	c := collector.Start(t)
	s := newTracedStack(t, c.URL, 1)
	for op, e := range map[fusefs.Op]fusefs.Ended{
		fusefs.OpRead:  {Owner: fusefs.Owner{PID: uint32(unix.Gettid()), UID: 5}, Bytes: 9},
		fusefs.OpWrite: {Owner: fusefs.Owner{UID: 6}, Status: fuse.EIO},
		fusefs.OpOpen:  {Status: fuse.ENOENT},
	} {
		e.Op, e.Times, e.Tag = op, callTimes(), s.phases.traces.sample()
		s.phases.requestEnded(e)
	}
	s.shared.traces.Close(time.Minute)
	spans := make(map[string]collector.Span)
	for _, span := range c.Spans() {
		spans[span.Name] = span
	}
	if a := spans["fuse/read"].Attributes; a["nfsrdmad.owner.type"] != control.OwnerProcess ||
		a["nfsrdmad.owner.pid"] != int64(os.Getpid()) || a["nfsrdmad.owner.uid"] != int64(5) ||
		a["nfsrdmad.fuse.bytes"] != int64(9) || a["error.type"] != nil || spans["fuse/read"].Failed {
		t.Errorf("read: got %+v, want a request of this process", spans["fuse/read"])
	}
	if a := spans["fuse/write"].Attributes; a["nfsrdmad.owner.type"] != control.OwnerKernel ||
		a["nfsrdmad.owner.pid"] != nil || a["nfsrdmad.owner.uid"] != int64(6) || a["error.type"] != "EIO" ||
		!spans["fuse/write"].Failed {
		t.Errorf("write: got %+v, want a failed request of the kernel", spans["fuse/write"])
	}
	if s := spans["fuse/open"]; s.Attributes["error.type"] != "ENOENT" || s.Failed {
		t.Errorf("open: got %+v, want ENOENT, and no failure", s)
	}
}

// TestUnsampledCallsDoNotAllocate checks the calls of a mount with traces.
func TestUnsampledCallsDoNotAllocate(t *testing.T) {
	s := newTracedStack(t, "http://127.0.0.1:1", 1e-12)
	defer s.shared.traces.Close(time.Minute)
	p := &s.phases
	call := xprt.Ended{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRead),
		Message: &sunrpc.Message{}, Times: callTimes()}
	ended := fusefs.Ended{Op: fusefs.OpRead, Times: callTimes()}
	for range ledger.SlowCalls { // slower ones, so that no call is among the slowest
		slow, times := call, &call.Times
		slow.Times.Mark(ledger.PhaseReturn, times.End()+1000)
		p.slowRPCs.Add(&slow.Times, slowCall{})
		p.slowOps.Add(&slow.Times, slowCall{})
	}
	ctx := context.Background()
	if n := testing.AllocsPerRun(100, func() {
		ended.Tag = p.traces.sample()
		p.rpcEnded(ctx, 0, somePeer, &call)
		p.requestEnded(ended)
	}); n != 0 {
		t.Errorf("allocations per request: got %v, want 0", n)
	}
}
