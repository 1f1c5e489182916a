package nfsd

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// A READ of no bytes at the end of a file is the end of the file, also when the file grows between
// the READ and its attributes. A Linux client takes no bytes without eof as EIO.
func TestReadAtGrowingEnd(t *testing.T) {
	grow := func(string) {}
	c := start(t, func(cfg *Config) { cfg.between = func(name string) { grow(name) } })
	fh := c.MustCreate(root, c.Root, "f", 0o644)
	grow = func(string) { c.OK(os.WriteFile(c.path("f"), []byte("text"), 0o644)) }
	var res nfs3.ReadResult
	c.OK(c.Read(c.Ctx, root, fh, 0, make([]byte, 8), &res))
	if res.N != 0 || !res.EOF {
		t.Errorf("READ: got %d bytes, eof %v; want no bytes and eof", res.N, res.EOF)
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
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	c.OK(err)
	err = c.Read(c.Ctx, root, fh, 0, make([]byte, 8), new(nfs3.ReadResult))
	var e *nfs3.Error
	if !asError(err, &e) || e.Status != nfs3.ErrJukebox {
		t.Errorf("READ of a leased file: got %v, want %v", err, nfs3.ErrJukebox)
	}
}
