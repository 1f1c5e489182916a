package knfsd

import (
	"strconv"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var (
	_ = register("remote invalidation", "Send With Invalidate for every call that offers memory",
		func(t *testing.T, b bench) {
			c, stats := b.offerMemory(t)
			w := b.wire()
			offered, chunks := offers(t, c, w)
			seen := 0
			for _, f := range frames(t, c, w.from+w.sendInvalidate, "iwarp_rdma.inval_stag") {
				for _, h := range f[0] {
					seen++
					if !offered[number(t, h)] {
						t.Errorf("the server invalidated %s, which no Call has offered", h)
					}
				}
			}
			if chunks == 0 || uint64(seen) != stats.RemoteInvalidations || stats.LocalInvNeeded != 0 || seen != chunks {
				t.Errorf("%d Calls with chunks, %d Sends With Invalidate, %d counted; %d keys were left to us",
					chunks, seen, stats.RemoteInvalidations, stats.LocalInvNeeded)
			}
		})
	_ = register("own invalidation", "no Send With Invalidate where none was offered, and every key of its own for one call alone", func(t *testing.T, b bench) {
		c, stats := b.offerMemory(t)
		w := b.wire()
		offered, chunks := offers(t, c, w)
		if n := len(frames(t, c, w.from+w.sendInvalidate, "frame.number")); n != 0 {
			t.Errorf("%d messages of the server invalidate", n)
		}
		// A key that was used twice would have been good in between.
		if chunks == 0 || len(offered) != chunks || stats.LocalInvNeeded != uint64(chunks) ||
			stats.RemoteInvalidations != 0 {
			t.Errorf("%d Calls with chunks, with %d keys; %d keys were invalidated here and %d by the server", chunks,
				len(offered), stats.LocalInvNeeded, stats.RemoteInvalidations)
		}
	})
)

// offerMemory captures calls that offer memory in chunks of every kind.
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
			t.Errorf("READDIRPLUS: %v, %v", names, err)
		}
		var attr nfs3.Attr // one that offers nothing
		if err := s.GetAttr(t.Context(), s.cred, s.root, &attr); err != nil {
			t.Error(err)
		}
		sendLongCalls(t, s)
		stats = s.tr.Stats()
	})
	b.sound(t, c)
	return c, stats
}

// offers reads from a capture which keys were offered, and how many Calls offer some.
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

// number reads what tshark prints, in whatever base it prefers for a field.
func number(t *testing.T, s string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
