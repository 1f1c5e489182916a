package knfsd

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// frames returns the given fields of each frame of a capture that a filter lets through; a frame
// with several messages has several values of a field.
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

// A wire is how a transport shows in a capture: filters of the decoder. The decoder finds
// RPC-over-RDMA by itself in both.
type wire struct {
	to, from string // messages to the server, and from it; each goes before other filters

	send, sendInvalidate, readRequest, readResponse, write string

	again string // packets that came twice, or out of their order
	fatal string // one side has told the other that it cannot go on
}

// wire is that of the server's device.
func (b bench) wire() wire {
	if b.device == lab.RXE {
		return roce(b.RDMA.Addr())
	}
	return iwarp(b.RDMA.Port())
}

// iwarp is RDMAP (RFC 5040) in a TCP connection to a port.
func iwarp(port uint16) wire {
	return wire{
		to:             fmt.Sprintf("tcp.dstport == %d && ", port),
		from:           fmt.Sprintf("tcp.srcport == %d && ", port),
		send:           "iwarp_rdma.opcode == 3",
		sendInvalidate: "iwarp_rdma.opcode == 4",
		readRequest:    "iwarp_rdma.rr",
		readResponse:   "iwarp_rdma.opcode == 2",
		write:          "iwarp_rdma.opcode == 0 && iwarp_ddp.tagged",
		again:          fmt.Sprintf("tcp.port == %d && (tcp.analysis.retransmission || tcp.analysis.out_of_order || tcp.analysis.lost_segment)", port),
		fatal:          "iwarp_rdma.terminate",
	}
}

// roce is RoCE version 2 with a server: reliable connections, whose packets are InfiniBand's
// (volume 1, release 1.4, §9.2). A message of several packets has another opcode in its first, its
// middle and its last packet.
func roce(server netip.Addr) wire {
	return wire{
		to:             fmt.Sprintf("infiniband && ip.dst == %v && ", server),
		from:           fmt.Sprintf("infiniband && ip.src == %v && ", server),
		send:           "infiniband.bth.opcode in {0, 1, 2, 4}",
		sendInvalidate: "infiniband.bth.opcode in {22, 23}",
		readRequest:    "infiniband.bth.opcode == 12",
		readResponse:   "infiniband.bth.opcode in {13, 14, 15, 16}",
		write:          "infiniband.bth.opcode in {6, 7, 8, 10}",
		// A NAK for a packet that was missing (§9.7.5.2.8) makes the other side begin again there.
		again: "infiniband.aeth.syndrome.opcode == 3 && infiniband.aeth.syndrome.error_code == 0",
		fatal: "infiniband.aeth.syndrome.opcode == 3 && infiniband.aeth.syndrome.error_code > 0",
	}
}

// captureTries is how often traffic is repeated for a capture that can be relied on. Two in a row
// that could not be were seen on a busy host.
const captureTries = 8

// record captures what traffic causes. Where something was sent again, or packets were recorded out
// of their order, as happens on a busy host, the decoder may lose its place, and takes payload for
// headers: then it is done once more, with an empty export.
func (b bench) record(t *testing.T, name string, traffic func()) *lab.Capture {
	t.Helper()
	for try := 1; ; try++ {
		c := b.Capture(t, fmt.Sprintf("%s-%d", name, try))
		traffic()
		if err := c.Stop(); err != nil {
			t.Fatal(err)
		}
		again := frames(t, c, b.wire().again, "frame.number")
		if len(again) == 0 || try == captureTries || t.Failed() {
			return c
		}
		t.Logf("try %d: %d packets out of order in the capture", try, len(again))
		b.MustRun("rm -rf " + lab.ExportRW + "/*")
	}
}

// sound holds a capture to what each must be: in order up to RPC, and nobody has given up.
func (b bench) sound(t *testing.T, c *lab.Capture) {
	t.Helper()
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("malformed packets (%v):\n%.3000s", err, out)
	}
	if n := len(frames(t, c, b.wire().fatal, "frame.number")); n != 0 {
		t.Errorf("%d packets are Terminate messages, or refuse a request", n)
	}
}
