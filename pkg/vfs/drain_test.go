package vfs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
)

// TestDrainKeepsAcceptedWrites ends a mount while programs write all the time. Drain must end, and
// each write that succeeded before the end must be on the server.
func TestDrainKeepsAcceptedWrites(t *testing.T) {
	const writers, chunk = 4, 3000
	e := startOwnExport(t)
	for round := range 1 {
		m := e.mount(t, mountConfig{buffers: 8, bufSize: 64 << 10})
		var accepted [writers]atomic.Int64 // bytes
		var wg sync.WaitGroup
		data := randomBytes(9, chunk)
		var names [writers]string
		for i := range writers {
			names[i] = fmt.Sprintf("round%d-writer%d", round, i)
			f, err := os.Create(m.path(names[i]))
			must(t, err)
			wg.Go(func() {
				defer f.Close()
				for {
					if n, err := f.Write(data); err != nil || n != chunk {
						return // the mount has ended
					}
					accepted[i].Add(chunk)
				}
			})
		}
		for i := range writers {
			if !eventually(func() bool { return accepted[i].Load() > 100*chunk }) {
				t.Errorf("writer %d makes no progress", i)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
		m.fs.Drain(ctx, 0)
		if ctx.Err() != nil {
			t.Error("Drain did not end before its deadline")
		}
		cancel()
		must(t, m.srv.ForceUnmount())
		wg.Wait()
		for i := range writers {
			got, err := os.ReadFile(filepath.Join(e.dir, names[i]))
			must(t, err)
			want := int(accepted[i].Load())
			if len(got) < want {
				t.Errorf("bytes of writer %d on the server: got %d, want at least %d", i, len(got), want)
				continue
			}
			for at := 0; at < want; at += chunk {
				if string(got[at:at+chunk]) != string(data) {
					t.Errorf("writer %d: bytes from %d differ from those written", i, at)
					break
				}
			}
		}
	}
}

// TestAbortReportsLostData checks that the end of a mount with dirty data reports the lost range of
// each file: data that is sent, data that is not sent, and data without COMMIT.
func TestAbortReportsLostData(t *testing.T) {
	e := startOwnExport(t)
	var lost []data.Loss
	m, s := e.mountScripted(t, mountConfig{
		opts: Options{WSize: 16 << 10, Lost: func(l data.Loss) { lost = append(lost, l) }}})
	s.on(hang, nfs3.ProcCommit)
	committing, err := os.Create(m.path("committing"))
	must(t, err)
	defer committing.Close()
	_, err = committing.Write(make([]byte, 40_000))
	must(t, err)
	if !eventually(func() bool { return s.count(nfs3.ProcWrite) == 2 }) {
		t.Error("WRITE calls: want 2 for the full extents")
	}
	s.on(hang, nfs3.ProcWrite)
	waiting, err := os.Create(m.path("waiting"))
	must(t, err)
	defer waiting.Close()
	_, err = waiting.WriteAt(make([]byte, 100), 1<<20)
	must(t, err)
	must(t, m.srv.ForceUnmount())
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	m.fs.Close(ctx)
	want := map[uint64]data.Loss{
		fileID(t, e, "committing"): {End: 40_000, Bytes: 40_000},
		fileID(t, e, "waiting"):    {Offset: 1 << 20, End: 1<<20 + 100, Bytes: 100},
	}
	for _, l := range lost {
		w, ok := want[l.FileID]
		if w.FileID, w.Handle = l.FileID, l.Handle; !ok || l != w || l.Handle == "" {
			t.Errorf("lost data: got %+v, want %+v", l, w)
		}
		delete(want, l.FileID)
	}
	if len(want) != 0 {
		t.Errorf("no report for the files %+v", want)
	}
}

// fileID returns the inode number of a file on the server.
func fileID(t *testing.T, e *export, name string) uint64 {
	t.Helper()
	st, err := os.Stat(filepath.Join(e.dir, name))
	must(t, err)
	return inodeNumber(st)
}
