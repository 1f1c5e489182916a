package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestMountRejectsInvalidReplies mounts servers that accept the RDMA connection and send invalid
// replies. Each mount must fail in bounded time with one line that names the server and the
// problem. The daemon and the other mount must go on.
func TestMountRejectsInvalidReplies(t *testing.T) {
	w := newTestEnv(t)
	good := w.mkdir(t, "good")
	w.mount(t, good).succeeds(t)
	mountPort := rpcPeer(t, "127.0.0.1:0", goodMount).Port()

	header := func(change func(*rpcrdma.Header)) func(*rdmaCall) []byte {
		return func(c *rdmaCall) []byte {
			h := c.reply()
			change(&h)
			return wire(h, c.results())
		}
	}
	rpc := func(reply func(xid uint32) []byte) func(*rdmaCall) []byte {
		return func(c *rdmaCall) []byte { return wire(c.reply(), reply(c.rpc.XID)) }
	}
	nfsStatus := func(words ...uint32) func(*rdmaCall) []byte {
		return rpc(func(xid uint32) []byte { return acceptedWords(xid, words...) })
	}
	rdmaError := func(code rpcrdma.ErrCode) func(*rdmaCall) []byte {
		return func(c *rdmaCall) []byte {
			h := c.reply()
			h.Proc, h.Err, h.Low, h.High = rpcrdma.ProcError, code, 2, 3
			return h.Append(nil)
		}
	}
	raw := func(n int) func(*rdmaCall) []byte {
		// The valid reply of a keepalive NULL call may be shorter than n.
		return func(c *rdmaCall) []byte {
			b := c.valid()
			return b[:min(n, len(b))]
		}
	}
	fsinfo := func(change func(*rdmaCall) []byte) func(*rdmaCall) []byte {
		return func(c *rdmaCall) []byte {
			if nfs3.Proc(c.rpc.Proc) == nfs3.ProcFSInfo {
				return change(c)
			}
			return c.valid()
		}
	}
	silence := func(*rdmaCall) []byte { return nil }
	segment := rpcrdma.Segment{Handle: 0x1234, Length: 0xffffffff, Offset: 1<<64 - 4096}

	for _, tt := range []struct {
		name   string
		answer func(*rdmaCall) []byte
		want   []string
	}{
		{"no reply", silence, []string{"did not answer"}},
		{"no reply to FSINFO", fsinfo(silence), []string{"did not answer"}},
		{"wrong XID in the transport header", header(func(h *rpcrdma.Header) { h.XID += 1 << 16 }),
			[]string{"did not answer", "replies to no call: 1"}},
		{"wrong XID in the RPC reply", rpc(func(xid uint32) []byte { return acceptedWords(xid+1, 0) }),
			[]string{"XID"}},
		{"wrong RPC-over-RDMA version", header(func(h *rpcrdma.Header) { h.Vers = 2 }),
			[]string{"did not answer", "invalid replies: 1"}},
		{"unknown transport procedure", header(func(h *rpcrdma.Header) { h.Proc = 77 }), []string{"did not answer"}},
		{"empty message", raw(0), []string{"did not answer"}},
		{"short header", raw(12), []string{"did not answer", "invalid replies: 1"}},
		{"truncated chunk lists", raw(24), []string{"did not answer"}},
		{"truncated RPC header", raw(36), []string{"malformed"}},
		{"truncated results", raw(28 + 24 + 40), []string{"GETATTR"}},
		{"unexpected write list", header(func(h *rpcrdma.Header) { h.Writes = []rpcrdma.Chunk{{segment}} }),
			[]string{"chunk"}},
		{"read list in a reply", header(
			func(h *rpcrdma.Header) { h.Reads = []rpcrdma.ReadSegment{{Segment: segment}} }), []string{"Read list"}},
		{"unexpected reply chunk", header(func(h *rpcrdma.Header) {
			h.HasReply, h.Reply = true,
				rpcrdma.Chunk{segment}
		}),
			[]string{"chunk"}},
		{"no message and no reply chunk", func(c *rdmaCall) []byte {
			h := c.reply()
			h.Proc = rpcrdma.ProcNoMsg
			return h.Append(nil)
		}, []string{"reply"}},
		{"segment count overflows", func(c *rdmaCall) []byte {
			b := header(func(h *rpcrdma.Header) { h.Writes = []rpcrdma.Chunk{{segment}} })(c)
			copy(b[24:], []byte{0xff, 0xff, 0xff, 0xff})
			return b
		}, []string{"malformed chunk lists"}},
		{"verifier length overflows", rpc(func(xid uint32) []byte {
			b := acceptedWords(xid, 0)
			copy(b[16:], []byte{0xff, 0xff, 0xff, 0xfc})
			return b
		}), []string{"longer than 400 bytes"}},
		{"call instead of a reply", rpc(func(xid uint32) []byte {
			return sunrpc.AppendCall(nil, xid, 100003, 3, 1, sunrpc.AppendAuthNone(nil))
		}), []string{"did not answer", "invalid replies: 1"}},
		{"reply status out of range", rpc(func(xid uint32) []byte {
			b := acceptedWords(xid, 0)
			b[11] = 9
			return b
		}), []string{"reply"}},
		{"accept status out of range", rpc(func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid,
				77)
		}), []string{"accept_stat"}},
		{"NFS program unavailable", rpc(func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid, sunrpc.ProgUnavail)
		}), []string{"program"}},
		{"NFS version 4 only", rpc(func(xid uint32) []byte { return sunrpc.AppendProgMismatchReply(nil, xid, 4, 4) }),
			[]string{"version", "4"}},
		{"RPC version mismatch", rpc(func(xid uint32) []byte { return sunrpc.AppendMismatchReply(nil, xid) }),
			[]string{"version"}},
		{"credential denied", rpc(func(xid uint32) []byte {
			return sunrpc.AppendDeniedReply(nil, xid, sunrpc.AuthTooWeak)
		}), []string{"flavor"}},
		{"NFS status out of range", nfsStatus(4711), []string{"4711"}},
		{"stale handle", nfsStatus(70), []string{"NFS3ERR_STALE"}},
		{"no access", nfsStatus(13), []string{"NFS3ERR_ACCES"}},
		{"root is a file", rpc(func(xid uint32) []byte {
			c := rdmaCall{rpc: sunrpc.CallHeader{XID: xid, Proc: uint32(nfs3.ProcGetAttr)}}
			b := c.results()
			b[31] = byte(nfs3.NF3REG)
			return b
		}), []string{"not a directory"}},
		{"FSINFO not supported", fsinfo(nfsStatus(10004, 0)), []string{"NFS3ERR_NOTSUPP"}},
		{"ERR_VERS", rdmaError(rpcrdma.ErrVers), []string{"version 1", "2 to 3"}},
		{"ERR_CHUNK", rdmaError(rpcrdma.ErrChunk), []string{"ERR_CHUNK"}},
		{"unknown RDMA_ERROR", rdmaError(99), []string{"RDMA_ERROR"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			addr := rdmaPeer(t, tt.answer)
			dir := w.mkdir(t, strings.ReplaceAll(tt.name, " ", "-"))
			opts := fmt.Sprintf("port=%d,mountport=%d", addr.Port(), mountPort)
			want := append([]string{"127.0.0.1:/ on " + dir, addr.String(), "; "}, tt.want...)
			nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o", opts).fails(t, 32, want...)
			w.checkMount(t, good)
		})
	}
}
