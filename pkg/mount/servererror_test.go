package mount

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// rootAttributes is a reply to GETATTR with the attributes of a directory (RFC 1813 §3.3.1).
var rootAttributes = []uint32{0, uint32(nfs3.NF3DIR), 0o755, 2, 0, 0, 0, 4096, 0, 4096, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0,
	0}

// TestServerErrorsNameTheProblem mounts servers that accept the RDMA connection and do not serve
// NFSv3, or only in part. Each error must name the server, the problem, and what to do. pkg/xprt
// tests invalid messages of RPC-over-RDMA.
func TestServerErrorsNameTheProblem(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	results := func(xid uint32, words ...uint32) []byte {
		b := sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success)
		for _, w := range words {
			b = sunrpc.AppendUint32(b, w)
		}
		return b
	}
	status := func(words ...uint32) func(uint32) []byte {
		return func(xid uint32) []byte { return results(xid, words...) }
	}
	noReply := func(uint32) []byte {
		cancel()
		return nil
	}
	file := append([]uint32{0, uint32(nfs3.NF3REG)}, rootAttributes[2:]...)
	for _, tt := range []struct {
		name   string
		fsinfo bool // the reply is to FSINFO
		reply  func(xid uint32) []byte
		want   string // texts in the error, separated by |
	}{
		{"other XID", false, func(xid uint32) []byte { return results(xid+1, 0) }, "XID"},
		{"truncated results", false, status(0, 2), "GETATTR"},
		{"NFS program unavailable", false, func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid, sunrpc.ProgUnavail)
		}, "program|start NFS version 3"},
		{"NFS version 4 only", false, func(xid uint32) []byte {
			return sunrpc.AppendProgMismatchReply(nil, xid, 4, 4)
		}, "version|4|start NFS version 3"},
		{"credential denied", false, func(xid uint32) []byte {
			return sunrpc.AppendDeniedReply(nil, xid, sunrpc.AuthTooWeak)
		}, "flavor|allow sec=sys"},
		{"NFS status out of range", false, status(4711), "4711"},
		{"stale handle", false, status(70), "NFS3ERR_STALE|check the export"},
		{"root is a file", false, status(file...), "not a directory"},
		{"FSINFO not supported", true, status(10004, 0), "NFS3ERR_NOTSUPP"},
		{"no reply", true, noReply, "did not answer NFS|set port="}, // the last one: it ends ctx
	} {
		server := startServer(t, func(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
			h, _, err := sunrpc.ParseCall(call)
			switch {
			case err != nil:
				return nil, err
			case h.Proc == uint32(nfs3.ProcNull):
				return append(reply, results(h.XID)...), nil
			case tt.fsinfo && h.Proc == uint32(nfs3.ProcGetAttr):
				return append(reply, results(h.XID, rootAttributes...)...), nil
			}
			b := tt.reply(h.XID)
			if b == nil {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return append(reply, b...), nil
		})
		s := connectedTo(t, server, 1)
		s.opts = DefaultOptions()
		s.opts.NoACL, s.shared.log = true, hclog.NewNullLogger()
		root, err := nfs3.NewFH([]byte("root"))
		if err != nil {
			t.Fatal(err)
		}
		err = s.newFS(ctx, nfs3.NewClient(&s.transports), root, hclog.NewNullLogger())
		for _, want := range append(strings.Split(tt.want, "|"), "NFS server "+server.String(), "; ") {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got error %v, want %q in it", tt.name, err, want)
			}
		}
	}
}
