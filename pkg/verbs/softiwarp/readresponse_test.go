package softiwarp

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestReceivedTerminateIsReported checks both bit orders, the cause given to OnDisconnect, and the
// status of the RDMA Read that the Terminate names.
func TestReceivedTerminateIsReported(t *testing.T) {
	for _, c := range []struct {
		name, wire string
		want       termCode
		status     verbs.Status
	}{
		{"RFC order", "0102e000 002e 4141 00000000 00000001 00000001 00000000", termReadAccess,
			verbs.StatusRemAccessErr},
		{"siw order", "10020700 002e 4141 00000000 00000001 00000001 00000000", termReadAccess,
			verbs.StatusRemAccessErr},
		{"siw, operation error", "20070300 002e 4141 00000000 00000001 00000001 00000000", termCode{layerRDMAP, 2, 7},
			verbs.StatusRemOpErr},
		{"no buffer", "1202c000 001a 4143 00000000 00000000 00000048 00000000", termNoBuffer, verbs.StatusWRFlushErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, v := connectRaw(t, defaultConfig)
			p.send(tagged(opWrite, true, 0, 0, nil)) // allows the responder to send
			read := make(chan verbs.WorkCompletion, 1)
			if _, err := v.qp.PostSend(&verbs.WorkRequest{
				Opcode: verbs.OpRDMARead, Signaled: true, Done: func(
					wc *verbs.WorkCompletion) {
					read <- *wc
				}, SGList: []verbs.SGE{{Buf: make([]byte, 8)}},
			}); err != nil {
				t.Fatal(err)
			}
			p.mustNext()
			p.send(untagged(opTerminate, true, 0, qnTerminate, 1, 0, unhex(t, c.wire)))
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
	data := filler(100)
	for _, c := range []struct {
		name   string
		answer func(r readRequest) [][]byte
		want   termCode
	}{
		{"other STag", func(r readRequest) [][]byte {
			return [][]byte{tagged(opReadResp, true, r.sinkSTag+1, r.sinkTO, data)}
		}, termTaggedInvalidSTag},
		{"other offset", func(r readRequest) [][]byte {
			return [][]byte{tagged(opReadResp, true, r.sinkSTag, r.sinkTO+1, data)}
		}, termTaggedBounds},
		{"too long", func(r readRequest) [][]byte {
			return [][]byte{tagged(opReadResp, true, r.sinkSTag, r.sinkTO, filler(101))}
		}, termTaggedBounds},
		{"too short", func(r readRequest) [][]byte {
			return [][]byte{tagged(opReadResp, true, r.sinkSTag, r.sinkTO, data[:99])}
		}, termUnspecified},
		{"never last", func(r readRequest) [][]byte {
			return [][]byte{tagged(opReadResp, false, r.sinkSTag, r.sinkTO, data)}
		}, termUnspecified},
		{"gap", func(r readRequest) [][]byte {
			return [][]byte{tagged(opReadResp, false, r.sinkSTag, r.sinkTO, data[:50]),
				tagged(opReadResp, true, r.sinkSTag, r.sinkTO+51, data[51:])}
		}, termTaggedBounds},
		{"twice", func(r readRequest) [][]byte {
			u := tagged(opReadResp, true, r.sinkSTag, r.sinkTO, data)
			return [][]byte{u, u}
		}, termOpcode},
		{"Write to the sink", func(r readRequest) [][]byte {
			return [][]byte{tagged(opWrite, true, r.sinkSTag, r.sinkTO, data)}
		}, termTaggedInvalidSTag},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, v := connectRaw(t, defaultConfig)
			p.send(tagged(opWrite, true, 0, 0, nil))
			read := make(chan verbs.WorkCompletion, 1)
			sink := make([]byte, 200)
			if _, err := v.qp.PostSend(&verbs.WorkRequest{
				Opcode: verbs.OpRDMARead, Signaled: true, Done: func(wc *verbs.WorkCompletion) { read <- *wc },
				SGList: []verbs.SGE{{Buf: sink[50:150]}}, RKey: 3, RemoteAddr: 4,
			}); err != nil {
				t.Fatal(err)
			}
			h, b := p.mustNext()
			if h.op != opReadRequest || h.qn != qnReadReq || h.msn != 1 || h.mo != 0 || !h.last {
				t.Fatalf("Read Request: got header %+v", h)
			}
			var r readRequest
			r.parseRDMAP(b)
			if r.size != 100 || r.srcSTag != 3 || r.srcTO != 4 {
				t.Fatalf("Read Request: got %+v, want size 100, STag 3, offset 4", r)
			}
			p.send(c.answer(r)...)
			if got, _ := p.readTerminate(); got != c.want {
				t.Errorf("Terminate: got %+v (%s), want %+v (%s)", got, got.text(), c.want, c.want.text())
			}
			wc := <-read
			if ok := wc.Status == verbs.StatusSuccess; ok != (c.name == "twice") {
				t.Errorf("status of the RDMA Read: got %v, want success %v", wc.Status, c.name == "twice")
			}
			v.id.Close()
			if bytes.Contains(sink[:50], []byte{0xee}) || bytes.Contains(sink[150:], []byte{0xee}) {
				t.Error("memory next to the sink was written")
			}
		})
	}
}
