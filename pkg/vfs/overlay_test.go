package vfs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A losingServer is an export whose server restarts and then has the stable content of a file only.
type losingServer struct {
	*testMount
	*scripted
	served string       // the file on the server
	verf   atomic.Int32 // last byte of the write verifier
}

// mountLosing creates a file with stable content, mounts it, and opens it for reading and writing.
func mountLosing(t *testing.T, stable []byte, flags int) (*losingServer, *os.File) {
	t.Helper()
	e := startOwnExport(t)
	l := &losingServer{served: filepath.Join(e.dir, "file")}
	must(t, os.WriteFile(l.served, stable, 0o644))
	l.testMount, l.scripted = e.mountScripted(t, mountConfig{})
	l.on(func(_ context.Context, m *sunrpc.Message, pass func() error) error {
		err := pass()
		if err == nil {
			m.Result[len(m.Result)-1] = byte(l.verf.Load())
		}
		return err
	}, nfs3.ProcWrite, nfs3.ProcCommit)
	f, err := os.OpenFile(l.path("file"), os.O_RDWR|flags, 0)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return l, f
}

// lose sends the written data to the server, which then restarts with the stable content.
func (l *losingServer) lose(t *testing.T, stable []byte) {
	t.Helper()
	must(t, l.fs.push(background{l.fs}, l.openInode()))
	l.verf.Add(1)
	must(t, os.WriteFile(l.served, stable, 0o644))
}

// wantReplay checks that the lost data was not replayed before, and that fsync replays it.
func (l *losingServer) wantReplay(t *testing.T, f *os.File, want []byte) {
	t.Helper()
	if n := l.fs.Counters.Replays.Load(); n != 0 {
		t.Errorf("replays before fsync: got %d, want 0", n)
	}
	must(t, f.Sync())
	if n := l.fs.Counters.Replays.Load(); n != 1 {
		t.Errorf("replays after fsync: got %d, want 1", n)
	}
	wantContent(t, l.served, want)
}

// TestReadsIncludeLostData writes extents that overlap, and one behind the end of the stable data.
// When the server has lost them, reads and stat still show them.
func TestReadsIncludeLostData(t *testing.T) {
	stable := randomBytes(1, 100_000)
	want := append(bytes.Clone(stable), make([]byte, 210_000)...)
	l, f := mountLosing(t, stable, 0)
	for i, w := range []struct{ off, n int }{{50_000, 30_000}, {10_000, 60_001}, {20_000, 100}, {300_000, 10_000}} {
		data := randomBytes(uint64(2+i), w.n)
		copy(want[w.off:], data)
		_, err := f.WriteAt(data, int64(w.off))
		must(t, err)
	}
	l.lose(t, stable)
	dropCaches(t, l.path("file"))
	for _, c := range []struct {
		name   string
		off, n int
	}{
		{"all", 0, len(want)},
		{"stable data", 0, 4096},
		{"lost data", 20_480, 4096},
		{"hole behind the server's end", 200_000, 4096},
		{"lost data behind the server's end", 301_000, 9_000},
	} {
		dropCaches(t, l.path("file"))
		got := make([]byte, c.n)
		n, err := f.ReadAt(got, int64(c.off))
		if err != nil || !bytes.Equal(got, want[c.off:c.off+c.n]) {
			t.Errorf("read %s: got %d bytes, %v, want the %d bytes that were written", c.name, n, err, c.n)
		}
	}
	st, err := os.Stat(l.path("file"))
	must(t, err)
	if st.Size() != int64(len(want)) {
		t.Errorf("size after the server lost data: got %d, want %d", st.Size(), len(want))
	}
	l.wantReplay(t, f, want)
}

// TestAppendFollowsLostData appends when the client knows the size that the server has after it has
// lost data.
func TestAppendFollowsLostData(t *testing.T) {
	stable, more := randomBytes(1, 1000), randomBytes(2, 50_000)
	l, f := mountLosing(t, stable, os.O_APPEND)
	_, err := f.Write(more[:40_000])
	must(t, err)
	l.lose(t, stable)
	again, err := os.Open(l.path("file")) // gets the attributes of the server
	must(t, err)
	must(t, again.Close())
	_, err = f.Write(more[40_000:])
	must(t, err)
	l.wantReplay(t, f, append(stable, more...))
}

// TestReadDuringReplayReturnsNewData delays the reply to a READ that the server has executed after
// it lost data. The client replays and commits the data meanwhile, and keeps no copy.
func TestReadDuringReplayReturnsNewData(t *testing.T) {
	stable, want := randomBytes(1, 1000), randomBytes(2, 50_000)
	l, f := mountLosing(t, stable, 0)
	_, err := f.Write(want)
	must(t, err)
	l.lose(t, stable)
	dropCaches(t, l.path("file"))
	ino := l.openInode()
	l.on(times(1, func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
		err := pass()
		if err := l.fs.sync(background{l.fs}, ino); err != nil {
			t.Error(err)
		}
		return err
	}), nfs3.ProcRead)
	got := make([]byte, len(want))
	if n, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read during a replay: got %d bytes, %v, want the %d bytes that were written", n, err, len(want))
	}
	if n := l.fs.Counters.Replays.Load(); n != 1 {
		t.Errorf("replays: got %d, want 1", n)
	}
}
