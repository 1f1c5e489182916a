package xprt

import (
	"bytes"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit/hostile"
)

// TestSendLongerThanInlineThreshold has a server whose inline results exceed the inline threshold.
// Stock Linux servers send these if the call offers no chunk. The message must fit into the
// Receive. Results that exceed the limit of the procedure fail the call, and nothing else.
func TestSendLongerThanInlineThreshold(t *testing.T) {
	tr := dial(t, hostile.Serve(t, softiwarp.New(softiwarp.Config{}), loopback).Addr(), nil)
	ctx, fh := testContext(t), testFH(t)
	const count = 8400
	for _, room := range []int{nfs3.MaxResultRead, nfs3.MaxResultRead + 2000} {
		args := sunrpc.AppendOpaque(nil, fh.Bytes())
		args = sunrpc.AppendUint64(args, 0)
		args = sunrpc.AppendUint32(args, count)
		m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRead), Cred: noCred,
			Args: args, ArgDataPos: len(args),
			MaxResult: room, Result: make([]byte, 0, room), ResultDataLen: -1}
		if err := tr.Call(ctx, &m); !isProtocol(err) {
			t.Errorf("READ of %d bytes with MaxResult %d: got %v, want a ProtocolError", count, room, err)
		}
	}
	buf := make([]byte, 40000)
	var r nfs3.ReadResult
	if err := nfs3.NewClient(tr).Read(ctx, noCred, fh, 5, buf, &r); err != nil ||
		!bytes.Equal(buf, hostile.Content(5, len(buf))) {
		t.Errorf("next READ: got %v, or wrong data", err)
	}
	if s := tr.Stats(); s.Connects != 1 || s.BadReply != 2 {
		t.Errorf("got %d connects, %d bad replies; want 1, 2; last error: %s", s.Connects, s.BadReply, s.LastError)
	}
}
