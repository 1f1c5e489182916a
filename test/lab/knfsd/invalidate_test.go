package knfsd

import (
	"strconv"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// checkInvalidations compares the Sends With Invalidate in a capture with the keys that were offered, and with what the transport counted. to and from are
// filters of the two directions.
func checkInvalidations(t *testing.T, c *lab.Capture, to, from string, stats xprt.Stats) {
	t.Helper()
	offered := make(map[uint64]bool)
	chunks := 0 // Calls that offer some
	for _, f := range frames(t, c, to+"rpcordma.rdma_handle", "rpcordma.rdma_handle", "rpcordma.xid") {
		chunks += len(f[1])
		for _, h := range f[0] {
			offered[number(t, h)] = true
		}
	}
	seen := 0
	for _, f := range frames(t, c, from+"iwarp_rdma.opcode == 4", "iwarp_rdma.inval_stag") {
		for _, h := range f[0] {
			seen++
			if !offered[number(t, h)] {
				t.Errorf("the server invalidated %s, which no Call has offered", h)
			}
		}
	}
	if uint64(seen) != stats.RemoteInvalidations || stats.LocalInvNeeded != 0 || seen != chunks {
		t.Errorf("%d Calls with chunks, %d Sends With Invalidate, %d counted; %d keys were left to us", chunks, seen, stats.RemoteInvalidations, stats.LocalInvNeeded)
	}
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
