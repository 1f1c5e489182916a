package nfsd

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// A READ of no bytes at the end of a file is the end of the file, also when the file grows between
// the READ and its attributes. A Linux client takes no bytes without eof as EIO.
func TestReadAtGrowingEnd(t *testing.T) {
	c := start(t, nil)
	fh := c.create(root, c.root, "f", 0o644)
	f, err := os.OpenFile(c.path("f"), os.O_WRONLY|os.O_APPEND, 0)
	c.ok(err)
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
		c.ok(c.Read(c.ctx, root, fh, at, buf, &res))
		if res.N == 0 && !res.EOF {
			t.Fatalf("READ at %d: got no bytes and no eof", at)
		}
	}
}
