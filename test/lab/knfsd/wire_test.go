package knfsd

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// frames returns the given fields of each frame of a capture that a filter lets through; a frame with several messages has several values of a field.
func frames(t *testing.T, c *lab.Capture, filter string, fields ...string) [][][]string {
	t.Helper()
	args := []string{"--disable-protocol", "nfs", "-Y", filter, "-T", "fields"}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	out, err := c.Tshark(args...)
	if err != nil {
		t.Fatal(err)
	}
	var all [][][]string
	for line := range strings.Lines(out) {
		var frame [][]string
		for cell := range strings.SplitSeq(strings.TrimSuffix(line, "\n"), "\t") {
			var values []string
			if cell != "" {
				values = strings.Split(cell, ",")
			}
			frame = append(frame, values)
		}
		all = append(all, frame)
	}
	return all
}

// captureTries is how often traffic is repeated for a capture that can be relied on.
const captureTries = 3

// record captures what traffic causes. Where TCP sent something again, or packets were recorded out of their order, as happens on a busy host, the
// decoder may lose its place, and takes payload for headers: then it is done once more, with an empty export.
func (b bench) record(t *testing.T, name string, traffic func()) *lab.Capture {
	t.Helper()
	for try := 1; ; try++ {
		c := b.Capture(t, fmt.Sprintf("%s-%d", name, try))
		traffic()
		if err := c.Stop(); err != nil {
			t.Fatal(err)
		}
		again := frames(t, c, "tcp.analysis.retransmission || tcp.analysis.out_of_order || tcp.analysis.lost_segment", "frame.number")
		if len(again) == 0 || try == captureTries || t.Failed() {
			return c
		}
		t.Logf("try %d: %d packets out of order in the capture", try, len(again))
		b.MustRun("rm -rf " + lab.ExportRW + "/*")
	}
}

// sound holds a capture to what each must be: in order from MPA up to RPC, with no Terminate.
func sound(t *testing.T, c *lab.Capture) {
	t.Helper()
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("malformed packets (%v):\n%.3000s", err, out)
	}
	if n := len(frames(t, c, "iwarp_rdma.terminate", "frame.number")); n != 0 {
		t.Errorf("%d packets are Terminate messages", n)
	}
}
