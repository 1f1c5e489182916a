package mount

import (
	"net/netip"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// callTimes returns times of a call with some phases.
func callTimes() (times ledger.Times) {
	now := ledger.Now()
	times.Begin(now)
	times.Mark(ledger.PhaseServer, now+1000)
	return times
}

// TestStatusOfTracedReply checks which replies of the server count as failures.
func TestStatusOfTracedReply(t *testing.T) {
	for _, tt := range []struct {
		proc   nfs3.Proc
		result []byte
		status string
		want   otlp.Result
	}{
		{nfs3.ProcWrite, []byte{0, 0, 0, 0}, "NFS3_OK", otlp.Result{}},
		{nfs3.ProcRead, []byte{0, 0, 0, 70}, "NFS3ERR_STALE", otlp.Result{Error: "NFS3ERR_STALE", Failure: true}},
		{nfs3.ProcLookup, []byte{0, 0, 0, 2}, "NFS3ERR_NOENT", otlp.Result{Error: "NFS3ERR_NOENT"}},
		{nfs3.ProcNull, []byte{0, 0, 0, 70}, "", otlp.Result{}},
		{nfs3.ProcRead, []byte{0, 0, 0}, "", otlp.Result{}},
	} {
		e := xprt.Ended{Proc: uint32(tt.proc), Message: &sunrpc.Message{Result: tt.result}}
		if status, got := replyStatus(&e); status != tt.status || got != tt.want {
			t.Errorf("%v with results %v: got %q and %+v, want %q and %+v", tt.proc, tt.result, status, got, tt.status,
				tt.want)
		}
	}
}

// TestUnsampledCallsDoNotAllocate checks the calls of a mount with traces.
func TestUnsampledCallsDoNotAllocate(t *testing.T) {
	x, err := otlp.New(otlp.Config{Endpoint: "http://127.0.0.1:1", Ratio: 1e-12, Log: hclog.NewNullLogger()})
	kit.Must(t, err)
	defer x.Close(time.Minute)
	s := &mountStack{shared: &shared{traces: x}}
	s.phases.traces = s.newTraces()
	p := &s.phases
	somePeer := func() netip.AddrPort { return netip.AddrPort{} }
	call := xprt.Ended{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRead),
		Message: &sunrpc.Message{}, Times: callTimes()}
	ended := &kernel.Request{Header: &fuse.InHeader{}, Op: kernel.OpRead, Times: callTimes()}
	for range ledger.SlowCalls { // slower ones, so that no call is among the slowest
		slow, times := call, &call.Times
		slow.Times.Mark(ledger.PhaseReturn, times.End()+1000)
		p.slowRPCs.Add(&slow.Times, slowCall{})
		p.slowOps.Add(&slow.Times, slowCall{})
	}
	if n := testing.AllocsPerRun(100, func() {
		ended.Tag = nil
		p.rpcEnded(ended, 0, somePeer, &call)
		p.requestEnded(ended)
	}); n != 0 {
		t.Errorf("allocations per request: got %v, want 0", n)
	}
}
