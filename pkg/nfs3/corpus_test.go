package nfs3_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// The corpora of the fuzz targets for RPC-over-RDMA, RPC and NFSv3 are messages of a real server.
// To record them again:
//
//	go test ./pkg/nfs3 -run TestGaneshaOverRDMA -update
var update = flag.Bool("update", false, "write the recorded messages to the corpora of the fuzz targets")

// corpusMax is the maximum size in bytes of a message in a corpus.
const corpusMax = 1200

// A corpus keeps the smallest message of each name.
type corpus struct {
	target string // directory of the package and name of the fuzz target
	files  map[string][]any
	size   map[string]int
}

// add adds a message. args are all arguments of the fuzz target.
func (c *corpus) add(name string, msg []byte, args ...any) {
	if size, ok := c.size[name]; len(msg) > corpusMax || ok && size <= len(msg) {
		return
	}
	if c.files == nil {
		c.files, c.size = make(map[string][]any), make(map[string]int)
	}
	c.files[name], c.size[name] = args, len(msg)
}

// write replaces the files of the corpus, in the format of package testing.
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

// A recording holds the messages of the transport and the RPC messages in them.
type recording struct {
	sync.Mutex
	received [][]byte // transport messages from the client
	sent     [][]byte // transport messages to the client
	calls    [][]byte
	replies  [][]byte
	private  [][]byte // private data of the connection
}

func (r *recording) keep(list *[][]byte, msg []byte) {
	r.Lock()
	*list = append(*list, bytes.Clone(msg))
	r.Unlock()
}

// A recordedListener returns recordedRequests, which create recordedQPs. A recordedQP records its
// messages.
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

// backend forwards calls to an RPC server over TCP and records the calls and the replies.
func (r *recording) backend(t *testing.T, addr string) svcrdma.Handler {
	c, err := rpctcp.Dial(t.Context(), addr, rpctcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return svcrdma.HandlerFunc(func(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
		r.keep(&r.calls, call)
		reply, err := c.Forward(ctx, call, reply)
		if err == nil {
			r.keep(&r.replies, reply)
		}
		return reply, err
	})
}

// TestGaneshaOverRDMA calls every procedure of NFS-Ganesha over RDMA and decodes every message.
func TestGaneshaOverRDMA(t *testing.T) {
	dir := t.TempDir()
	g := ganesha.Start(t, dir)
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
	// The listing of this directory is small enough for a corpus.
	s.create(t, s.root, "first")
	each := func(*nfs3.DirEntry) bool { return true }
	var res nfs3.ReadDirResult
	if err := s.c.ReadDir(ctx, root, s.root, 0, nfs3.Verifier{}, 4096, &res, each); err != nil || res.Entries != 3 {
		t.Errorf("READDIR: got %+v, error %v; want 3 entries", res, err)
	}
	if err := s.c.ReadDirPlus(ctx, root, s.root, 0, nfs3.Verifier{}, 4096, 4096, &res, each); err != nil ||
		res.Entries != 3 {
		t.Errorf("READDIRPLUS: got %+v, error %v; want 3 entries", res, err)
	}
	s.run(t)

	r.Lock()
	defer r.Unlock()
	all := r.corpora(t)
	if *update && !t.Failed() {
		for _, c := range all {
			c.write(t)
		}
	}
}

// corpora decodes the recorded messages and sorts them into corpora.
func (r *recording) corpora(t *testing.T) []*corpus {
	header, plan := &corpus{target: "../rpcrdma/FuzzHeader"}, &corpus{target: "../../internal/svcrdma/FuzzCall"}
	private := &corpus{target: "../rpcrdma/FuzzPrivate"}
	call, reply := &corpus{target: "../sunrpc/FuzzParseCall"}, &corpus{target: "../sunrpc/FuzzParseReply"}
	record := &corpus{target: "../../internal/rpctcp/FuzzReadRecord"}
	results, oracle := &corpus{target: "FuzzNFSReply"}, &corpus{target: "FuzzOracleResults"}

	for i, p := range r.private {
		if got, found := rpcrdma.ParsePrivate(p); !found || !got.RemoteInv {
			t.Errorf("private data %x: got %+v, want remote invalidation", p, got)
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
	transport := func(sender string, list [][]byte) {
		for _, m := range list {
			var h rpcrdma.Header
			n, err := h.Decode(m)
			if err != nil {
				t.Fatalf("message %x of the %s: %v", m, sender, err)
			}
			shape := fmt.Sprintf("%s-%d-r%dw%dc%v", sender, h.Proc, len(h.Reads), len(h.Writes), h.HasReply)
			shapes[shape] = true
			header.add(shape, m[:n], m[:n])
			if sender == "client" {
				plan.add(fmt.Sprintf("%02d-%s", procs[h.XID], shape), m, m, uint16(200))
			}
		}
	}
	transport("client", r.received)
	transport("server", r.sent)
	for _, want := range []string{"client-0-r0w0cfalse", "client-0-r1w0cfalse", "client-0-r0w1cfalse",
		"client-0-r0w0ctrue", "server-0-r0w1cfalse", "server-1-r0w0ctrue"} {
		if !shapes[want] {
			t.Errorf("got messages of the forms %v, want %s too", shapes, want)
		}
	}
	for p := range nfs3.Proc(nfs3.NumProcs) {
		if !slices.Contains(slices.Collect(maps.Values(procs)), p) {
			t.Errorf("got no call of %v", p)
		}
	}
	return []*corpus{header, private, plan, call, reply, record, results, oracle}
}
