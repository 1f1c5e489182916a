package softiwarp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// The corpora of the fuzz targets are cut from what a TCP relay saw between an NFS client and its
// server. To record them anew:
//
//	go test ./pkg/verbs/softiwarp -run TestRecordedRun -update
var update = flag.Bool("update", false, "write what passes the relay to the corpora of the fuzz targets")

// Limits of the corpora.
const (
	corpusFile    = 1800 // octets of stream in a file
	corpusStreams = 40   // files of FuzzDDPStream
	recordedFPDU  = 480  // small, so that a file holds several
)

// A tap is one direction of a relayed connection.
type tap struct {
	mu sync.Mutex
	b  []byte // guarded by mu
}

func (d *tap) Write(b []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.b = append(d.b, b...)
	return len(b), nil
}

// A relay passes TCP connections on to a server and keeps what passes.
type relay struct {
	l    *net.TCPListener
	wg   sync.WaitGroup
	mu   sync.Mutex
	taps [][2]*tap // of each connection: to the server, to the client; guarded by mu
}

func startRelay(t *testing.T, to netip.AddrPort) *relay {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{l: l}
	r.wg.Add(1)
	go func() {
		defer r.wg.Done()
		for {
			in, err := l.AcceptTCP()
			if err != nil {
				return
			}
			out, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
			if err != nil {
				in.Close()
				continue
			}
			taps := [2]*tap{{}, {}}
			r.mu.Lock()
			r.taps = append(r.taps, taps)
			r.mu.Unlock()
			var both sync.WaitGroup
			for _, d := range []struct {
				from, to *net.TCPConn
				tap      *tap
			}{{in, out, taps[0]}, {out, in, taps[1]}} {
				both.Add(1)
				go func() {
					defer both.Done()
					io.Copy(io.MultiWriter(d.to, d.tap), struct{ io.Reader }{d.from})
					d.to.CloseWrite()
				}()
			}
			r.wg.Add(1)
			go func() { defer r.wg.Done(); both.Wait(); in.Close(); out.Close() }()
		}
	}()
	return r
}

func (r *relay) addr() netip.AddrPort { return r.l.Addr().(*net.TCPAddr).AddrPort() }

// finish waits for the connections to end and returns what they carried.
func (r *relay) finish() [][2]*tap {
	r.l.Close()
	r.wg.Wait()
	return r.taps
}

// nfsRun makes calls of every form against a served directory, through a relay.
func nfsRun(t *testing.T, crc bool) [][2]*tap {
	t.Helper()
	dir := t.TempDir()
	provider := softiwarp.New(softiwarp.Config{CRC: crc, MaxFPDU: recordedFPDU})
	s, err := nfsserve.Run(context.Background(), nfsserve.Config{Dir: dir, RDMAListen: "127.0.0.1:0",
		NoRootSquash: true, StateDir: t.TempDir(), Provider: provider})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	r := startRelay(t, s.RDMAAddr)
	x, err := xprt.New(xprt.Config{Provider: provider, Addr: r.addr(), Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ok(x.Connect(ctx))
	tcp := netip.MustParseAddrPort(s.TCPAddr)
	auth := &sunrpc.AuthSys{Machine: "corpus"}
	root, err := mountd.Mount(ctx, mountd.Args{Host: tcp.Addr().String(), Port: int(tcp.Port()), Export: "/",
		Cred: auth})
	if err != nil {
		t.Fatal(err)
	}
	c, cred := nfs3.NewClient(x, nfs3.Options{}), sunrpc.AppendAuthSys(nil, auth)
	var cr nfs3.CreateResult
	var w nfs3.WriteResult
	var rd nfs3.ReadResult
	ok(c.Create(ctx, cred, root.FH, "file", &nfs3.CreateHow{}, &cr))
	fh := cr.FH
	for _, n := range []int{1, 3, 700, 1100, 5001} {
		data := bytes.Repeat([]byte{'a' + byte(n%26)}, n)
		ok(c.Write(ctx, cred, fh, 0, data, nfs3.FileSync, &w))
		got := make([]byte, n)
		ok(c.Read(ctx, cred, fh, 0, got, &rd))
		if !bytes.Equal(got, data) {
			t.Errorf("%d octets came back changed", n)
		}
	}
	ok(c.Symlink(ctx, cred, root.FH, "link", "elsewhere", &nfs3.SetAttr{}, &cr))
	var dirs nfs3.ReadDirResult
	ok(c.ReadDirPlus(ctx, cred, root.FH, 0, [8]byte{}, 8192, 8192, &dirs, func(*nfs3.DirEntry) bool { return true }))
	x.Close()
	return r.finish()
}

// terminatedRun makes connections that end with a Terminate each.
func terminatedRun(t *testing.T) [][2]*tap {
	t.Helper()
	p := softiwarp.New(softiwarp.Config{})
	l, err := p.Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r := startRelay(t, l.Addr())
	buf := []verbs.SGE{{Buf: make([]byte, 100)}}
	for _, wr := range []*verbs.WorkRequest{
		{Opcode: verbs.OpRDMAWrite, RKey: 0x1234, SGList: buf}, {Opcode: verbs.OpRDMARead, RKey: 0x1234, SGList: buf},
		{Opcode: verbs.OpSend, SGList: buf}, {Opcode: verbs.OpSendWithInv, InvalidateRKey: 0x1234},
	} {
		terminatedConnection(t, p, l, r.addr(), wr)
	}
	return r.finish()
}

// terminatedConnection connects, posts wr, which the peer refuses, and waits for the end.
func terminatedConnection(t *testing.T, p verbs.Provider, l verbs.Listener, addr netip.AddrPort, wr *verbs.WorkRequest) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	gone := make(chan error, 2)
	nop := func(*verbs.WorkCompletion) {}
	setUp := func(id verbs.ConnID) verbs.QP {
		pd, err := id.Device().AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		cq, err := id.Device().CreateCQ(8)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { id.Close(); cq.Close(); pd.Dealloc() })
		qp, err := id.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 4, MaxRecvWR: 4,
			OnDisconnect: func(err error) { gone <- err }})
		if err != nil {
			t.Fatal(err)
		}
		if wr.Opcode == verbs.OpSendWithInv {
			qp.PostRecv(&verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 8)}, Done: nop})
		}
		return qp
	}
	id, err := p.Resolve(ctx, addr)
	if err != nil {
		t.Fatal(err)
	}
	qp := setUp(id)
	param := verbs.ConnParam{ResponderResources: 4, InitiatorDepth: 4, PrivateData: []byte("corpus")}
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(ctx, param) }()
	req, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	setUp(req)
	if err := req.Accept(ctx, param); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	wr.Done = nop
	if _, err := qp.PostSend(wr); err != nil {
		t.Fatal(err)
	}
	<-gone
	<-gone
	id.Close()
	req.Close()
}

// split takes a recorded direction apart into its MPA frame and ULPDUs, with a parser of its own;
// whatever does not fit is an error.
func split(t *testing.T, b []byte) (frame []byte, ulpdus [][]byte) {
	t.Helper()
	const hdr, key = 20, 16
	if len(b) < hdr || !bytes.HasPrefix(b, []byte("MPA ID Re")) {
		t.Fatalf("the stream starts with %q", b[:min(len(b), key)])
	}
	n := hdr + int(binary.BigEndian.Uint16(b[hdr-2:]))
	frame, b = b[:n], b[n:]
	for len(b) > 0 {
		if len(b) < 2 {
			t.Fatalf("%d octets at the end of the stream", len(b))
		}
		n := int(binary.BigEndian.Uint16(b))
		whole := (2+n+3)&^3 + 4
		if len(b) < whole {
			t.Fatalf("an FPDU of %d octets, %d are left", whole, len(b))
		}
		ulpdus = append(ulpdus, b[2:2+n])
		b = b[whole:]
	}
	return frame, ulpdus
}

// rename makes a recorded segment one that the fuzzed endpoint can take: its STags, offsets inside
// its window, MSNs from 1. What Wireshark calls queue 0 to 2 are indices of next.
func rename(u []byte, next *[3]uint32, base map[uint32]uint64) []byte {
	u = bytes.Clone(u)
	be := binary.BigEndian
	window := func(stag uint32, to uint64) uint64 {
		if _, ok := base[stag]; !ok {
			base[stag] = to
		}
		return softiwarp.FuzzIOVA + (to-base[stag])%softiwarp.FuzzWindow
	}
	const tagged, last, untaggedHdr, readReq = 0x80, 0x40, 18, 46
	if u[0]&tagged != 0 {
		be.PutUint64(u[6:], window(be.Uint32(u[2:]), be.Uint64(u[6:])))
		be.PutUint32(u[2:], softiwarp.FuzzWriteSTag)
		return u
	}
	qn := be.Uint32(u[6:]) % 3
	be.PutUint32(u[10:], next[qn]+1)
	if u[0]&last != 0 {
		next[qn]++
	}
	if be.Uint32(u[2:]) != 0 {
		be.PutUint32(u[2:], softiwarp.FuzzWriteSTag)
	}
	if qn == 1 && len(u) == readReq {
		to := window(be.Uint32(u[untaggedHdr+16:]), be.Uint64(u[untaggedHdr+20:]))
		be.PutUint64(u[untaggedHdr+20:], to)
		be.PutUint32(u[untaggedHdr+16:], softiwarp.FuzzReadSTag)
	}
	return u
}

// TestRecordedRun: what passes between an NFS client and its server is whole frames and FPDUs, of
// every kind there is.
func TestRecordedRun(t *testing.T) {
	var c corpora
	seen := make(map[byte]int)
	for run, taps := range [][][2]*tap{nfsRun(t, false), nfsRun(t, true), terminatedRun(t)} {
		for _, both := range taps {
			for way, d := range both {
				frame, ulpdus := split(t, d.b)
				c.add([]string{"FuzzMPARequest", "FuzzMPAReply"}[way], frame)
				var next [3]uint32
				base := make(map[uint32]uint64)
				var window []byte
				flush := func() {
					if len(window) > 0 {
						c.add("FuzzDDPStream", window, true, run == 1, uint16(len(window)/2))
					}
					window, next = nil, [3]uint32{}
				}
				for _, u := range ulpdus {
					op := u[1] & 0xf
					seen[op]++
					if op == 7 {
						c.add("FuzzTerminate", u[18:])
					}
					if len(window)+2+len(u) > corpusFile && u[0]&0x80 == 0 && binary.BigEndian.Uint32(u[14:]) == 0 {
						flush() // not between the segments of a message
					}
					if len(window)+2+len(u) > corpusFile {
						continue
					}
					r := rename(u, &next, base)
					window = append(binary.BigEndian.AppendUint16(window, uint16(len(r))), r...)
				}
				flush()
				whole := d.b[len(frame):]
				// as it was
				c.add("FuzzDDPStream", whole[:min(len(whole), corpusFile)], false, run == 1, uint16(20))
			}
		}
	}
	for op, name := range map[byte]string{0: "Write", 1: "Read Request", 2: "Read Response", 3: "Send",
		4: "Send with Invalidate", 7: "Terminate"} {
		if seen[op] == 0 {
			t.Errorf("no %s was recorded", name)
		}
	}
	if *update {
		c.write(t)
	}
}

// corpora are the files of all targets.
type corpora struct{ files map[string]map[string][]any }

func (c *corpora) add(target string, data []byte, rest ...any) {
	if c.files == nil {
		c.files = make(map[string]map[string][]any)
	}
	if c.files[target] == nil {
		c.files[target] = make(map[string][]any)
	}
	if target == "FuzzDDPStream" && len(c.files[target]) >= corpusStreams || len(data) == 0 {
		return
	}
	h := fnv.New32a()
	h.Write(data)
	c.files[target][fmt.Sprintf("run-%08x", h.Sum32())] = append([]any{bytes.Clone(data)}, rest...)
}

// write replaces the files of earlier runs, in the format of the testing package.
func (c *corpora) write(t *testing.T) {
	t.Helper()
	for target, files := range c.files {
		dir := filepath.Join("testdata", "fuzz", target)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		old, _ := filepath.Glob(filepath.Join(dir, "run-*"))
		for _, f := range old {
			os.Remove(f)
		}
		for name, args := range files {
			text := "go test fuzz v1\n"
			for _, a := range args {
				switch a := a.(type) {
				case []byte:
					text += fmt.Sprintf("[]byte(%q)\n", a)
				default:
					text += fmt.Sprintf("%T(%v)\n", a, a)
				}
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
