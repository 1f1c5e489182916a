package knfsd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

var (
	_ = register("sizes", "reads and writes of 0 to 1 MiB + 1 bytes around every size limit, and past 4 GiB", testSizes)
	_ = register("sizes of files", "files of 0 to 3 MiB + 1 bytes and past 4 GiB through the mount, "+
		"with checksums from the server",
		testFileSizes)
)

// past4G is an offset that exceeds 32 bits and is not aligned.
const past4G = 4<<30 + 4093

// sizeLimits are sizes at and next to the limits of the protocol, except the inline threshold.
var sizeLimits = []int{
	0, 1, 2, 3, 4, 5,
	4<<10 - 1, 4 << 10, 4<<10 + 1,
	64<<10 - 1, 64 << 10, 64<<10 + 1,
	1<<20 - 1, 1 << 20,
}

// lastInlineWrite returns the largest size that a WRITE sends inline.
func lastInlineWrite(s session, fh nfs3.FH) int {
	args := sunrpc.SizeUint32 + sunrpc.Pad4(len(fh.Bytes())) + sunrpc.SizeUint64 + 3*sunrpc.SizeUint32
	return s.tr.Stats().InlineSend - rpcrdma.MinHeaderSize - sunrpc.CallSize(s.cred) - args
}

// lastInlineRead returns the largest size that a READ requests inline.
func lastInlineRead(s session) int {
	return s.tr.Stats().InlineRecv - rpcrdma.MinHeaderSize - sunrpc.AcceptedReplySize - nfs3.MaxResultRead
}

// testSizes sends READs and WRITEs of exact sizes at the start, across a page boundary and past 4
// GiB.
func testSizes(t *testing.T, b bench) {
	s := b.session(t, nil)
	fh := s.create(t, "sizes")
	writeEdge, readEdge := lastInlineWrite(s, fh), lastInlineRead(s)
	sizes := sizeLimits
	for d := -4; d <= 4; d++ {
		sizes = append(sizes, writeEdge+d, readEdge+d)
	}
	for _, off := range []uint64{0, 4093, past4G} {
		for _, n := range sizes {
			want := randomBytes(n)
			before := s.tr.Stats()
			s.write(t, fh, off, want)
			s.read(t, fh, off, want)
			after := s.tr.Stats()
			if inline := after.ReadChunks == before.ReadChunks; inline != (sunrpc.Pad4(n) <= writeEdge) {
				t.Errorf("WRITE of %d bytes, inline limit %d: got inline %v", n, writeEdge, inline)
			}
			if inline := after.WriteChunks == before.WriteChunks; inline != (sunrpc.Pad4(n) <= readEdge) {
				t.Errorf("READ of %d bytes, inline limit %d: got inline %v", n, readEdge, inline)
			}
		}
	}
	t.Logf("WRITEs are inline up to %d bytes, READs up to %d bytes", writeEdge, readEdge)
	testReadAtEOF(t, s, fh)

	// A WRITE of one byte more than the limit of the device must fail before the client sends the
	// call.
	var refused *xprt.ProtocolError
	big := s.buffer(1<<20 + 1)
	if err := s.Write(t.Context(), s.cred, fh, 0, big, nfs3.Unstable, new(nfs3.WriteResult)); !errors.As(err,
		&refused) {
		t.Errorf("WRITE of %d bytes: got error %v, want a ProtocolError", len(big), err)
	}
	if err := s.Read(t.Context(), s.cred, fh, 0, big, new(nfs3.ReadResult)); !errors.As(err, &refused) {
		t.Errorf("READ of %d bytes: got error %v, want a ProtocolError", len(big), err)
	}
	if st := s.tr.Stats(); st.Connects != 1 || st.BadReply != 0 || st.RDMAErrors != 0 || st.Resends != 0 {
		t.Errorf("got reconnects, resends or errors: %+v", st)
	}
}

// testReadAtEOF reads across the end of the file, with and without chunks.
func testReadAtEOF(t *testing.T, s session, fh nfs3.FH) {
	t.Helper()
	var attr nfs3.Attr
	if err := s.GetAttr(t.Context(), s.cred, fh, &attr); err != nil {
		t.Fatal(err)
	}
	if attr.Size != past4G+1<<20 {
		t.Errorf("got a file of %d bytes, want %d", attr.Size, past4G+1<<20)
	}
	for _, size := range []int{100, 10_000, 1 << 20} {
		for _, there := range []int{0, 1, 2, 3, 5, 99} {
			var res nfs3.ReadResult
			if err := s.Read(t.Context(), s.cred, fh, attr.Size-uint64(there), s.buffer(size), &res); err != nil ||
				res.N != there || !res.EOF {
				t.Errorf("READ of %d bytes, %d before the end: got %d, EOF %v, error %v", size, there, res.N, res.EOF,
					err)
			}
		}
	}
}

// testFileSizes writes files of these sizes through one mount, compares checksums from the server,
// and reads the files through another mount.
func testFileSizes(t *testing.T, b bench) {
	m := b.mount(t, nil)
	local := t.TempDir()
	sizes := append([]int{3900, 3950, 4000, 1<<20 + 1, 3<<20 + 1}, sizeLimits...)
	if err := os.Mkdir(filepath.Join(m.dir, "sizes"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range sizes {
		for _, dir := range []string{local, filepath.Join(m.dir, "sizes")} {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(n)), randomBytes(n), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	far := randomBytes(100_001)
	writeFar(t, filepath.Join(m.dir, "sizes", "far"), far)
	const sums = "sha256sum [0-9]* | sort"
	if here, there := run(t, local, "sh", "-c", sums), b.MustRun("cd /export/sizes && "+sums); here != there {
		t.Errorf("got checksums on the client\n%s\nand on the server\n%s", here, there)
	}
	// Compare the end of the file, from the last full page before the data: a checksum of a hole of
	// 4 GiB takes too long.
	tail := fmt.Sprintf("dd if=/export/sizes/far bs=4096 skip=%d 2>/dev/null | sha256sum", past4G/4096)
	want := filepath.Join(local, "far")
	if err := os.WriteFile(want, append(make([]byte, past4G%4096), far...), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _, _ := strings.Cut(b.MustRun(tail), " "); got != sum(t, want) {
		t.Errorf("got data past 4 GiB with sum %s on the server, want %s", got, sum(t, want))
	}

	cold := b.mount(t, nil)
	for _, n := range sizes {
		run(t, "", "cmp", filepath.Join(local, fmt.Sprint(n)), filepath.Join(cold.dir, "sizes", fmt.Sprint(n)))
	}
	readFar(t, filepath.Join(cold.dir, "sizes", "far"), far)
}

func writeFar(t *testing.T, file string, data []byte) {
	t.Helper()
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(data, past4G)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func readFar(t *testing.T, file string, want []byte) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make([]byte, len(want)+1)
	n, _ := f.ReadAt(got, past4G) // returns io.EOF
	if n != len(want) || string(got[:n]) != string(want) {
		t.Errorf("got %d bytes past 4 GiB, want %d equal bytes", n, len(want))
	}
	hole := make([]byte, 8192)
	if n, err := f.ReadAt(hole, past4G-8192); err != nil || n != len(hole) || strings.Trim(string(hole), "\x00") != "" {
		t.Errorf("read of the hole: got %d bytes or other data, error %v", n, err)
	}
}
