package vfs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestOpenSeesChangeFoundByOtherOpen opens a file that another client has changed, while the kernel
// has not yet handled the reply to an earlier open that found the change.
func TestOpenSeesChangeFoundByOtherOpen(t *testing.T) {
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{})
	there := filepath.Join(e.dir, "f")
	must(t, os.WriteFile(there, bytes.Repeat([]byte("1"), 100), 0o644))
	wantContent(t, m.path("f"), bytes.Repeat([]byte("1"), 100))
	file := fuse.InHeader{NodeId: m.inodeOf(t, "f").id, Caller: fuse.Caller{Pid: uint32(os.Getpid())}}
	e.awaitTick(t)
	must(t, os.WriteFile(there, bytes.Repeat([]byte("2"), 100), 0o644))
	var out fuse.OpenOut
	if st := call(m.fs, kernel.OpOpen, fuse.OpenIn{InHeader: file}, "", &out); !st.Ok() { // the kernel gets no reply
		t.Fatal(st)
	}
	defer call(m.fs, kernel.OpRelease, fuse.ReleaseIn{InHeader: file, Fh: out.Fh}, "", none)
	wantContent(t, m.path("f"), bytes.Repeat([]byte("2"), 100))
}

// TestReadsDoNotKeepStalePages reads a file that another client has changed. The replies keep the
// cached attributes fresh, and show the change.
func TestReadsDoNotKeepStalePages(t *testing.T) {
	const size = 4 << 20
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{opts: Options{AcRegMin: 2 * time.Second, AcRegMax: 2 * time.Second, AcDirMax: 1}})
	there := filepath.Join(e.dir, "f")
	must(t, os.WriteFile(there, make([]byte, size), 0o644))
	f, buf := openAndRead(t, m.path("f"), 3)
	e.awaitTick(t)
	other, err := os.OpenFile(there, os.O_WRONLY, 0)
	must(t, err)
	defer other.Close()
	_, err = other.WriteAt([]byte("new"), 0)
	must(t, err)
	if !eventually(func() bool {
		must(t, unix.Fadvise(int(f.Fd()), size/2, size/2, unix.FADV_DONTNEED))
		_, err := f.ReadAt(make([]byte, 1), size-4096) // a READ
		must(t, err)
		_, err = f.ReadAt(buf, 0)
		must(t, err)
		return string(buf) == "new"
	}) {
		t.Errorf("read of a cached page: got %q forever, want the other client's data", buf)
	}
}

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
