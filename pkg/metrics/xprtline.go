package metrics

import (
	"strconv"
	"time"
)

// XprtLine returns t as the "xprt:" line that the kernel's RDMA transport prints in
// /proc/self/mountstats, and nfs-utils' mountstats reads: a tab, "xprt:", a tab, "rdma", and 27
// numbers in the kernel's order. Port and bind count are 0, as port discovery is not the
// transport's here; times are whole seconds. The column that kernels first called mrs_recovered and
// later mrs_recycled is the sum of both.
func XprtLine(t *Transport) string {
	fields := [...]uint64{
		0, // port
		0, // bind_count
		t.Connects,
		uint64(t.ConnectTime / time.Second),
		uint64(t.Idle / time.Second),
		t.Sends,
		t.Receives,
		t.BadXIDs,
		t.InflightSum,
		t.BacklogSum,
		t.ReadChunks,
		t.WriteChunks,
		t.ReplyChunks,
		t.TotalRDMARequest,
		t.TotalRDMAReply,
		t.PullupCopyBytes,
		t.FixupCopyBytes,
		t.HardwayRegister,
		t.FailedMarshal,
		t.BadReply,
		t.NomsgCall,
		t.MRsRecycled + t.MRsRecovered,
		t.MRsOrphaned,
		t.MRsAllocated,
		t.LocalInvNeeded,
		t.EmptySendctx,
		t.ReplyWaitsForSend,
	}
	line := []byte("\txprt:\trdma")
	for _, f := range fields {
		line = append(line, ' ')
		line = strconv.AppendUint(line, f, 10)
	}
	return string(line)
}
