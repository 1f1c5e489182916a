package knfsd

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

var (
	_ = register("forms", "every message form in a capture: inline, read chunk, "+
		"write chunk of each length modulo 4, reply chunk, position-zero read chunk", testForms)
	_ = register("long sends", "Sends longer than the server announced", testLongSends)
)

const (
	dirEntries = 10_000
	chunkBytes = 70_000 // more than any inline threshold
)

// testForms sends every message form and finds each in a capture, with an independent decoder.
func testForms(t *testing.T, b bench) {
	c := b.record(t, "forms", func() {
		b.MustRun(fmt.Sprintf("mkdir /export/many && cd /export/many && seq %d | xargs touch", dirEntries))
		s := b.session(t, nil)
		sendForms(t, s)
		sendLongCalls(t, s)
	})
	b.checkCapture(t, c)

	w := b.wire()
	const noChunks = "rpcordma.reads_count == 0 && rpcordma.writes_count == 0 && rpcordma.reply_count == 0"
	for what, filter := range map[string]string{
		"inline Call":                   w.to + "rpcordma.msg_type == 0 && " + noChunks,
		"inline Reply":                  w.from + "rpcordma.msg_type == 0 && " + noChunks + " && " + w.send,
		"Call with a read chunk":        w.to + "rpcordma.msg_type == 0 && rpcordma.position > 0",
		"Call with a write chunk":       w.to + "rpcordma.msg_type == 0 && rpcordma.writes_count > 0",
		"Call with a reply chunk":       w.to + "rpcordma.msg_type == 0 && rpcordma.reply_count > 0",
		"Call in a position-zero chunk": w.to + "rpcordma.msg_type == 1 && rpcordma.position == 0",
		"Reply with a write chunk":      w.from + "rpcordma.msg_type == 0 && rpcordma.writes_count > 0",
		"Reply in a reply chunk":        w.from + "rpcordma.msg_type == 1 && rpcordma.reply_count > 0",
		"RDMA Read Request":             w.from + w.readRequest,
		"RDMA Read Response":            w.to + w.readResponse,
		"RDMA Write of the server":      w.from + w.write,
	} {
		if n := len(frames(t, c, filter, "frame.number")); n == 0 {
			t.Errorf("got no %s: filter %s", what, filter)
		} else {
			t.Logf("%4d × %s", n, what)
		}
	}
	lengths := frames(t, c, w.from+"rpcordma.writes_count > 0", "rpcordma.rdma_length")
	for mod := range 4 {
		want := strconv.Itoa(chunkBytes + mod)
		if !slices.ContainsFunc(lengths, func(f [][]string) bool { return slices.Contains(f[0], want) }) {
			t.Errorf("got no Reply with a write chunk of %s bytes: %v", want, lengths)
		}
	}
}

// sendForms sends calls of all forms except the position-zero read chunk.
func sendForms(t *testing.T, s session) {
	t.Helper()
	ctx := t.Context()
	var look nfs3.LookupResult
	if err := s.Lookup(ctx, s.cred, s.root, "many", &look); err != nil {
		t.Fatal(err)
	}
	fh := s.create(t, "forms")
	want := randomBytes(chunkBytes + 3)
	s.write(t, fh, 0, want)
	for mod := range 4 {
		s.read(t, fh, 0, want[:chunkBytes+mod])
	}
	names, err := s.list(ctx, look.FH, 128<<10)
	if err != nil {
		t.Fatalf("READDIRPLUS: got %d entries, error %v", len(names), err)
	}
	if len(names) != dirEntries+2 {
		t.Errorf("READDIRPLUS: got %d entries, want %d, . and ..", len(names), dirEntries)
	}
	for i := range dirEntries {
		if n := names[strconv.Itoa(i+1)]; n != 1 {
			t.Fatalf("READDIRPLUS: got entry %d %d times, want once", i+1, n)
		}
	}
}

// sendLongCalls sends calls that need a position-zero read chunk. In NFSv3 only calls with data are
// that long, and their data normally has its own chunk. So this function passes the data of a WRITE
// and a SYMLINK as ordinary arguments.
func sendLongCalls(t *testing.T, s session) {
	t.Helper()
	fh := s.create(t, "long")
	want := randomBytes(chunkBytes + 1)
	args := sunrpc.AppendOpaque(nil, fh.Bytes())
	args = sunrpc.AppendUint64(args, 0)
	args = sunrpc.AppendUint32(args, uint32(len(want)))
	args = sunrpc.AppendUint32(args, uint32(nfs3.FileSync))
	args = sunrpc.AppendOpaque(args, want)
	s.longCall(t, nfs3.ProcWrite, args, nfs3.MaxResultWrite)
	s.read(t, fh, 0, want)

	path := strings.Repeat("0123456789abcde/", 250)
	args = sunrpc.AppendOpaque(nil, s.root.Bytes())
	args = sunrpc.AppendString(args, "link")
	for range 4 { // no mode, uid, gid, size
		args = sunrpc.AppendBool(args, false)
	}
	args = sunrpc.AppendUint64(args, 0) // keep the times
	args = sunrpc.AppendString(args, path)
	s.longCall(t, nfs3.ProcSymlink, args, nfs3.MaxResultCreate)
	var link nfs3.LookupResult
	if err := s.Lookup(t.Context(), s.cred, s.root, "link", &link); err != nil {
		t.Fatal(err)
	}
	buf := s.buffer(nfs3.MaxPath)
	var res nfs3.ReadLinkResult
	if err := s.ReadLink(t.Context(), s.cred, link.FH, buf, &res); err != nil || string(buf[:res.N]) != path {
		t.Errorf("READLINK: got %d bytes, error %v", res.N, err)
	}
}

// longCall sends a call that does not fit inline and must succeed.
func (s session) longCall(t *testing.T, proc nfs3.Proc, args []byte, maxResult int) {
	t.Helper()
	before := s.tr.Stats().NomsgCall
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(proc), Cred: s.cred, Args: args,
		ArgDataPos: len(args),
		MaxResult:  maxResult, Result: make([]byte, 0, maxResult), ResultDataLen: -1}
	if err := s.tr.Call(t.Context(), &m); err != nil || len(m.Result) < 4 ||
		!bytes.Equal(m.Result[:4], make([]byte, 4)) {
		t.Fatalf("%s as a long call: got results %x, error %v", proc, m.Result, err)
	}
	if n := s.tr.Stats().NomsgCall - before; n != 1 {
		t.Errorf("%s: got %d long calls, want 1", proc, n)
	}
}

// testLongSends asks for more data than fits inline and offers no chunk. Stock servers then send a
// reply that is longer than they announced, and the client's Receives must have space for it. The
// reply is larger than the call allows, so the call fails; the connection must survive.
func testLongSends(t *testing.T, b bench) {
	s := b.session(t, nil)
	fh := s.create(t, "file")
	want := randomBytes(9000)
	s.write(t, fh, 0, want)
	// 4777 is the smallest READ that the server does not send this way, unless it is a multiple of
	// 4.
	const count = 5000
	args := sunrpc.AppendOpaque(nil, fh.Bytes())
	args = sunrpc.AppendUint64(args, 0)
	args = sunrpc.AppendUint32(args, count)
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRead), Cred: s.cred, Args: args,
		ArgDataPos: len(args),
		MaxResult:  nfs3.MaxResultRead, Result: make([]byte, 0, nfs3.MaxResultRead), ResultDataLen: -1}
	var tooLong *xprt.ProtocolError
	if err := s.tr.Call(t.Context(), &m); !errors.As(err, &tooLong) {
		t.Errorf("READ of %d bytes without space for data: got error %v, want a ProtocolError", count, err)
	}
	s.read(t, fh, 0, want)
	if st := s.tr.Stats(); st.Connects != 1 || st.BadReply != 1 || st.RDMAErrors != 0 {
		t.Errorf("got %d connections, %d bad replies, %d RDMA errors, want 1, 1, 0: %s", st.Connects, st.BadReply,
			st.RDMAErrors, st.LastError)
	}
}
