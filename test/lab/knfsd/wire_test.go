package knfsd

import (
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

// sound holds a capture to what each must be: whole, and in order from MPA up to RPC, with no Terminate.
func sound(t *testing.T, c *lab.Capture) {
	t.Helper()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("malformed packets (%v):\n%.3000s", err, out)
	}
	if n := len(frames(t, c, "iwarp_rdma.terminate", "frame.number")); n != 0 {
		t.Errorf("%d packets are Terminate messages", n)
	}
}
