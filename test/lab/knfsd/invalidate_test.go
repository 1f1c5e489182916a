package knfsd

import (
	"strconv"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var (
	_ = register("remote invalidation", "Send With Invalidate for every call with chunks",
		func(t *testing.T, b bench) {
			c, stats := b.offerMemory(t)
			w := b.wire()
			offered, chunks := offers(t, c, w)
			seen := 0
			for _, f := range frames(t, c, w.from+w.sendInvalidate, "iwarp_rdma.inval_stag") {
				for _, h := range f[0] {
					seen++
					if !offered[number(t, h)] {
						t.Errorf("got an invalidation of key %s, which no Call offered", h)
					}
				}
			}
			if chunks == 0 || uint64(seen) != stats.RemoteInvalidations || stats.LocalInvNeeded != 0 || seen != chunks {
				t.Errorf("got %d Calls with chunks, %d Sends With Invalidate, %d remote and %d local invalidations",
					chunks, seen, stats.RemoteInvalidations, stats.LocalInvNeeded)
			}
		})
	_ = register("local invalidation", "no Send With Invalidate unless offered, and each key used for one call only",
		testLocalInvalidation)
)

// testLocalInvalidation checks that the server never invalidates a key, and that no key is reused.
func testLocalInvalidation(t *testing.T, b bench) {
	c, stats := b.offerMemory(t)
	w := b.wire()
	offered, chunks := offers(t, c, w)
	if n := len(frames(t, c, w.from+w.sendInvalidate, "frame.number")); n != 0 {
		t.Errorf("got %d Sends With Invalidate, want none", n)
	}
	// A reused key would have been valid between its calls.
	if chunks == 0 || len(offered) != chunks || stats.LocalInvNeeded != uint64(chunks) ||
		stats.RemoteInvalidations != 0 {
		t.Errorf("got %d Calls with chunks, %d keys, %d local and %d remote invalidations", chunks, len(offered),
			stats.LocalInvNeeded, stats.RemoteInvalidations)
	}
}

// offerMemory captures calls with every kind of chunk, and one without.
func (b bench) offerMemory(t *testing.T) (c *lab.Capture, stats xprt.Stats) {
	t.Helper()
	c = b.record(t, "memory", func() {
		s := b.session(t, nil)
		fh := s.create(t, "memory")
		want := randomBytes(chunkBytes + 3)
		s.write(t, fh, 0, want)
		for mod := range 4 {
			s.read(t, fh, 0, want[:chunkBytes+mod])
		}
		if names, err := s.list(t.Context(), s.root, 128<<10); err != nil || names["memory"] != 1 {
			t.Errorf("READDIRPLUS: got %v, error %v", names, err)
		}
		var attr nfs3.Attr // a call without chunks
		if err := s.GetAttr(t.Context(), s.cred, s.root, &attr); err != nil {
			t.Error(err)
		}
		sendLongCalls(t, s)
		stats = s.tr.Stats()
	})
	b.checkCapture(t, c)
	return c, stats
}

// offers returns the keys that the Calls in a capture offer, and the number of Calls that offer
// any.
func offers(t *testing.T, c *lab.Capture, w wire) (keys map[uint64]bool, calls int) {
	t.Helper()
	keys = make(map[uint64]bool)
	for _, f := range frames(t, c, w.to+"rpcordma.rdma_handle", "rpcordma.rdma_handle", "rpcordma.xid") {
		calls += len(f[1])
		for _, h := range f[0] {
			keys[number(t, h)] = true
		}
	}
	return keys, calls
}

// number parses a number that tshark prints in the base of its field.
func number(t *testing.T, s string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
