package softiwarp

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestReceivedTerminateIsReported checks both bit orders, the cause given to OnDisconnect, and the
// status of the RDMA Read that the Terminate names.
func TestReceivedTerminateIsReported(t *testing.T) {
	const readHeader = "002e 4141 00000000 00000001 00000001 00000000"
	for _, c := range []struct {
		name, wire string
		want       termCode
		status     verbs.Status
	}{
		{"RFC order", "0102e000" + readHeader, termReadAccess, verbs.StatusRemAccessErr},
		{"siw order", "10020700" + readHeader, termReadAccess, verbs.StatusRemAccessErr},
		{"siw, operation error", "20070300" + readHeader, termCode{layerRDMAP, 2, 7}, verbs.StatusRemOpErr},
		{"no buffer", "1202c000 001a 4143 00000000 00000000 00000048 00000000", termNoBuffer, verbs.StatusWRFlushErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, v := connectRaw(t, defaultConfig)
			p.send(tagged(opWrite, true, 0, 0, nil)) // allows the responder to send
			read := v.post(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, SGList: sges(8)})
			p.mustNext()
			p.send(untagged(opTerminate, true, 0, qnTerminate, 1, 0, kit.Unhex(c.wire)))
			var te *verbs.TerminateError
			if err := v.cause(); !errors.As(err, &te) || te.Local || (termCode{te.Layer, te.EType, te.Code}) != c.want {
				t.Errorf("cause: got %v, want the peer's Terminate %+v", err, c.want)
			}
			if wc := <-read; wc.Status != c.status {
				t.Errorf("status of the RDMA Read: got %v, want %v", wc.Status, c.status)
			}
			if _, _, err := p.next(); err != io.EOF {
				t.Errorf("read after the sent Terminate: got %v, want io.EOF", err)
			}
			p.c.CloseWrite()
			if n := v.qp.Stats().TerminatesReceived; n != 1 {
				t.Errorf("TerminatesReceived: got %d, want 1", n)
			}
		})
	}
}

// TestInvalidReadResponseTerminates sends Read Responses that do not match the Read Request.
func TestInvalidReadResponseTerminates(t *testing.T) {
	type segment struct {
		op   uint8
		last bool
		stag uint32 // relative to the sink's STag
		to   uint64 // relative to the sink's offset
		n    int    // bytes of data
	}
	for _, c := range []struct {
		name   string
		want   termCode
		answer []segment
	}{
		{"other STag", termTaggedInvalidSTag, []segment{{opReadResp, true, 1, 0, 100}}},
		{"other offset", termTaggedBounds, []segment{{opReadResp, true, 0, 1, 100}}},
		{"too long", termTaggedBounds, []segment{{opReadResp, true, 0, 0, 101}}},
		{"too short", termUnspecified, []segment{{opReadResp, true, 0, 0, 99}}},
		{"never last", termUnspecified, []segment{{opReadResp, false, 0, 0, 100}}},
		{"too long in the second segment", termTaggedBounds,
			[]segment{{opReadResp, false, 0, 0, 50}, {opReadResp, true, 0, 50, 51}}},
		{"gap", termTaggedBounds, []segment{{opReadResp, false, 0, 0, 50}, {opReadResp, true, 0, 51, 49}}},
		{"twice", termOpcode, []segment{{opReadResp, true, 0, 0, 100}, {opReadResp, true, 0, 0, 100}}},
		{"Write to the sink", termTaggedInvalidSTag, []segment{{opWrite, true, 0, 0, 100}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, v := connectRaw(t, defaultConfig)
			p.send(tagged(opWrite, true, 0, 0, nil))
			sink := make([]byte, 200)
			read := v.post(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, SGList: []verbs.SGE{{Buf: sink[50:150]}},
				RKey: 3, RemoteAddr: 4})
			_, b := p.mustNext()
			var r readRequest
			r.parseRDMAP(b)
			if r.size != 100 || r.srcSTag != 3 || r.srcTO != 4 {
				t.Fatalf("Read Request: got %+v, want size 100, STag 3, offset 4", r)
			}
			var l [][]byte
			for _, a := range c.answer {
				l = append(l, tagged(a.op, a.last, r.sinkSTag+a.stag, r.sinkTO+a.to, filler(a.n)))
			}
			p.send(l...)
			if got, _ := p.readTerminate(); got != c.want {
				t.Errorf("Terminate: got %+v (%s), want %+v (%s)", got, got.text(), c.want, c.want.text())
			}
			want := verbs.StatusBadRespErr
			switch c.name {
			case "twice":
				want = verbs.StatusSuccess
			case "Write to the sink":
				want = verbs.StatusWRFlushErr
			}
			if wc := <-read; wc.Status != want {
				t.Errorf("status of the RDMA Read: got %v, want %v", wc.Status, want)
			}
			v.id.Close()
			if bytes.Contains(sink[:50], []byte{0xee}) || bytes.Contains(sink[150:], []byte{0xee}) {
				t.Error("memory next to the sink was written")
			}
		})
	}
}
