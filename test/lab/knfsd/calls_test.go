package knfsd

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// randomStream returns a stream of random bytes, the same for the same seed.
func randomStream(seed int) *rand.ChaCha8 {
	var key [32]byte
	key[0], key[1], key[2] = byte(seed), byte(seed>>8), byte(seed>>16)
	return rand.NewChaCha8(key)
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	randomStream(n).Read(b)
	return b
}

// randomFile creates a file on the host.
func randomFile(t *testing.T, size int) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "random")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.CopyN(f, randomStream(size), int64(size)); err != nil {
		t.Fatal(err)
	}
	return file
}

// A session is an NFS client without a mount, for calls with exact arguments.
type session struct {
	*nfs3.Client
	tr   *xprt.Transport
	root nfs3.FH
	cred []byte
	mem  []byte // buffer for data, from membuf, so that every device can register it
}

// bufferBytes is the size in bytes of the buffer: the largest call and a guard after it.
const bufferBytes = 2 << 20

// buffer returns the first n bytes of the session's buffer.
func (s session) buffer(n int) []byte { return s.mem[:n:n] }

func (b bench) session(t *testing.T, change func(*xprt.Config)) session {
	t.Helper()
	root := b.root(t, lab.ExportRW)
	mem, err := membuf.Alloc(bufferBytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { membuf.Free(mem) }) // after the transport is closed
	tr := b.transport(t, change)
	return session{nfs3.NewClient(tr), tr, root,
		sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test"}), mem}
}

// create creates an empty file in the root.
func (s session) create(t *testing.T, name string) nfs3.FH {
	t.Helper()
	var made nfs3.CreateResult
	if err := s.Create(t.Context(), s.cred, s.root, name,
		&nfs3.CreateHow{Attr: nfs3.SetAttr{HasMode: true, Mode: 0o644}}, &made); err != nil {
		t.Fatal(err)
	}
	return made.FH
}

// write sends one WRITE, which must write all data.
func (s session) write(t *testing.T, fh nfs3.FH, off uint64, data []byte) {
	t.Helper()
	var res nfs3.WriteResult
	if err := s.Write(t.Context(), s.cred, fh, off, s.buffer(copy(s.mem, data)), nfs3.Unstable, &res); err != nil ||
		int(res.Count) != len(data) {
		t.Fatalf("WRITE of %d bytes at %d: got %d, error %v", len(data), off, res.Count, err)
	}
}

// read sends one READ, which must return want and write nothing after it.
func (s session) read(t *testing.T, fh nfs3.FH, off uint64, want []byte) {
	t.Helper()
	const guard = 64
	guarded := bytes.Repeat([]byte{0xA5}, len(want)+guard)
	copy(s.mem, guarded)
	buf := s.buffer(len(want))
	var res nfs3.ReadResult
	if err := s.Read(t.Context(), s.cred, fh, off, buf, &res); err != nil || res.N != len(want) ||
		!bytes.Equal(buf[:res.N], want) {
		t.Fatalf("READ of %d bytes at %d: got %d, error %v", len(want), off, res.N, err)
	}
	if !bytes.Equal(s.mem[len(want):len(want)+guard], guarded[len(want):]) {
		t.Fatalf("READ of %d bytes at %d: got bytes after the end of its buffer", len(want), off)
	}
}

// list reads a directory with READDIRPLUS calls of maxCount bytes, and returns how often each name
// occurred.
func (s session) list(ctx context.Context, dir nfs3.FH, maxCount uint32) (map[string]int, error) {
	names := make(map[string]int)
	var verf nfs3.Verifier
	var cookie uint64
	for {
		var res nfs3.ReadDirResult
		err := s.ReadDirPlus(ctx, s.cred, dir, cookie, verf, maxCount, maxCount, &res, func(e *nfs3.DirEntry) bool {
			names[string(e.Name)]++
			cookie = e.Cookie
			return true
		})
		if err != nil || res.EOF {
			return names, err
		}
		verf = res.Verf
	}
}
