package knfsd

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var (
	_ = register("forms", "every message form, seen in the capture", testForms)
	_ = register("sizes", "reads and writes of every size around the edges", testSizes)
	_ = register("credits", "4 and 128 credits, more callers than credits", testCredits)
	_ = register("inline", "inline thresholds of 4 and 16 KiB", testInline)
)

func randomBytes(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	seed[0], seed[1] = byte(n), byte(n>>8)
	rand.NewChaCha8(seed).Read(b)
	return b
}

// A session is an NFS client without a mount, for calls of an exact kind.
type session struct {
	*nfs3.Client
	tr   *xprt.Transport
	root nfs3.FH
	cred []byte
}

func (b bench) session(t *testing.T, change func(*xprt.Config)) session {
	t.Helper()
	root := b.root(t, lab.ExportRW)
	tr := b.transport(t, change)
	cred := sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test"})
	return session{nfs3.NewClient(tr, nfs3.Options{}), tr, root, cred}
}

// create makes an empty file.
func (s session) create(t *testing.T, dir nfs3.FH, name string) nfs3.FH {
	t.Helper()
	var made nfs3.CreateResult
	if err := s.Create(t.Context(), s.cred, dir, name, &nfs3.CreateHow{Attr: nfs3.SetAttr{HasMode: true, Mode: 0o644}}, &made); err != nil {
		t.Fatal(err)
	}
	return made.FH
}

// writeAll writes data at an offset, as often as the server takes less than all.
func (s session) writeAll(ctx context.Context, fh nfs3.FH, off uint64, data []byte) error {
	for len(data) > 0 {
		var res nfs3.WriteResult
		if err := s.Write(ctx, s.cred, fh, off, data, nfs3.FileSync, &res); err != nil {
			return err
		}
		data, off = data[res.Count:], off+uint64(res.Count)
	}
	return nil
}

// readAll reads as often as the server returns less than all.
func (s session) readAll(ctx context.Context, fh nfs3.FH, off uint64, buf []byte) (int, error) {
	n := 0
	for n < len(buf) {
		var res nfs3.ReadResult
		if err := s.Read(ctx, s.cred, fh, off+uint64(n), buf[n:], &res); err != nil {
			return n, err
		}
		n += res.N
		if res.EOF || res.N == 0 {
			break
		}
	}
	return n, nil
}

// testForms has every message form on the wire, and an independent decoder read it.
func testForms(t *testing.T, b bench) {
	const entries = 10_000
	b.MustRun(fmt.Sprintf("mkdir -p /export/many && cd /export/many && seq %d | xargs touch", entries))
	c := b.Capture(t, "forms")
	s := b.session(t, nil)
	ctx := t.Context()
	var look nfs3.LookupResult
	if err := s.Lookup(ctx, s.cred, s.root, "many", &look); err != nil { // inline both ways
		t.Fatal(err)
	}
	fh := s.create(t, s.root, "forms")
	want := randomBytes(70_003)
	if err := s.writeAll(ctx, fh, 0, want); err != nil { // read chunk
		t.Fatal(err)
	}
	for mod := range 4 { // write chunk, every length modulo 4
		buf := make([]byte, 70_000+mod)
		if n, err := s.readAll(ctx, fh, 0, buf); err != nil || !bytes.Equal(buf[:n], want[:len(buf)]) {
			t.Errorf("READ of %d octets: %d, error %v", len(buf), n, err)
		}
	}
	// Reply chunks.
	var verf nfs3.Verifier
	var cookie uint64
	seen := map[string]bool{}
	for eof := false; !eof; {
		var res nfs3.ReadDirResult
		err := s.ReadDirPlus(ctx, s.cred, look.FH, cookie, verf, 32<<10, 128<<10, &res, func(e *nfs3.DirEntry) bool {
			seen[string(e.Name)] = true
			cookie = e.Cookie
			return true
		})
		if err != nil {
			t.Fatalf("READDIRPLUS after %d entries: %v", len(seen), err)
		}
		verf, eof = res.Verf, res.EOF
	}
	if len(seen) != entries+2 {
		t.Errorf("%d entries, want %d, . and ..", len(seen), entries)
	}
	// A call that neither fits inline nor has enough that may go by read chunk, with the longest path a server takes; both may be inline, for
	// a long credential is what makes a call long.
	long := strings.Repeat("0123456789abcde/", 255)
	var made nfs3.CreateResult
	if err := s.Symlink(ctx, s.cred, s.root, "long", long, &nfs3.SetAttr{}, &made); err != nil {
		t.Errorf("SYMLINK of %d octets: %v", len(long), err)
	} else {
		path := make([]byte, nfs3.MaxPath)
		var res nfs3.ReadLinkResult
		if err := s.ReadLink(ctx, s.cred, made.FH, path, &res); err != nil || string(path[:res.N]) != long {
			t.Errorf("READLINK: %d octets, error %v", res.N, err)
		}
	}
	stats := s.tr.Stats()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", stats)
	if stats.ReadChunks == 0 || stats.WriteChunks == 0 || stats.ReplyChunks == 0 || stats.RemoteInvalidations == 0 {
		t.Error("message forms are missing")
	}
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("malformed packets (%v):\n%.3000s", err, out)
	}
	for _, what := range []string{"iwarp_ddp.tagged", "iwarp_rdma.rr", "iwarp_rdma.inval_stag != 0", "rpcordma.reads_count > 0", "rpcordma.writes_count > 0", "rpcordma.reply_count > 0", "rpcordma.msg_type == 1"} {
		out, err := c.Tshark("-Y", what)
		if err != nil {
			t.Error(err)
		} else if out == "" {
			t.Errorf("no packet is %s", what)
		}
	}
	b.MustRun("rm -rf /export/many /export/forms /export/long")
}

// testSizes reads and writes around every edge.
func testSizes(t *testing.T, b bench) {
	s := b.session(t, nil)
	ctx := t.Context()
	var info nfs3.FSInfoResult
	if err := s.FSInfo(ctx, s.cred, s.root, &info); err != nil {
		t.Fatal(err)
	}
	t.Logf("rtmax %d wtmax %d", info.ReadMax, info.WriteMax)
	const far = 4<<30 + 4093
	sizes := []int{0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 65535, 65536, 65537, 1<<20 - 1, 1 << 20}
	for n := 3700; n <= 4000; n += 7 { // the inline threshold is within, whatever header and credential take
		sizes = append(sizes, n)
	}
	fh := s.create(t, s.root, "sizes")
	for _, off := range []uint64{0, 4095, far} {
		for _, n := range sizes {
			want := randomBytes(n)
			var wrote nfs3.WriteResult
			if err := s.Write(ctx, s.cred, fh, off, want, nfs3.Unstable, &wrote); err != nil || int(wrote.Count) != n {
				t.Fatalf("WRITE of %d octets at %d: %d, error %v", n, off, wrote.Count, err)
			}
			buf := make([]byte, n)
			var read nfs3.ReadResult
			if err := s.Read(ctx, s.cred, fh, off, buf, &read); err != nil || read.N != n || !bytes.Equal(buf, want) {
				t.Fatalf("READ of %d octets at %d: %d, error %v", n, off, read.N, err)
			}
		}
	}
	// Across the end of the file.
	var attr nfs3.Attr
	if err := s.GetAttr(ctx, s.cred, fh, &attr); err != nil {
		t.Fatal(err)
	}
	for _, before := range []int{0, 1, 5, 4001} {
		buf := make([]byte, 10_000)
		var read nfs3.ReadResult
		if err := s.Read(ctx, s.cred, fh, attr.Size-uint64(before), buf, &read); err != nil || read.N != before || !read.EOF {
			t.Errorf("READ of %d octets, %d before the end: %d, end %v, error %v", len(buf), before, read.N, read.EOF, err)
		}
	}
	b.MustRun("rm /export/sizes")
}

// testCredits has many more callers than the server grants credits.
func testCredits(t *testing.T, b bench) {
	const knob = "/proc/sys/sunrpc/svc_rdma/max_requests"
	before := strings.TrimSpace(b.MustRun("cat " + knob))
	defer b.MustRun("echo " + before + " >" + knob)
	for _, credits := range []int{4, 128} {
		b.MustRun(fmt.Sprintf("echo %d >%s", credits, knob)) // of the next connection
		s := b.session(t, nil)
		var wg sync.WaitGroup
		for i := range 3 * credits {
			wg.Go(func() {
				for range 4 {
					var attr nfs3.Attr
					if err := s.GetAttr(t.Context(), s.cred, s.root, &attr); err != nil {
						t.Errorf("caller %d: %v", i, err)
						return
					}
				}
			})
		}
		wg.Wait()
		stats := s.tr.Stats()
		if stats.Credits != credits || stats.Connects != 1 {
			t.Errorf("the server grants %d: %+v", credits, stats)
		}
	}
}

// testInline meets a server with a larger inline threshold: what went by chunk goes inline.
func testInline(t *testing.T, b bench) {
	const knob = "/proc/sys/sunrpc/svc_rdma/max_req_size"
	before := strings.TrimSpace(b.MustRun("cat " + knob))
	defer b.MustRun("echo " + before + " >" + knob)
	const size = 9001
	want := randomBytes(size)
	for _, inline := range []int{4096, 16384} {
		b.MustRun(fmt.Sprintf("echo %d >%s", inline, knob))
		s := b.session(t, func(c *xprt.Config) { c.InlineBytes = 16384 })
		fh := s.create(t, s.root, "inline")
		if err := s.writeAll(t.Context(), fh, 0, want); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, size)
		if n, err := s.readAll(t.Context(), fh, 0, buf); err != nil || n != size || !bytes.Equal(buf, want) {
			t.Errorf("READ: %d octets, error %v", n, err)
		}
		stats := s.tr.Stats()
		if stats.InlineSend != inline || stats.InlineRecv != inline {
			t.Errorf("inline %d: thresholds are %d and %d", inline, stats.InlineSend, stats.InlineRecv)
		}
		if chunks := stats.ReadChunks + stats.WriteChunks; (inline > size) != (chunks == 0) {
			t.Errorf("inline %d: %d octets went by %d chunks", inline, size, chunks)
		}
	}
	b.MustRun("rm /export/inline")
}
