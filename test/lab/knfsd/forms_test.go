package knfsd

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

var (
	_ = register("forms", "every message form in the capture: inline, read chunk, write chunk of each length modulo 4, reply chunk, position-zero read chunk", testForms)
	_ = register("long sends", "Sends longer than the server promised", testLongSends)
)

const (
	dirEntries = 10_000
	chunkBytes = 70_000 // more than any inline threshold
)

// testForms has every message form on the wire, and an independent decoder look for it.
func testForms(t *testing.T, b bench) {
	c := b.record(t, "forms", func() {
		b.MustRun(fmt.Sprintf("mkdir /export/many && cd /export/many && seq %d | xargs touch", dirEntries))
		s := b.session(t, nil)
		sendForms(t, s)
		sendLongCalls(t, s)
	})
	b.sound(t, c)

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
			t.Errorf("no packet is a %s: %s", what, filter)
		} else {
			t.Logf("%4d × %s", n, what)
		}
	}
	lengths := frames(t, c, w.from+"rpcordma.writes_count > 0", "rpcordma.rdma_length")
	for mod := range 4 {
		want := strconv.Itoa(chunkBytes + mod)
		if !slices.ContainsFunc(lengths, func(f [][]string) bool { return slices.Contains(f[0], want) }) {
			t.Errorf("no Reply tells of a write chunk of %s octets: %v", want, lengths)
		}
	}
}

// sendForms makes calls of all forms but one.
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
		t.Fatalf("READDIRPLUS after %d entries: %v", len(names), err)
	}
	if len(names) != dirEntries+2 {
		t.Errorf("%d entries, want %d, . and ..", len(names), dirEntries)
	}
	for i := range dirEntries {
		if n := names[strconv.Itoa(i+1)]; n != 1 {
			t.Fatalf("entry %d came %d times", i+1, n)
		}
	}
}

// sendLongCalls makes calls that go by a position-zero read chunk. No call of NFSv3 is that long
// but for its data, which goes by itself; so here the data of a WRITE and of a SYMLINK is declared
// no data.
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
	args = sunrpc.AppendUint64(args, 0) // times stay
	args = sunrpc.AppendString(args, path)
	s.longCall(t, nfs3.ProcSymlink, args, nfs3.MaxResultCreate)
	var link nfs3.LookupResult
	if err := s.Lookup(t.Context(), s.cred, s.root, "link", &link); err != nil {
		t.Fatal(err)
	}
	buf := s.room(nfs3.MaxPath)
	var res nfs3.ReadLinkResult
	if err := s.ReadLink(t.Context(), s.cred, link.FH, buf, &res); err != nil || string(buf[:res.N]) != path {
		t.Errorf("READLINK: %d octets, error %v", res.N, err)
	}
}

// longCall makes a call that must not fit inline, and must succeed.
func (s session) longCall(t *testing.T, proc nfs3.Proc, args []byte, maxResult int) {
	t.Helper()
	before := s.tr.Stats().NomsgCall
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(proc), Cred: s.cred, Args: args,
		ArgDataPos: len(args),
		MaxResult:  maxResult, Result: make([]byte, 0, maxResult), ResultDataLen: -1}
	if err := s.tr.Call(t.Context(), &m); err != nil || len(m.Result) < 4 ||
		!bytes.Equal(m.Result[:4], make([]byte, 4)) {
		t.Fatalf("%s as a long call: results %x, error %v", proc, m.Result, err)
	}
	if n := s.tr.Stats().NomsgCall - before; n != 1 {
		t.Errorf("%s: %d calls were long", proc, n)
	}
}

// testLongSends asks for more than fits inline, and offers no chunk for it: stock servers send it
// all the same, in a Send longer than they promised, which must find room in our Receives. The
// reply is too large for what was asked, and ends the call; nothing else may end.
func testLongSends(t *testing.T, b bench) {
	s := b.session(t, nil)
	fh := s.create(t, "file")
	want := randomBytes(9000)
	s.write(t, fh, 0, want)
	// 4777 is the first that the server does not send so, unless it is a multiple of 4
	const count = 5000
	args := sunrpc.AppendOpaque(nil, fh.Bytes())
	args = sunrpc.AppendUint64(args, 0)
	args = sunrpc.AppendUint32(args, count)
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRead), Cred: s.cred, Args: args,
		ArgDataPos: len(args),
		MaxResult:  nfs3.MaxResultRead, Result: make([]byte, 0, nfs3.MaxResultRead), ResultDataLen: -1}
	var tooLong *xprt.ProtocolError
	if err := s.tr.Call(t.Context(), &m); !errors.As(err, &tooLong) {
		t.Errorf("a READ of %d octets with room for none: %v", count, err)
	}
	s.read(t, fh, 0, want)
	if st := s.tr.Stats(); st.Connects != 1 || st.BadReply != 1 || st.RDMAErrors != 0 {
		t.Errorf("%d connections, %d bad replies, %d RDMA errors; want 1, 1, 0: %s", st.Connects, st.BadReply,
			st.RDMAErrors, st.LastError)
	}
}
