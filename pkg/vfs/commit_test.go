package vfs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestCommitRefusedToOneWriter writes to a file as two users. Then the server takes the right to
// write from one of them or from both. Data is lost only if the server refuses its own writer, and
// no other writer can commit it.
func TestCommitRefusedToOneWriter(t *testing.T) {
	const far = 1 << 20
	for _, tt := range []struct {
		name    string
		owner   user
		restart bool // of the server, which loses the data
		want    error
		lost    uint64 // extents
		content string
	}{
		{"one writer", bob, false, nil, 0, "alicebob"},
		{"one writer, restart", bob, true, unix.EACCES, 1, "bob"},
		{"both writers", user{}, false, unix.EACCES, 2, "alicebob"}, // what the server has not lost
		{"both writers, restart", user{}, true, unix.EACCES, 2, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := startOwnExport(t)
			openExport(t, e)
			served := filepath.Join(e.dir, "file")
			putFile(t, served, "", bob, 0o666)
			m, s := e.mountScripted(t, mountConfig{})
			m.severalUsers()
			var verf atomic.Int32
			s.on(func(_ context.Context, m *sunrpc.Message, pass func() error) error {
				err := pass()
				if err == nil && len(m.Result) > 0 && m.Result[3] == byte(nfs.OK) {
					m.Result[len(m.Result)-1] = byte(verf.Load())
				}
				return err
			}, nfs3.ProcWrite, nfs3.ProcCommit)
			var fds []int
			for i, u := range []user{alice, bob} {
				must(t, u.do(t, func() error {
					fd, err := unix.Open(m.path("file"), unix.O_RDWR|unix.O_CLOEXEC, 0)
					fds = append(fds, fd)
					if err == nil {
						_, err = unix.Pwrite(fd, []byte([]string{"alice", "bob"}[i]), int64(i*far))
					}
					return err
				}))
				t.Cleanup(func() { unix.Close(fds[i]) })
				must(t, m.fs.push(background{m.fs}, m.openInode()))
			}
			must(t, unix.Chmod(served, 0o600))
			must(t, unix.Chown(served, int(tt.owner.uid), int(tt.owner.gid)))
			if tt.restart {
				must(t, os.Truncate(served, 0))
				verf.Add(1)
			}
			for i, fd := range fds {
				want(t, []string{"fsync of alice", "fsync of bob"}[i], unix.Fsync(fd), tt.want)
			}
			if n := m.fs.Counters.WriteErrors.Load(); n != tt.lost {
				t.Errorf("discarded extents: got %d, want %d", n, tt.lost)
			}
			content, err := os.ReadFile(served)
			must(t, err)
			if got := string(bytes.ReplaceAll(content, []byte{0}, nil)); got != tt.content {
				t.Errorf("content on the server: got %q, want %q", got, tt.content)
			}
		})
	}
}
