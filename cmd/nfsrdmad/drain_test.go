package main

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// TestServeRepliesAfterSIGTERM sends SIGTERM to a server while a RENAME runs. The client must get
// the reply: it must not send the RENAME to the next server, which would return ENOENT.
func TestServeRepliesAfterSIGTERM(t *testing.T) {
	running, finish := make(chan struct{}), make(chan struct{})
	backend := rpcPeer(t, "127.0.0.1:0", func(call sunrpc.CallHeader) []byte {
		if nfs3.Proc(call.Proc) != nfs3.ProcRename {
			return acceptedWords(call.XID)
		}
		running <- struct{}{}
		<-finish
		return acceptedWords(call.XID, 0, 0, 0, 0, 0)
	})
	rdma, _, end := serve(t, "--backend", backend.String())
	x, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: netip.MustParseAddrPort(rdma)})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	ctx, cancel := context.WithTimeout(t.Context(), limit/4)
	defer cancel()
	if err := x.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 1)
	go func() {
		var res nfs3.RenameResult
		fh, _ := nfs3.NewFH([]byte("dir"))
		result <- nfs3.NewClient(x, nfs3.Options{}).Rename(ctx, sunrpc.AppendAuthNone(nil), fh, "a", fh, "b", &res)
	}()
	<-running
	ended := make(chan struct{})
	go func() { defer close(ended); end() }()
	for { // the server closes its listener when it handles the signal
		c, err := net.Dial("tcp", rdma)
		if err != nil {
			break
		}
		c.Close()
		time.Sleep(time.Millisecond)
	}
	close(finish)
	if err := <-result; err != nil {
		t.Errorf("RENAME that ran at SIGTERM: %v", err)
	}
	<-ended
}
