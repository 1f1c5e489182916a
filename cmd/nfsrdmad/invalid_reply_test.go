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
	t.Parallel()
	w := newTestEnv(t)
	good := w.mkdir(t, "good")
	w.mount(t, good).succeeds(t)
	mountPort := rpcPeer(t, "127.0.0.1:0", goodMount).Port()

	for _, tt := range []struct {
		name   string
		answer rdmaAnswer
		want   string // texts in the error, separated by |
	}{
		{"no reply", silence, "did not answer"},
		{"no reply to FSINFO", toFSInfo(silence), "did not answer"},
		{"wrong XID in the transport header", withHeader(otherHeaderXID), "did not answer|replies to no call: 1"},
		{"wrong XID in the RPC reply", withRPC(otherXID), "XID"},
		{"wrong RPC-over-RDMA version", withHeader(version2), "did not answer|invalid replies: 1"},
		{"unknown transport procedure", withHeader(unknownProc), "did not answer"},
		{"empty message", truncated(0), "did not answer"},
		{"short header", truncated(12), "did not answer|invalid replies: 1"},
		{"truncated chunk lists", truncated(24), "did not answer"},
		{"truncated RPC header", truncated(36), "malformed"},
		{"truncated results", truncated(28 + 24 + 40), "GETATTR"},
		{"unexpected write list", withHeader(addWriteChunk), "chunk"},
		{"read list in a reply", withHeader(addReadList), "Read list"},
		{"unexpected reply chunk", withHeader(addReplyChunk), "chunk"},
		{"no message and no reply chunk", noMessage, "reply"},
		{"segment count overflows", hugeSegmentCount, "malformed chunk lists"},
		{"verifier length overflows", withRPC(hugeVerifier), "longer than 400 bytes"},
		{"call instead of a reply", withRPC(callMessage), "did not answer|invalid replies: 1"},
		{"reply status out of range", withRPC(replyStatus9), "reply"},
		{"accept status out of range", withRPC(acceptStatus(77)), "accept_stat"},
		{"NFS program unavailable", withRPC(acceptStatus(sunrpc.ProgUnavail)), "program"},
		{"NFS version 4 only", withRPC(nfsVersion4), "version|4"},
		{"RPC version mismatch", withRPC(rpcMismatch), "version"},
		{"credential denied", withRPC(deniedCredential), "flavor"},
		{"NFS status out of range", withRPC(words(4711)), "4711"},
		{"stale handle", withRPC(words(70)), "NFS3ERR_STALE"},
		{"no access", withRPC(words(13)), "NFS3ERR_ACCES"},
		{"root is a file", withRPC(fileAttributes), "not a directory"},
		{"FSINFO not supported", toFSInfo(withRPC(words(10004, 0))), "NFS3ERR_NOTSUPP"},
		{"ERR_VERS", rdmaError(rpcrdma.ErrVers), "version 1|2 to 3"},
		{"ERR_CHUNK", rdmaError(rpcrdma.ErrChunk), "ERR_CHUNK"},
		{"unknown RDMA_ERROR", rdmaError(99), "RDMA_ERROR"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			addr := rdmaPeer(t, tt.answer)
			dir := w.mkdir(t, strings.ReplaceAll(tt.name, " ", "-"))
			opts := fmt.Sprintf("port=%d,mountport=%d", addr.Port(), mountPort)
			want := append([]string{"127.0.0.1:/ on " + dir, addr.String(), "; "}, strings.Split(tt.want, "|")...)
			nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o", opts).fails(t, 32, want...)
			w.checkMount(t, good)
		})
	}
}

// An rdmaAnswer returns the message to send for a call, or nil to send nothing.
type rdmaAnswer = func(*rdmaCall) []byte

func silence(*rdmaCall) []byte { return nil }

// withHeader answers with a valid reply after a change of the transport header.
func withHeader(change func(*rpcrdma.Header)) rdmaAnswer {
	return func(c *rdmaCall) []byte {
		h := c.reply()
		change(&h)
		return wire(h, c.results())
	}
}

// withRPC answers with a valid transport header and this RPC reply.
func withRPC(answer tcpAnswer) rdmaAnswer {
	return func(c *rdmaCall) []byte { return wire(c.reply(), answer(c.rpc)) }
}

// toFSInfo gives this answer to FSINFO, and a valid answer to other calls.
func toFSInfo(answer rdmaAnswer) rdmaAnswer {
	return func(c *rdmaCall) []byte {
		if nfs3.Proc(c.rpc.Proc) == nfs3.ProcFSInfo {
			return answer(c)
		}
		return c.valid()
	}
}

// truncated answers with at most n bytes of a valid reply. The reply of a keepalive NULL call may
// be shorter.
func truncated(n int) rdmaAnswer {
	return func(c *rdmaCall) []byte {
		b := c.valid()
		return b[:min(n, len(b))]
	}
}

func rdmaError(code rpcrdma.ErrCode) rdmaAnswer {
	return func(c *rdmaCall) []byte {
		h := c.reply()
		h.Proc, h.Err, h.Low, h.High = rpcrdma.ProcError, code, 2, 3
		return h.Append(nil)
	}
}

var wildSegment = rpcrdma.Segment{Handle: 0x1234, Length: 0xffffffff, Offset: 1<<64 - 4096}

func otherHeaderXID(h *rpcrdma.Header) { h.XID += 1 << 16 }
func version2(h *rpcrdma.Header)       { h.Vers = 2 }
func unknownProc(h *rpcrdma.Header)    { h.Proc = 77 }
func addWriteChunk(h *rpcrdma.Header)  { h.Writes = []rpcrdma.Chunk{{wildSegment}} }
func addReadList(h *rpcrdma.Header)    { h.Reads = []rpcrdma.ReadSegment{{Segment: wildSegment}} }
func addReplyChunk(h *rpcrdma.Header)  { h.HasReply, h.Reply = true, rpcrdma.Chunk{wildSegment} }

// noMessage answers without an RPC reply and without a reply chunk.
func noMessage(c *rdmaCall) []byte {
	h := c.reply()
	h.Proc = rpcrdma.ProcNoMsg
	return h.Append(nil)
}

// hugeSegmentCount answers with a write list whose segment count is 4294967295.
func hugeSegmentCount(c *rdmaCall) []byte {
	b := withHeader(addWriteChunk)(c)
	copy(b[24:], []byte{0xff, 0xff, 0xff, 0xff})
	return b
}

// hugeVerifier replies with a verifier length of 4294967292 bytes.
func hugeVerifier(c sunrpc.CallHeader) []byte {
	b := acceptedWords(c.XID, 0)
	copy(b[16:], []byte{0xff, 0xff, 0xff, 0xfc})
	return b
}

func callMessage(c sunrpc.CallHeader) []byte {
	return sunrpc.AppendCall(nil, c.XID, 100003, 3, 1, sunrpc.AppendAuthNone(nil))
}

func replyStatus9(c sunrpc.CallHeader) []byte {
	b := acceptedWords(c.XID, 0)
	b[11] = 9
	return b
}

func acceptStatus(status sunrpc.AcceptStat) tcpAnswer {
	return func(c sunrpc.CallHeader) []byte { return sunrpc.AppendAcceptedReply(nil, c.XID, status) }
}

func nfsVersion4(c sunrpc.CallHeader) []byte { return sunrpc.AppendProgMismatchReply(nil, c.XID, 4, 4) }

func rpcMismatch(c sunrpc.CallHeader) []byte { return sunrpc.AppendMismatchReply(nil, c.XID) }

// fileAttributes replies to each call with the attributes of a file.
func fileAttributes(c sunrpc.CallHeader) []byte {
	call := rdmaCall{rpc: sunrpc.CallHeader{XID: c.XID, Proc: uint32(nfs3.ProcGetAttr)}}
	b := call.results()
	b[31] = byte(nfs3.NF3REG)
	return b
}
