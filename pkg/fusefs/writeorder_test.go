package fusefs

import (
	"context"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestWriteRepliesOutOfOrder has two WRITEs under way. The server makes the file longer with the second one that it works on, whose reply comes first; the other
// reply tells of a shorter file.
func TestWriteRepliesOutOfOrder(t *testing.T) {
	const low, high, far = 100, 200, 1 << 20
	m, s := startExport(t).mountScripted(t, mountConfig{})
	f, err := os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	lowDone := make(chan struct{}) // the server has done the WRITE to the beginning
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		if len(call.ArgData) != low {
			<-lowDone
			return pass()
		}
		err := pass()
		ino := m.theFile()
		close(lowDone)
		for end := time.Now().Add(testTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
			ino.mu.Lock()
			pending := ino.pending
			ino.mu.Unlock()
			if pending == 1 {
				return err
			}
		}
		t.Error("the other reply was not taken in")
		return err
	}, nfs3.ProcWrite)
	for _, w := range []struct {
		n   int
		off int64
	}{{high, far}, {low, 0}} {
		if _, err := unix.Pwrite(int(f.Fd()), make([]byte, w.n), w.off); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		st, err := f.Stat()
		must(t, err)
		if st.Size() != far+high {
			t.Errorf("the file has %d octets, want %d", st.Size(), far+high)
		}
		must(t, f.Sync())
	}
}

// theFile is the only file that is open on the mount.
func (m *testMount) theFile() *inode {
	m.fs.handlesMu.Lock()
	defer m.fs.handlesMu.Unlock()
	for _, h := range m.fs.files {
		return h.ino
	}
	return nil
}
