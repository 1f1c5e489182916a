package nfs3

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// fuzzCaller returns a fixed reply and a fixed ResultDataLen.
type fuzzCaller struct {
	result []byte
	placed int // -1: none
}

func (c *fuzzCaller) Call(_ context.Context, m *sunrpc.Message) error {
	m.Result = append(m.Result[:0], c.result...)
	m.ResultDataLen = -1
	if len(m.ResultData) > 0 {
		m.ResultDataLen = c.placed
	}
	return nil
}

// FuzzNFSReply passes any bytes as a reply to a procedure. The call must not panic, must return a
// documented error or valid results, and must allocate in proportion to the reply.
func FuzzNFSReply(f *testing.F) {
	for _, x := range exchanges {
		f.Add(uint8(x.proc), int16(-1), unhex(x.reply))
		if x.place != "" {
			f.Add(uint8(x.proc), int16(len(x.place)), unhex(x.reply))
		}
	}
	f.Fuzz(func(t *testing.T, proc uint8, placed int16, reply []byte) {
		c := NewClient(&fuzzCaller{reply, int(placed)})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := callAny(t, c, Proc(proc)%NumProcs, len(reply))
		runtime.ReadMemStats(&after)
		var nfsErr *Error
		if err != nil && !errors.As(err, &nfsErr) && !errors.Is(err, ErrMalformed) {
			t.Fatalf("got undocumented error %v", err)
		}
		if err != nil && (err.Error() == "" || Errno(err) == 0) {
			t.Fatalf("got error %q with errno %d", err, Errno(err))
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 256<<10+4*uint64(len(reply)) {
			t.Fatalf("allocated %d bytes for a reply of %d", grown, len(reply))
		}
	})
}

// callAny calls the procedure and checks that its results are in range. A failed listing must
// deliver no entry.
func callAny(t *testing.T, c *Client, p Proc, size int) error {
	delivered := 0
	x := calls{ctx: context.Background(), buf: make([]byte, 300), dirCount: 4096, maxCount: 4096}
	x.each = func(e *DirEntry) bool {
		delivered++
		if !validName(e.Name) || len(e.Name) > MaxName || e.FH.Len() > FHSize || e.HasFH && e.FH.IsZero() {
			t.Fatalf("got invalid entry %+v", e)
		}
		checkAttr(t, &e.Attr.Attr, e.Attr.Present)
		return true
	}
	err := x.call(c, p)
	if err != nil && delivered != 0 || err == nil && delivered != x.dir.Entries || delivered > size/20 {
		t.Fatalf("%v: delivered %d entries, counted %d in %d bytes, error %v", p, delivered, x.dir.Entries, size, err)
	}
	if err != nil {
		return err
	}
	checkAttr(t, &x.attr, p == ProcGetAttr)
	switch {
	case p == ProcLookup && x.look.FH.IsZero():
		t.Fatal("LOOKUP: got success without a handle")
	case x.link.N < 0 || x.link.N > len(x.buf) || x.rd.N < 0 || x.rd.N > len(x.buf):
		t.Fatalf("%v: got %d or %d bytes, buffer has %d", p, x.link.N, x.rd.N, len(x.buf))
	case p == ProcWrite && (x.wr.Count == 0 || x.wr.Count > uint32(len(x.buf)) || x.wr.Committed > FileSync):
		t.Fatalf("WRITE: got invalid result %+v", x.wr)
	}
	return nil
}

func checkAttr(t *testing.T, a *Attr, present bool) {
	if present && (a.Type < NF3REG || a.Type > NF3FIFO || a.Mode&^ModeMask != 0) {
		t.Fatalf("got invalid attributes %+v", a)
	}
}
