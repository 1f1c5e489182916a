package nfsd

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// syncLog notes which inodes are synced.
type syncLog struct {
	mu     sync.Mutex
	inodes []uint64
	fail   atomic.Bool
}

func (l *syncLog) fsync(fd int) error {
	if l.fail.Load() {
		return unix.EIO
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	l.mu.Lock()
	l.inodes = append(l.inodes, st.Ino)
	l.mu.Unlock()
	return unix.Fsync(fd)
}

func (l *syncLog) take() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	got := l.inodes
	l.inodes = nil
	return got
}

// Every change of a directory, and of attributes, is synced before the reply.
func TestChangesAreSynced(t *testing.T) {
	var log syncLog
	c := start(t, func(cfg *Config) { cfg.fsync = log.fsync })
	d, e := c.mkdir(root, c.Root, "d", 0o755), c.mkdir(root, c.Root, "e", 0o755)
	dIno, eIno := c.stat("d").Ino, c.stat("e").Ino
	f := c.MustCreate(root, d, "f", 0o644)
	var made nfs3.CreateResult
	var wcc nfs3.WccData
	set := nfs3.SetAttr{HasMode: true, Mode: 0o640}
	exclusive := nfs3.CreateHow{Mode: nfs3.Exclusive}
	create := func(name string, how nfs3.CreateHow) error { return c.Create(c.Ctx, root, d, name, &how, &made) }
	mknod := func() error { return c.Mknod(c.Ctx, root, d, "p", nfs3.NF3FIFO, &set, nfs3.Device{}, &made) }
	rename := func() error { return c.Rename(c.Ctx, root, d, "h", e, "h", new(nfs3.RenameResult)) }
	for _, tt := range []struct {
		name  string
		do    func() error
		file  string // synced too
		other bool   // e is synced, too
	}{
		{name: "CREATE", file: "d/g", do: func() error { return create("g", nfs3.CreateHow{Attr: set}) }},
		{name: "CREATE exclusive", file: "d/x", do: func() error { return create("x", exclusive) }},
		{name: "MKDIR", file: "d/sub", do: func() error { return c.Mkdir(c.Ctx, root, d, "sub", &set, &made) }},
		{name: "SYMLINK", do: func() error { return c.Symlink(c.Ctx, root, d, "l", "to", &nfs3.SetAttr{}, &made) }},
		{name: "MKNOD", do: mknod},
		{name: "LINK", file: "d/f", do: func() error { return c.Link(c.Ctx, root, f, d, "h", new(nfs3.LinkResult)) }},
		{name: "RENAME", other: true, do: rename},
		{name: "REMOVE", do: func() error { return c.Remove(c.Ctx, root, d, "g", &wcc) }},
		{name: "RMDIR", do: func() error { return c.Rmdir(c.Ctx, root, d, "sub", &wcc) }},
	} {
		log.take()
		c.OK(tt.do())
		got := log.take()
		if !slices.Contains(got, dIno) || tt.other && !slices.Contains(got, eIno) ||
			tt.file != "" && !slices.Contains(got, c.stat(tt.file).Ino) {
			t.Errorf("%s: synced %v, want directory %d and what belongs to it", tt.name, got, dIno)
		}
	}
	log.take()
	c.OK(c.SetAttr(c.Ctx, root, f, &set, nil, &wcc))
	if got := log.take(); !slices.Contains(got, c.stat("d/f").Ino) {
		t.Errorf("SETATTR: synced %v, want the file", got)
	}
	for stable, synced := range map[nfs3.StableHow]bool{nfs3.Unstable: false, nfs3.DataSync: true,
		nfs3.FileSync: true} {
		var w nfs3.WriteResult
		c.OK(c.Write(c.Ctx, root, f, 0, []byte("x"), stable, &w))
		if got := log.take(); (len(got) > 0) != synced || w.Committed < stable {
			t.Errorf("WRITE %v: synced %v, committed %v", stable, got, w.Committed)
		}
	}
	c.OK(c.Commit(c.Ctx, root, f, 0, 0, new(nfs3.CommitResult)))
	if got := log.take(); !slices.Contains(got, c.stat("d/f").Ino) {
		t.Errorf("COMMIT: synced %v, want the file", got)
	}
}

// A failed fsync is an error for its call, and a new verifier for every client. Each start of a
// server has another verifier.
func TestFailedSyncChangesVerifier(t *testing.T) {
	var log syncLog
	c := start(t, func(cfg *Config) { cfg.fsync = log.fsync })
	one, two := c.MustCreate(root, c.Root, "one", 0o644), c.MustCreate(root, c.Root, "two", 0o644)
	first := c.write(root, one, "data").Verf
	if again := c.write(root, two, "data").Verf; again != first {
		t.Errorf("got verifiers %x and %x, want one", first, again)
	}
	if other := start(t, nil).s.writeVerifier(); other == first {
		t.Errorf("another server: got verifier %x, too", other)
	}
	write := func() error {
		return c.Write(c.Ctx, root, two, 0, []byte("x"), nfs3.FileSync, new(nfs3.WriteResult))
	}
	for _, tt := range []struct {
		name string
		do   func() error
	}{
		{"COMMIT", func() error { return c.Commit(c.Ctx, root, two, 0, 0, new(nfs3.CommitResult)) }},
		{"WRITE", write},
		{"REMOVE", func() error { return c.Remove(c.Ctx, root, c.Root, "two", new(nfs3.WccData)) }},
	} {
		before := c.s.writeVerifier()
		log.fail.Store(true)
		c.Want(tt.do(), unix.EIO)
		log.fail.Store(false)
		if after := c.s.writeVerifier(); after == before {
			t.Errorf("%s: the verifier stayed %x", tt.name, after)
		}
	}
	var com nfs3.CommitResult
	c.OK(c.Commit(c.Ctx, root, one, 0, 0, &com))
	if com.Verf == first {
		t.Errorf("COMMIT of another file: the verifier stayed %x", first)
	}
}

// A descriptor with uncommitted data is synced before it is closed, and a failure changes the
// verifier.
func TestUncommittedDataIsSyncedBeforeClose(t *testing.T) {
	var log syncLog
	c := start(t, func(cfg *Config) { cfg.fsync = log.fsync })
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	c.write(root, fh, "data")
	log.take()
	for range dirtySweeps {
		c.s.objects.sweep()
	}
	if got := log.take(); len(got) > 0 {
		t.Errorf("synced %v, want nothing so early", got)
	}
	before := c.s.writeVerifier()
	log.fail.Store(true)
	for range 2 {
		c.s.objects.sweep()
	}
	log.fail.Store(false)
	if c.s.objects.get(&fh) != nil || c.s.writeVerifier() == before {
		t.Error("want the file closed and the verifier changed")
	}
}

// Concurrent callers share a sync that began after all of them; an error reaches each of them.
func TestSyncsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s syncer
		var runs atomic.Int32
		hold := make(chan error)
		f := func() error {
			runs.Add(1)
			return <-hold
		}
		results := make(chan error, 10)
		call := func() { results <- s.do(f) }
		go call()
		synctest.Wait() // the first sync runs
		for range 5 {
			go call()
		}
		synctest.Wait()
		hold <- nil
		if err := <-results; err != nil || runs.Load() < 1 {
			t.Errorf("first caller: got %v", err)
		}
		synctest.Wait()
		failed := errors.New("disk")
		hold <- failed
		for range 5 {
			if err := <-results; err != failed {
				t.Errorf("got %v, want the error of the shared sync", err)
			}
		}
		if n := runs.Load(); n != 2 {
			t.Errorf("got %d syncs for 6 callers, want 2", n)
		}
		go call()
		synctest.Wait()
		hold <- nil
		if err := <-results; err != nil {
			t.Errorf("caller after a failed sync: got %v", err)
		}
	})
}

// A COMMIT during the close of an idle object does not hide the failed fsync of the close.
func TestCommitDuringClose(t *testing.T) {
	var fsyncs atomic.Int32
	begun, fail := make(chan struct{}), make(chan struct{})
	c := start(t, func(cfg *Config) {
		cfg.fsync = func(fd int) error {
			if fsyncs.Add(1) == 3 { // after those of CREATE
				close(begun)
				<-fail
				return unix.EIO
			}
			return nil
		}
	})
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	before := c.write(root, fh, "data").Verf
	var sweeper sync.WaitGroup
	sweeper.Go(func() {
		for range dirtySweeps + 2 {
			c.s.objects.sweep()
		}
	})
	<-begun
	done := make(chan error, 1)
	var res nfs3.CommitResult
	go func() { done <- c.Commit(c.Ctx, root, fh, 0, 0, &res) }()
	for range 100 { // time for a COMMIT that does not wait
		c.getattr(c.Root)
	}
	close(fail)
	if err := <-done; err == nil && res.Verf == before {
		t.Errorf("verifier of COMMIT: got %x again, want another one", before)
	}
	sweeper.Wait()
}
