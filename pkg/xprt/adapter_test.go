package xprt

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A scarceDevice fails to allocate or to release its resources.
type scarceDevice struct {
	*stepDevice
	domains, regs int   // that can be allocated
	release       error // of each release
	left          int   // resources that were not released
}

func (d *scarceDevice) AllocPD() (verbs.PD, error) {
	if d.domains == 0 {
		return nil, errors.New("no domain is left")
	}
	d.domains--
	d.left++
	return scarcePD{stepPD{d.stepDevice}, d}, nil
}

type scarcePD struct {
	stepPD
	d *scarceDevice
}

func (p scarcePD) RegMR([]byte) (verbs.MR, error) {
	if p.d.regs == 0 {
		return nil, errors.New("no region is left")
	}
	p.d.regs--
	p.d.left++
	return scarceMR{d: p.d}, nil
}

func (p scarcePD) Dealloc() error {
	p.d.left--
	return p.d.release
}

type scarceMR struct {
	stepLocalMR
	d *scarceDevice
}

func (m scarceMR) Dereg() error {
	m.d.left--
	return m.d.release
}

// TestAdapterReleasesWhatItAllocated opens an adapter on devices that run out of a resource, and
// closes it. Nothing may be left. Failed releases are logged.
func TestAdapterReleasesWhatItAllocated(t *testing.T) {
	busy := errors.New("busy")
	for _, c := range []struct {
		name          string
		domains, regs int
		release       error
		want          string // in the error
		logs          int
	}{
		{"no domain", 0, 2, nil, "no domain", 0},
		{"no region for Sends", 1, 0, nil, "no region", 0},
		{"no region for Receives", 1, 1, nil, "no region", 0},
		{"all", 1, 2, nil, "", 0},
		{"no region for Sends, releases fail", 1, 0, busy, "no region", 1},
		{"all, releases fail", 1, 2, busy, "", 3},
	} {
		var log bytes.Buffer
		tr := unconnected(t, func(cfg *Config) {
			cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Error})
		})
		buffers := leakcheck.Count(leakcheck.Buffer)
		d := &scarceDevice{stepDevice: &stepDevice{}, domains: c.domains, regs: c.regs, release: c.release}
		a, err := tr.adapterFor(d)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if err == nil {
			if again, err := tr.adapterFor(d); again != a || err != nil {
				t.Errorf("%s: the same device: got another adapter, or %v", c.name, err)
			}
			tr.dropAdapter()
		}
		if tr.adapter != nil || d.left != 0 || leakcheck.Count(leakcheck.Buffer) != buffers {
			t.Errorf("%s: got adapter %v, %d resources, %d buffers left; want none", c.name, tr.adapter, d.left,
				leakcheck.Count(leakcheck.Buffer)-buffers)
		}
		if n := strings.Count(log.String(), "busy"); n != c.logs {
			t.Errorf("%s: got %d log lines, want %d:\n%s", c.name, n, c.logs, log.String())
		}
	}
}

// TestOtherDeviceReplacesAdapter connects to another device after the first one.
func TestOtherDeviceReplacesAdapter(t *testing.T) {
	tr := unconnected(t, nil)
	first := &scarceDevice{stepDevice: &stepDevice{}, domains: 1, regs: 2}
	second := &scarceDevice{stepDevice: &stepDevice{}, domains: 1, regs: 2}
	a, err := tr.adapterFor(first)
	if err != nil {
		t.Fatal(err)
	}
	b, err := tr.adapterFor(second)
	if err != nil || a == b || tr.adapter != b || first.left != 0 || second.left != 3 {
		t.Errorf("got %v, the same adapter %v, %d resources of the first device and %d of the second left; "+
			"want another adapter, 0, 3", err, a == b, first.left, second.left)
	}
}

// TestAdapterOutlivesConnection ends a connection. The next one must use the same adapter, and no
// error may be logged.
func TestAdapterOutlivesConnection(t *testing.T) {
	var log bytes.Buffer
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Error})
	})
	call := func() *conn {
		t.Helper()
		if err := tr.Call(testContext(t), echo(1, fill(0, 9000), 9000)); err != nil {
			t.Fatal(err)
		}
		return connOf(t, tr)
	}
	first := call()
	first.fail(io.EOF)
	<-first.down
	if second := call(); second == first || second.adapter != first.adapter {
		t.Errorf("got the same connection %v, the same adapter %v; want false, true", second == first,
			second.adapter == first.adapter)
	}
	tr.Close()
	if log.Len() > 0 {
		t.Errorf("got log lines, want none:\n%s", log.String())
	}
}

// TestReceivesDoNotOverlap checks the buffers of the Receives of a connection.
func TestReceivesDoNotOverlap(t *testing.T) {
	d := &stepDevice{maxMR: 100, granted: make(chan struct{}, 1), mrs: make(map[uint32]*stepMR)}
	tr := unconnected(t, func(c *Config) { c.Provider, c.KeepAlive = d, -1 })
	d.granted <- struct{}{}
	if err := tr.Connect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	a := tr.adapter
	d.mu.Lock()
	defer d.mu.Unlock()
	receives := d.qps[0].rq
	if len(receives) != a.params.RecvWRs-1 {
		t.Errorf("Receives: got %d, want %d", len(receives), a.params.RecvWRs-1)
	}
	for i, r := range receives {
		buf := r.SGE.Buf
		if len(buf) != a.recvSize || cap(buf) != a.recvSize || &buf[0] != &a.recvArena[i*a.recvSize] {
			t.Errorf("buffer %d: got %d bytes, capacity %d; want %d bytes behind the buffer before", i, len(buf),
				cap(buf), a.recvSize)
		}
	}
}
