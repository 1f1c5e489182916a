package xprt

import (
	"bytes"
	"io"
	"net/netip"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestConnectReleasesWhatItAllocated connects on devices that run out of protection domains or of
// memory regions. Nothing may be left.
func TestConnectReleasesWhatItAllocated(t *testing.T) {
	const needed = 3 // a domain, and a region each for Sends and Receives
	for resources := range needed + 1 {
		dev := &stepDevice{server: &stepServer{}, mrs: make(map[uint32]*stepMR), scarce: true, resources: resources}
		tr := unconnected(t, func(c *Config) {
			c.Provider, c.Addr, c.KeepAlive = dev, netip.MustParseAddrPort("192.0.2.1:20049"), -1
		})
		buffers := selfcheck.Count(selfcheck.Buffer)
		if err := tr.Connect(testContext(t)); err == nil != (resources == needed) {
			t.Errorf("%d resources: got %v", resources, err)
		}
		if n := selfcheck.Count(selfcheck.Buffer) - buffers; resources < needed && (dev.held != 0 || n != 0) {
			t.Errorf("%d resources: got %d of them, %d buffers left; want none", resources, dev.held, n)
		}
		tr.Close()
		if dev.held != 0 {
			t.Errorf("%d resources: got %d left after Close, want none", resources, dev.held)
		}
	}
}

// TestNextConnectionUsesSameMemory ends a connection. The next one must use the same protection
// domain and memory, and nothing may be logged.
func TestNextConnectionUsesSameMemory(t *testing.T) {
	var log bytes.Buffer
	inBubble(t, func(c *Config, _ *stepServer) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Error})
	}, func(t *testing.T, b *bubble) {
		b.mustSucceed(readOf(8192))
		before := b.dev.allocated
		b.qp().lose(io.EOF)
		b.mustSucceed(readOf(8192))
		if s := b.tr.Stats(); s.Connects != 2 || b.dev.allocated != before || log.Len() > 0 {
			t.Errorf("got %d connects, %d resources, log %q; want 2, %d, none", s.Connects, b.dev.allocated, &log,
				before)
		}
	})
}

// TestQueuesFitConnection checks the Receives of a connection, and the number of RDMA Reads that
// the server may have in flight, on devices with different limits. Stock siw exceeds other numbers
// than powers of two.
func TestQueuesFitConnection(t *testing.T) {
	for limit, want := range map[int]uint16{0: 1, 1: 1, 2: 2, 3: 2, 16: 16, 100: 64, 128: 128, 1000: 128} {
		dev := &stepDevice{server: &stepServer{}, mrs: make(map[uint32]*stepMR),
			attrs: func(a *verbs.DeviceAttrs) { a.MaxQPRdAtom = limit }}
		tr := unconnected(t, func(c *Config) { c.Provider, c.KeepAlive = dev, -1 })
		if err := tr.Connect(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if dev.readDepth != want {
			t.Errorf("device with %d RDMA Reads: got %d, want %d", limit, dev.readDepth, want)
		}
		seen := make(map[*byte]bool)
		for _, r := range dev.qps[0].rq {
			buf := r.SGE.Buf
			if len(buf) < 2*DefaultInlineBytes || cap(buf) != len(buf) || seen[&buf[0]] {
				t.Errorf("Receive: got %d bytes, capacity %d, used twice %v", len(buf), cap(buf), seen[&buf[0]])
			}
			seen[&buf[0]] = true
		}
		if most := dev.qps[0].attr.MaxRecvWR; len(seen) < MinSlots || len(seen) >= most {
			t.Errorf("Receives: got %d, want less than %d", len(seen), most)
		}
		tr.Close()
	}
}
