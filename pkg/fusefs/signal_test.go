package fusefs

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// A relay forwards TCP between an RDMA front and its NFS server. It can hold the server's replies
// back.
type relay struct {
	*kit.Relay

	mu    sync.Mutex
	open  chan struct{} // closed while replies pass
	asked chan struct{} // closed when a call arrives while replies are held back
}

// startRelay starts a relay to the server at target. The caller calls resume before the test ends.
func startRelay(t *testing.T, target string) *relay {
	t.Helper()
	r := &relay{open: make(chan struct{})}
	close(r.open)
	r.Relay = kit.StartRelay(t, target, kit.RelayOptions{ToServer: r.noteCall, ToClient: r.waitOpen})
	return r
}

func (r *relay) noteCall(int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asked != nil {
		close(r.asked)
		r.asked = nil
	}
}

func (r *relay) waitOpen(int) {
	r.mu.Lock()
	open := r.open
	r.mu.Unlock()
	<-open
}

// pause holds replies back. The next call closes the returned channel.
func (r *relay) pause() (asked <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open, r.asked = make(chan struct{}), make(chan struct{})
	return r.asked
}

func (r *relay) resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = nil
	select {
	case <-r.open:
	default:
		close(r.open)
	}
}

// startRelayedExport exports a directory with NFS-Ganesha through the RDMA front, with a relay
// between the two.
func startRelayedExport(t *testing.T) (*export, *relay) {
	t.Helper()
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o755))
	g := ganesha.Start(t, dir)
	res, err := mountd.Mount(t.Context(), mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	must(t, err)
	r := startRelay(t, g.Addr())
	s, err := nfsserve.Run(context.Background(), nfsserve.Config{Backend: r.Addr().String(),
		RDMAListen: "127.0.0.1:0", Provider: softiwarp.New(softiwarp.Config{})})
	must(t, err)
	t.Cleanup(func() {
		r.resume()
		if err := s.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	dial := func(ctx context.Context) (transport, error) { return dialRDMA(ctx, s.RDMAAddr) }
	return &export{dir: dir, root: res.FH, dial: dial}, r
}

// TestSignalEndsBlockedCall sends signals to processes that wait for a server that does not answer,
// over RDMA. Each process ends, other calls are not disturbed, and the mount works after the server
// answers again.
func TestSignalEndsBlockedCall(t *testing.T) {
	e, r := startRelayedExport(t)
	// noac: no call is answered from a cache.
	m := e.mount(t, mountConfig{buffers: 6, opts: Options{NoAC: true}})
	want := randomBytes(8, 300_000)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), want, 0o644))
	must(t, os.Mkdir(filepath.Join(e.dir, "dir"), 0o755))
	must(t, os.Symlink("file", filepath.Join(e.dir, "link")))
	held, err := os.Open(m.path("file"))
	must(t, err)
	defer held.Close()
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGINT, syscall.SIGTERM} {
		for _, c := range []struct {
			name string
			args []string
		}{
			{"open", []string{"cat", m.path("file")}},
			{"stat", []string{"stat", m.path("file")}},
			{"readlink", []string{"readlink", m.path("link")}},
			{"readdir", []string{"ls", "-f", m.path("dir")}},
			{"statfs", []string{"stat", "-f", m.path("dir")}},
			{"create", []string{"touch", m.path("new")}},
			{"mkdir", []string{"mkdir", m.path("newdir")}},
			{"unlink", []string{"unlink", m.path("nothing")}},
			{"chmod", []string{"chmod", "600", m.path("file")}},
			{"read", []string{"cat"}}, // reads standard input, which is already open
		} {
			t.Run(c.name+" "+sig.String(), func(t *testing.T) {
				cmd := exec.Command(c.args[0], c.args[1:]...)
				cmd.Stdin = held
				asked := r.pause()
				defer r.resume()
				killBlocked(t, sig, asked, cmd)
			})
		}
	}
	// After the interrupted calls the mount works as before.
	wantContent(t, m.path("file"), want)
	must(t, os.WriteFile(m.path("after"), want, 0o644))
	wantContent(t, filepath.Join(e.dir, "after"), want)
	_, err = io.ReadAll(held)
	must(t, err)
}

// TestSignalKeepsEarlierWrites sends signals to processes that wait in write(2), fsync(2) or
// close(2). Data that they wrote before reaches the server after it answers again.
func TestSignalKeepsEarlierWrites(t *testing.T) {
	e, r := startRelayedExport(t)
	m := e.mount(t, mountConfig{buffers: 6})
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGINT} {
		for name, script := range map[string]string{
			"write": "exec head -c 64M /dev/zero", // more than the buffers hold
			"fsync": "exec dd if=/dev/zero bs=50k count=3 conv=fsync,notrunc status=none",
			"close": "head -c 153600 /dev/zero; exec >&-; sleep 1000",
		} {
			if name == "fsync" && sig == syscall.SIGINT {
				continue // dd has a handler for SIGINT, so SIGINT is not fatal
			}
			t.Run(name+" "+sig.String(), func(t *testing.T) {
				f, err := os.Create(m.path(name + sig.String()))
				must(t, err)
				defer f.Close()
				cmd := exec.Command("sh", "-c", script)
				cmd.Stdout = f
				asked := r.pause()
				defer r.resume()
				killBlocked(t, sig, asked, cmd)
				r.resume()
				must(t, f.Sync())
				got, err := os.ReadFile(filepath.Join(e.dir, name+sig.String()))
				must(t, err)
				if len(got) < 150<<10 || len(bytes.Trim(got, "\x00")) != 0 {
					t.Errorf("file on the server: got %d bytes, want at least 153600 zero bytes", len(got))
				}
				if st, err := f.Stat(); err != nil || st.Size() != int64(len(got)) {
					t.Errorf("file size: server has %d bytes, mount has %d (%v)", len(got), st.Size(), err)
				}
			})
		}
	}
}
