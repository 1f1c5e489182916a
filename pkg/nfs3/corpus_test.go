package nfs3_test

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// The corpora of the fuzz targets for RPC-over-RDMA, RPC and NFSv3 are messages of real runs. To
// record them anew:
//
//	go test ./pkg/nfs3 -run TestGaneshaOverRDMA -update
var update = flag.Bool("update", false, "write what passes to the corpora of the fuzz targets")

// corpusMax is the largest message in octets that a corpus takes.
const corpusMax = 1200

// A corpus collects messages by name, the smallest of each.
type corpus struct {
	target string // directory of the package, and name of the target
	files  map[string][]any
	size   map[string]int
}

// add takes a message with the target's other arguments around it.
func (c *corpus) add(name string, msg []byte, args ...any) {
	if had, ok := c.size[name]; len(msg) > corpusMax || ok && had <= len(msg) {
		return
	}
	if c.files == nil {
		c.files, c.size = make(map[string][]any), make(map[string]int)
	}
	c.files[name], c.size[name] = args, len(msg)
}

// write replaces the corpus's files, in the format of the testing package.
func (c *corpus) write(t *testing.T) {
	t.Helper()
	dir := filepath.Join(filepath.Dir(c.target), "testdata", "fuzz", filepath.Base(c.target))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	old, _ := filepath.Glob(filepath.Join(dir, "ganesha-*"))
	for _, f := range old {
		os.Remove(f)
	}
	for name, args := range c.files {
		text := "go test fuzz v1\n"
		for _, a := range args {
			switch a := a.(type) {
			case []byte:
				text += fmt.Sprintf("[]byte(%q)\n", a)
			case byte:
				text += fmt.Sprintf("byte(%q)\n", a)
			default:
				text += fmt.Sprintf("%T(%v)\n", a, a)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "ganesha-"+name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A recording keeps what passed: the transport's messages as they were sent, and the RPC messages
// that they carried.
type recording struct {
	mu       sync.Mutex
	received [][]byte // guarded by mu, as all: from the client
	sent     [][]byte // to the client
	calls    [][]byte
	replies  [][]byte
	private  [][]byte
}

func (r *recording) keep(list *[][]byte, msg []byte) {
	r.mu.Lock()
	*list = append(*list, append([]byte(nil), msg...))
	r.mu.Unlock()
}

// The recorder's layers: each hands the next one down out, until the QP, whose messages it keeps.
type (
	recordedListener struct {
		verbs.Listener
		r *recording
	}
	recordedRequest struct {
		verbs.ConnRequest
		r *recording
	}
	recordedQP struct {
		verbs.QP
		r *recording
	}
)

func (l recordedListener) Accept(ctx context.Context) (verbs.ConnRequest, error) {
	req, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	l.r.keep(&l.r.private, req.Peer().PrivateData)
	return recordedRequest{req, l.r}, nil
}

func (c recordedRequest) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	qp, err := c.ConnRequest.CreateQP(pd, attr)
	return recordedQP{qp, c.r}, err
}

func (c recordedRequest) Accept(ctx context.Context, p verbs.ConnParam) error {
	c.r.keep(&c.r.private, p.PrivateData)
	return c.ConnRequest.Accept(ctx, p)
}

func (q recordedQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	for wr := first; wr != nil; wr = wr.Next {
		if wr.Opcode != verbs.OpSend && wr.Opcode != verbs.OpSendWithInv {
			continue
		}
		var msg []byte
		for _, s := range wr.SGList {
			msg = append(msg, s.Buf...)
		}
		q.r.keep(&q.r.sent, msg)
	}
	return q.QP.PostSend(first)
}

func (q recordedQP) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	req := *first
	req.Done = func(wc *verbs.WorkCompletion) {
		if wc.Status == verbs.StatusSuccess {
			q.r.keep(&q.r.received, first.SGE.Buf[:wc.ByteLen])
		}
		first.Done(wc)
	}
	return q.QP.PostRecv(&req)
}

// backend passes calls to an RPC server on TCP, one at a time.
func (r *recording) backend(t *testing.T, addr string) svcrdma.Handler {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	var one sync.Mutex
	return svcrdma.HandlerFunc(func(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
		one.Lock()
		defer one.Unlock()
		r.keep(&r.calls, call)
		if err := rpctcp.WriteRecord(conn, call); err != nil {
			return nil, err
		}
		reply, err := rpctcp.ReadRecord(conn, reply, 2<<20)
		if err == nil {
			r.keep(&r.replies, reply)
		}
		return reply, err
	})
}

// TestGaneshaOverRDMA makes every procedure against NFS-Ganesha over RDMA, and finds every message
// that passed well-formed.
func TestGaneshaOverRDMA(t *testing.T) {
	dir := t.TempDir()
	g := ganeshatest.Start(t, dir)
	var r recording
	p := softiwarp.New(softiwarp.Config{})
	l, err := p.Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	handler := r.backend(t, g.Addr())
	ended := make(chan error, 1)
	serveCtx, stop := context.WithCancel(context.Background())
	go func() {
		ended <- svcrdma.Serve(serveCtx, recordedListener{l, &r}, svcrdma.Config{Handler: handler, RemoteInv: true})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		l.Close()
	})
	tr, err := xprt.New(xprt.Config{Provider: p, Addr: l.Addr(), Slots: 4, InlineBytes: 4096, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	if err := tr.Connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := session{
		root: mount(t, mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export}),
		c:    nfs3.NewClient(tr, nfs3.Options{}),
		dir:  dir,
	}
	// A directory whose listing is small enough for a corpus.
	s.create(t, s.root, "first")
	each := func(*nfs3.DirEntry) bool { return true }
	var res nfs3.ReadDirResult
	if err := s.c.ReadDir(ctx, root, s.root, 0, nfs3.Verifier{}, 4096, &res, each); err != nil || res.Entries != 3 {
		t.Errorf("READDIR %+v, error %v", res, err)
	}
	if err := s.c.ReadDirPlus(ctx, root, s.root, 0, nfs3.Verifier{}, 4096, 4096, &res, each); err != nil ||
		res.Entries != 3 {
		t.Errorf("READDIRPLUS %+v, error %v", res, err)
	}
	s.run(t)

	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.corpora(t)
	if *update && !t.Failed() {
		for _, c := range all {
			c.write(t)
		}
	}
}

// corpora sorts what passed, and checks it on the way: what the real client and the real server say
// must decode.
func (r *recording) corpora(t *testing.T) []*corpus {
	header, plan := &corpus{target: "../rpcrdma/FuzzHeader"}, &corpus{target: "../../internal/svcrdma/FuzzCall"}
	private := &corpus{target: "../rpcrdma/FuzzPrivate"}
	call, reply := &corpus{target: "../sunrpc/FuzzParseCall"}, &corpus{target: "../sunrpc/FuzzParseReply"}
	record := &corpus{target: "../../internal/rpctcp/FuzzReadRecord"}
	results, oracle := &corpus{target: "FuzzNFSReply"}, &corpus{target: "FuzzOracleResults"}

	for i, p := range r.private {
		if got, found := rpcrdma.ParsePrivate(p); !found || !got.RemoteInv {
			t.Errorf("private data %x: %+v", p, got)
		}
		private.add([]string{"client", "server"}[i%2], p, p)
	}
	procs := make(map[uint32]nfs3.Proc) // by XID
	for _, m := range r.calls {
		h, _, err := sunrpc.ParseCall(m)
		if err != nil {
			t.Fatalf("call %x: %v", m, err)
		}
		procs[h.XID] = nfs3.Proc(h.Proc)
		name := fmt.Sprintf("%02d-%d", h.Proc, len(h.Cred))
		call.add(name, m, m)
		mark := binary.BigEndian.AppendUint32(nil, 1<<31|uint32(len(m)))
		record.add(fmt.Sprintf("call-%02d", h.Proc), m, append(mark, m...), uint16(len(m)))
	}
	for _, m := range r.replies {
		xid, res, err := sunrpc.ParseReply(m)
		if err != nil || len(m) < sunrpc.AcceptedReplySize {
			t.Fatalf("reply %x: %v", m, err)
		}
		reply.add(fmt.Sprintf("%02d", procs[xid]), m, m)
		status := uint32(0)
		if len(res) >= 4 {
			status = binary.BigEndian.Uint32(res)
		}
		name := fmt.Sprintf("%02d-%04x", procs[xid], status)
		results.add(name, res, byte(procs[xid]), int16(-1), res)
		oracle.add(name, res, res)
	}
	shapes := make(map[string]bool)
	transport := func(who string, list [][]byte) {
		for _, m := range list {
			var h rpcrdma.Header
			n, err := h.Decode(m)
			if err != nil {
				t.Fatalf("%s sent %x: %v", who, m, err)
			}
			shape := fmt.Sprintf("%s-%d-r%dw%dc%v", who, h.Proc, len(h.Reads), len(h.Writes), h.HasReply)
			shapes[shape] = true
			header.add(shape, m[:n], m[:n])
			if who == "client" {
				plan.add(fmt.Sprintf("%02d-%s", procs[h.XID], shape), m, m, uint16(200))
			}
		}
	}
	transport("client", r.received)
	transport("server", r.sent)
	for _, want := range []string{"client-0-r0w0cfalse", "client-0-r1w0cfalse", "client-0-r0w1cfalse",
		"client-0-r0w0ctrue", "server-0-r0w1cfalse", "server-1-r0w0ctrue"} {
		if !shapes[want] {
			t.Errorf("no message of the form %s passed; there were %v", want, shapes)
		}
	}
	for p := range nfs3.Proc(nfs3.NumProcs) {
		if !contains(procs, p) {
			t.Errorf("%v was never called", p)
		}
	}
	return []*corpus{header, private, plan, call, reply, record, results, oracle}
}

func contains(procs map[uint32]nfs3.Proc, p nfs3.Proc) bool {
	for _, q := range procs {
		if p == q {
			return true
		}
	}
	return false
}
