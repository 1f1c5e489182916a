package fusefs

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestReadAheadKeepsRequestsInFlight checks that the kernel sends readAheadRequests READs for one
// program that reads a file in order, before the server replies to the first of them.
func TestReadAheadKeepsRequestsInFlight(t *testing.T) {
	e := startOwnExport(t)
	want := randomBytes(1, 8<<20)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), want, 0o644))
	m, s := e.mountScripted(t, mountConfig{})
	over := make(chan struct{})
	var inFlight atomic.Int32
	s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
		inFlight.Add(1)
		<-over
		return pass()
	}, nfs3.ProcRead)
	read := make(chan []byte)
	go func() {
		data, err := os.ReadFile(m.path("file"))
		if err != nil {
			t.Error(err)
		}
		read <- data
	}()
	if !eventually(func() bool { return inFlight.Load() == readAheadRequests }) {
		t.Errorf("READs in flight: got %d, want %d", inFlight.Load(), readAheadRequests)
	}
	close(over)
	if got := <-read; string(got) != string(want) {
		t.Error("read: got other data than the file has")
	}
}
