package nfsd

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"golang.org/x/sys/unix"
)

// A READ of no bytes at the end of a file is the end of the file, also when the file grows between
// the READ and its attributes. A Linux client takes no bytes without eof as EIO.
func TestReadAtGrowingEnd(t *testing.T) {
	c := start(t, nil)
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	f, err := os.OpenFile(c.path("f"), os.O_WRONLY|os.O_APPEND, 0)
	c.OK(err)
	defer f.Close()
	var stop atomic.Bool
	var appender sync.WaitGroup
	defer appender.Wait()
	defer stop.Store(true)
	appender.Go(func() {
		for !stop.Load() {
			_, _ = f.Write([]byte("x"))
		}
	})
	buf := make([]byte, 8)
	for range 20000 {
		at := c.getattr(fh).Size
		var res nfs3.ReadResult
		c.OK(c.Read(c.Ctx, root, fh, at, buf, &res))
		if res.N == 0 && !res.EOF {
			t.Fatalf("READ at %d: got no bytes and no eof", at)
		}
	}
}

// A local process that holds a lease on a file delays the clients of the file, and the server waits
// without using the processor.
func TestLeasedFile(t *testing.T) {
	c := start(t, nil)
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	c.s.objects.end()
	f, err := os.OpenFile(c.path("f"), os.O_RDWR, 0)
	c.OK(err)
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatalf("set lease: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Read(c.Ctx, root, fh, 0, make([]byte, 8), new(nfs3.ReadResult)) }()
	select {
	case err := <-done:
		f.Close()
		var e *nfs3.Error
		if !asError(err, &e) || e.Status != nfs3.ErrJukebox {
			t.Errorf("READ of a leased file: got %v, want %v", err, nfs3.ErrJukebox)
		}
	case <-time.After(5 * time.Second):
		f.Close()
		t.Errorf("READ of a leased file: got no reply, want %v; then %v", nfs3.ErrJukebox, <-done)
	}
}
