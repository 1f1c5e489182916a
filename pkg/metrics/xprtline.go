package metrics

import (
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// XprtLine returns t in the format of the "xprt:" line in /proc/self/mountstats, which
// mountstats(8) of nfs-utils reads. The line has a tab, "xprt:", a tab, "rdma", and 27 numbers in
// the order of net/sunrpc/xprtrdma/transport.c.
//
// Times are whole seconds. Port, bind count and hardway_register are always 0: this transport
// discovers no port, and its buffers never grow. Kernels call one column mrs_recovered at first and
// mrs_recycled later; XprtLine prints the sum of both there.
func XprtLine(t *xprt.Numbers) string {
	fields := [...]uint64{
		0, // port
		0, // bind_count
		t.Connects,
		uint64(t.ConnectTime / time.Second),
		uint64(t.IdleTime / time.Second),
		t.Sends,
		t.Recvs,
		t.BadXIDs,
		t.InFlightSum,
		t.QueuedSum,
		t.ReadChunks,
		t.WriteChunks,
		t.ReplyChunks,
		t.TotalRDMARequest,
		t.TotalRDMAReply,
		t.PullupCopyBytes,
		t.FixupCopyBytes,
		0, // hardway_register
		t.FailedMarshal,
		t.BadReply,
		t.NomsgCall,
		t.MRsRecycled + t.MRsRecovered,
		t.MRsOrphaned,
		t.MRsAllocated,
		t.LocalInvNeeded,
		t.EmptySendCtx,
		t.ReplyWaitsForSend,
	}
	line := []byte("\txprt:\trdma")
	for _, f := range fields {
		line = append(line, ' ')
		line = strconv.AppendUint(line, f, 10)
	}
	return string(line)
}
