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

// The corpora of the fuzz targets are parts of streams that a TCP relay recorded between an NFS
// client and its server. To record them again:
//
//	go test ./pkg/verbs/softiwarp -run TestRecordedStreamsParse -update
var update = flag.Bool("update", false, "write the recorded streams to the corpora of the fuzz targets")

// Limits of the corpora.
const (
	corpusFile    = 1800 // bytes of stream in a file
	corpusStreams = 40   // files of FuzzDDPStream
	recordedFPDU  = 480  // small, so that a file contains several
)

// A tap records one direction of a relayed connection.
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

// A relay forwards TCP connections to a server and records both directions.
type relay struct {
	l    *net.TCPListener
	wg   sync.WaitGroup
	mu   sync.Mutex
	taps [][2]*tap // per connection: to the server, to the client; guarded by mu
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

// finish waits for the connections to end and returns the recordings.
func (r *relay) finish() [][2]*tap {
	r.l.Close()
	r.wg.Wait()
	return r.taps
}

// nfsRun makes NFS calls of every message form through a relay, and returns the recordings.
func nfsRun(t *testing.T, crc bool) [][2]*tap {
	t.Helper()
	dir := t.TempDir()
	provider := softiwarp.New(softiwarp.Config{CRC: crc, MaxFPDU: recordedFPDU})
	s, err := nfsserve.Run(context.Background(), nfsserve.Config{Dir: dir, RDMAListen: "127.0.0.1:0",
		TCPListen: "127.0.0.1:0", NoRootSquash: true, StateDir: t.TempDir(), Provider: provider})
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
			t.Errorf("read of %d bytes: data differs from the written data", n)
		}
	}
	ok(c.Symlink(ctx, cred, root.FH, "link", "elsewhere", &nfs3.SetAttr{}, &cr))
	var dirs nfs3.ReadDirResult
	ok(c.ReadDirPlus(ctx, cred, root.FH, 0, [8]byte{}, 8192, 8192, &dirs, func(*nfs3.DirEntry) bool { return true }))
	x.Close()
	return r.finish()
}

// terminatedRun makes connections that each end with a Terminate.
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

// terminatedConnection connects, posts wr, which the peer refuses, and waits until the connection
// ends.
func terminatedConnection(t *testing.T, p verbs.Provider, l verbs.Listener, addr netip.AddrPort,
	wr *verbs.WorkRequest) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	disconnected := make(chan error, 2)
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
			OnDisconnect: func(err error) { disconnected <- err }})
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
	<-disconnected
	<-disconnected
	id.Close()
	req.Close()
}

// split parses a recorded direction into its MPA frame and ULPDUs. split does not use the parser of
// package softiwarp. split fails the test on data that is not a whole FPDU.
func split(t *testing.T, b []byte) (frame []byte, ulpdus [][]byte) {
	t.Helper()
	const hdr, key = 20, 16
	if len(b) < hdr || !bytes.HasPrefix(b, []byte("MPA ID Re")) {
		t.Fatalf("start of the stream: got %q, want an MPA frame", b[:min(len(b), key)])
	}
	n := hdr + int(binary.BigEndian.Uint16(b[hdr-2:]))
	frame, b = b[:n], b[n:]
	for len(b) > 0 {
		if len(b) < 2 {
			t.Fatalf("%d bytes at the end of the stream, want a whole FPDU", len(b))
		}
		n := int(binary.BigEndian.Uint16(b))
		whole := (2+n+3)&^3 + 4
		if len(b) < whole {
			t.Fatalf("FPDU of %d bytes: the stream has only %d more", whole, len(b))
		}
		ulpdus = append(ulpdus, b[2:2+n])
		b = b[whole:]
	}
	return frame, ulpdus
}

// adaptSegment adapts a recorded segment to the fuzzed endpoint: STags of the endpoint, offsets
// inside its window, and MSNs from 1 on. next has the MSNs of the three untagged queues.
func adaptSegment(u []byte, next *[3]uint32, base map[uint32]uint64) []byte {
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

// TestRecordedStreamsParse checks that the streams between an NFS client and its server consist of
// whole frames and FPDUs, and contain every opcode. With -update it writes the corpora.
func TestRecordedStreamsParse(t *testing.T) {
	var c corpora
	seen := make(map[byte]int)
	for run, taps := range [][][2]*tap{nfsRun(t, false), nfsRun(t, true), terminatedRun(t)} {
		for _, both := range taps {
			for direction, d := range both {
				frame, ulpdus := split(t, d.b)
				c.add([]string{"FuzzMPARequest", "FuzzMPAReply"}[direction], frame)
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
						flush() // only between two messages
					}
					if len(window)+2+len(u) > corpusFile {
						continue
					}
					r := adaptSegment(u, &next, base)
					window = append(binary.BigEndian.AppendUint16(window, uint16(len(r))), r...)
				}
				flush()
				whole := d.b[len(frame):]
				// the unchanged stream
				c.add("FuzzDDPStream", whole[:min(len(whole), corpusFile)], false, run == 1, uint16(20))
			}
		}
	}
	for op, name := range map[byte]string{0: "Write", 1: "Read Request", 2: "Read Response", 3: "Send",
		4: "Send with Invalidate", 7: "Terminate"} {
		if seen[op] == 0 {
			t.Errorf("recorded messages of kind %s: got 0, want at least 1", name)
		}
	}
	if *update {
		c.write(t)
	}
}

// corpora holds the corpus files by target and name.
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

// write replaces the files of earlier recordings. The format is that of the testing package.
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
