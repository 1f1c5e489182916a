package knfsd

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// frames returns the given fields of each frame that matches a filter. A frame with several
// messages has several values of a field.
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

// A wire describes a transport by display filters for tshark. tshark finds RPC-over-RDMA on both
// transports without options.
type wire struct {
	to, from string // prefix of a filter for messages to the server, and from it

	send, sendInvalidate, readRequest, readResponse, write string

	resent string // resent or reordered packets
	fatal  string // a side reports a fatal error
}

// wire returns the filters for the server's device.
func (b bench) wire() wire {
	if b.device == lab.RXE {
		return roce(b.RDMA.Addr())
	}
	return iwarp(b.RDMA.Port())
}

// iwarp returns the filters for RDMAP (RFC 5040) in a TCP connection to a port.
func iwarp(port uint16) wire {
	return wire{
		to:             fmt.Sprintf("tcp.dstport == %d && ", port),
		from:           fmt.Sprintf("tcp.srcport == %d && ", port),
		send:           "iwarp_rdma.opcode == 3",
		sendInvalidate: "iwarp_rdma.opcode == 4",
		readRequest:    "iwarp_rdma.rr",
		readResponse:   "iwarp_rdma.opcode == 2",
		write:          "iwarp_rdma.opcode == 0 && iwarp_ddp.tagged",
		resent: fmt.Sprintf("tcp.port == %d && (tcp.analysis.retransmission || "+
			"tcp.analysis.out_of_order || tcp.analysis.lost_segment)", port),
		fatal: "iwarp_rdma.terminate",
	}
}

// roce returns the filters for RoCE version 2: reliable connections with InfiniBand's packets
// (InfiniBand volume 1, release 1.4, §9.2). The first, middle and last packets of a message have
// different opcodes.
func roce(server netip.Addr) wire {
	return wire{
		to:             fmt.Sprintf("infiniband && ip.dst == %v && ", server),
		from:           fmt.Sprintf("infiniband && ip.src == %v && ", server),
		send:           "infiniband.bth.opcode in {0, 1, 2, 4}",
		sendInvalidate: "infiniband.bth.opcode in {22, 23}",
		readRequest:    "infiniband.bth.opcode == 12",
		readResponse:   "infiniband.bth.opcode in {13, 14, 15, 16}",
		write:          "infiniband.bth.opcode in {6, 7, 8, 10}",
		// After a NAK for a missing packet (§9.7.5.2.8) the other side sends this packet and all
		// later packets again.
		resent: "infiniband.aeth.syndrome.opcode == 3 && infiniband.aeth.syndrome.error_code == 0",
		fatal:  "infiniband.aeth.syndrome.opcode == 3 && infiniband.aeth.syndrome.error_code > 0",
	}
}

// captureTries bounds the repetitions of traffic until its capture is reliable. On a busy host two
// consecutive captures were unreliable.
const captureTries = 8

// record captures the frames that traffic causes. On a busy host packets may be resent or recorded
// out of order. The decoder may then lose its position and decode payload as headers, so record
// empties the export and repeats the traffic.
func (b bench) record(t *testing.T, name string, traffic func()) *lab.Capture {
	t.Helper()
	for try := 1; ; try++ {
		c := b.Capture(t, fmt.Sprintf("%s-%d", name, try))
		traffic()
		if err := c.Stop(); err != nil {
			t.Fatal(err)
		}
		resent := frames(t, c, b.wire().resent, "frame.number")
		if len(resent) == 0 || try == captureTries || t.Failed() {
			return c
		}
		t.Logf("try %d: capture has %d resent or reordered packets", try, len(resent))
		b.MustRun("rm -rf " + lab.ExportRW + "/*")
	}
}

// checkCapture checks that a capture decodes up to RPC and contains no fatal error.
func (b bench) checkCapture(t *testing.T, c *lab.Capture) {
	t.Helper()
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("got malformed packets (error %v):\n%.3000s", err, out)
	}
	if n := len(frames(t, c, b.wire().fatal, "frame.number")); n != 0 {
		t.Errorf("got %d Terminate messages or refused requests", n)
	}
}
