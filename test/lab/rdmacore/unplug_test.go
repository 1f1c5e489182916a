//go:build rdmacore && cgo && linux

package rdmacore

import (
	"bytes"
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// link runs a command on the guest's RDMA link.
func link(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("rdma", append([]string{"link"}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("rdma link %v: %v\n%s", args, err, out)
	}
}

// TestUnplug takes the device away under a mount and gives another back: the call under way waits, and goes on with the new device.
func TestUnplug(t *testing.T) {
	buf := arena(t, 256<<10)
	name := mustResolve(t).Attrs().Name
	tr, root := connect(t, devices(t))
	c := nfs3.NewClient(tr, nfs3.Options{})
	fh := create(t, c, root, "unplug")
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	block(buf, 0, 3)
	want := bytes.Clone(buf)
	var w nfs3.WriteResult
	if err := c.Write(ctx, cred, fh, 0, buf, nfs3.FileSync, &w); err != nil || int(w.Count) != len(buf) {
		t.Fatalf("write: %d, %v", w.Count, err)
	}
	link(t, "delete", name)
	for tr.Stats().State == "connected" {
		if ctx.Err() != nil {
			t.Fatal("the connection does not notice that its device is gone")
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("without a device: %v", tr.Stats().LastError)
	read := make(chan error, 1)
	clear(buf)
	var r nfs3.ReadResult
	go func() { read <- c.Read(ctx, cred, fh, 0, buf, &r) }()
	select {
	case err := <-read:
		t.Fatalf("a read without a device: %v", err)
	case <-time.After(2 * time.Second):
	}
	link(t, "add", name, "type", strings.TrimRight(name, "0123456789"), "netdev", "eth0")
	if err := <-read; err != nil {
		t.Fatalf("read after the device is back: %v", err)
	}
	if !bytes.Equal(buf[:r.N], want[:r.N]) || r.N == 0 {
		t.Errorf("%d octets came, or wrong ones", r.N)
	}
}
