//go:build rdmacore && cgo && linux

package rdmacore

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	provider "github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// The tests in this file run in a guest, against its own server or that of another guest. The tests
// in lab_test.go start them there.

// Ports of the guest's server.
const (
	rdmaPort  = 20049
	mountPort = 20048
)

const (
	// guestEnv contains the server's address.
	guestEnv = "NFSRDMAD_RDMACORE_GUEST"
	// exportEnv is a directory on which the server's export is mounted without RDMA. If it is
	// empty, the export is the guest's own.
	exportEnv = "NFSRDMAD_RDMACORE_EXPORT"
)

var cred = sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "guest"})

// inGuest returns the server's address. It skips the test if guestEnv is empty.
func inGuest(t testing.TB) netip.Addr {
	t.Helper()
	s := os.Getenv(guestEnv)
	if s == "" {
		t.Skipf("test needs a guest of the lab: %s is not set", guestEnv)
	}
	return netip.MustParseAddr(s)
}

// connect returns a transport to the server, and the file handle of the export.
func connect(t *testing.T, p verbs.Provider) (*xprt.Transport, nfs3.FH) {
	t.Helper()
	addr := inGuest(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	root, err := mountd.Mount(ctx, mountd.Args{Host: addr.String(), Port: mountPort, Export: "/export",
		Cred: &sunrpc.AuthSys{Machine: "guest"}, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := xprt.New(xprt.Config{Provider: p, Addr: netip.AddrPortFrom(addr, rdmaPort), Slots: 16,
		ReconnectMin: 20 * time.Millisecond,
		ReconnectMax: time.Second, Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: t.Output()})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tr.Close()
		t.Logf("%+v", tr.Stats())
	})
	if err := tr.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	return tr, root.FH
}

func devices(t testing.TB) verbs.Provider {
	t.Helper()
	inGuest(t)
	p, err := provider.New(provider.Config{Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Info,
		Output: t.Output()})})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// create creates a file, or truncates it.
func create(t *testing.T, c *nfs3.Client, dir nfs3.FH, name string) nfs3.FH {
	t.Helper()
	var res nfs3.CreateResult
	if err := c.Create(context.Background(), cred, dir, name,
		&nfs3.CreateHow{Mode: nfs3.Unchecked, Attr: nfs3.SetAttr{HasMode: true, Mode: 0o644,
			HasSize: true}}, &res); err != nil {
		t.Fatal(err)
	}
	return res.FH
}

func arena(t *testing.T, n int) []byte {
	t.Helper()
	b, err := membuf.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { membuf.Free(b) })
	return b
}

// TestMainJob writes a file in pieces of different sizes, compares the server's file, and reads it
// through a second connection.
func TestMainJob(t *testing.T) {
	const size = 8 << 20
	buf, back := arena(t, 1<<20), arena(t, 1<<20)
	tr, root := connect(t, devices(t))
	c := nfs3.NewClient(tr)
	fh := create(t, c, root, "job")
	want := make([]byte, size)
	pattern(want, 0, 0x5a)
	sizes := []int{1, 100, 4096, 5000, 65536, 100001, 262144, 1 << 20}
	ctx := context.Background()
	for off, i := 0, 0; off < size; i++ {
		n := min(sizes[i%len(sizes)], size-off)
		copy(buf, want[off:off+n])
		var w nfs3.WriteResult
		if err := c.Write(ctx, cred, fh, uint64(off), buf[:n], nfs3.Unstable, &w); err != nil {
			t.Fatalf("write %d bytes at %d: %v", n, off, err)
		}
		off += int(w.Count)
	}
	var cr nfs3.CommitResult
	if err := c.Commit(ctx, cred, fh, 0, 0, &cr); err != nil {
		t.Fatal(err)
	}
	dir := os.Getenv(exportEnv)
	if dir == "" {
		dir = "/export"
	}
	if got, err := os.ReadFile(filepath.Join(dir, "job")); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("got a different file of %d bytes on the server (error %v)", len(got), err)
	}
	second, _ := connect(t, devices(t))
	rc := nfs3.NewClient(second)
	for off, i := 0, 3; off < size; i++ {
		n := min(sizes[i%len(sizes)], size-off)
		var r nfs3.ReadResult
		clear(back[:n])
		if err := rc.Read(ctx, cred, fh, uint64(off), back[:n], &r); err != nil || r.N == 0 {
			t.Fatalf("read %d bytes at %d: got %d, error %v", n, off, r.N, err)
		}
		if !bytes.Equal(back[:r.N], want[off:off+r.N]) {
			t.Fatalf("read at %d: got different data", off)
		}
		off += r.N
	}
	attrs := mustResolve(t).Attrs()
	t.Logf("device %s (%v), registration for each use: %v", attrs.Name, attrs.Transport,
		attrs.Caps.Has(verbs.CapPerIOReg))
}

// mustResolve returns the device that reaches the server.
func mustResolve(t testing.TB) verbs.Device {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	id, err := devices(t).Resolve(ctx, netip.AddrPortFrom(inGuest(t), rdmaPort))
	if err != nil {
		t.Fatal(err)
	}
	defer id.Close()
	return id.Device()
}

// TestStorm checks data while injected faults end connections and fail registrations and
// invalidations.
func TestStorm(t *testing.T) {
	const plan = "seed=7,disconnect-every=150,post-fail=170:0,flush-reg=90,reg-error=130,linv-error=110,alloc-fail=40"
	p, err := faults.Parse(plan)
	if err != nil {
		t.Fatal(err)
	}
	const workers, calls, span = 3, 60, 1 << 20
	var mem [workers][]byte
	for w := range mem {
		mem[w] = arena(t, 256<<10)
	}
	faulty := faults.New(devices(t), p, hclog.NewNullLogger())
	tr, root := connect(t, faulty)
	c := nfs3.NewClient(tr)
	var wg sync.WaitGroup
	for w := range workers {
		fh := create(t, c, root, fmt.Sprintf("storm%d", w))
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := churn(c, fh, mem[w], byte(w+1), calls, span); err != nil {
				t.Errorf("worker %d: %v", w, err)
			}
		}()
	}
	wg.Wait()
	t.Logf("faults: %+v", faulty.Counts())
}

// churn writes and reads at random, and compares the data with a copy.
func churn(c *nfs3.Client, fh nfs3.FH, buf []byte, seed byte, calls, span int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	model := make([]byte, span)
	end := 0
	rng := rand.New(rand.NewPCG(uint64(seed), 1))
	for i := range calls {
		n := 1 + rng.IntN(len(buf))
		off := rng.IntN(span - n + 1)
		if i%2 == 0 {
			pattern(buf[:n], off, seed+byte(i))
			var w nfs3.WriteResult
			if err := c.Write(ctx, cred, fh, uint64(off), buf[:n], nfs3.FileSync, &w); err != nil {
				return fmt.Errorf("call %d: write %d bytes at %d: %w", i, n, off, err)
			}
			copy(model[off:], buf[:w.Count])
			end = max(end, off+int(w.Count))
			continue
		}
		if off >= end {
			continue
		}
		var r nfs3.ReadResult
		clear(buf[:n])
		if err := c.Read(ctx, cred, fh, uint64(off), buf[:n], &r); err != nil {
			return fmt.Errorf("call %d: read %d bytes at %d: %w", i, n, off, err)
		}
		if !bytes.Equal(buf[:r.N], model[off:off+r.N]) {
			return fmt.Errorf("call %d: read %d bytes at %d: got different data", i, r.N, off)
		}
	}
	return nil
}
