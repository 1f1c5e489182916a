// Package trace records the events of a transport in a ring. The events have the names of the
// kernel client's trace points (docs/features.md S24). `nfsrdmad trace` shows the ring, and the
// transport logs its last events when a connection fails.
//
// Add takes no lock and allocates nothing. A nil *Ring records nothing and costs one comparison.
// Writers never wait. A new event is dropped and counted if the writer of the event one whole ring
// earlier still uses its cell.
package trace

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
)

// A Kind is the kind of an event.
type Kind uint8

// The kinds of events. The comments name the fields N, A and B that a kind uses. Status is the
// status of a work completion.
const (
	None           Kind = iota
	Map                 // MR mapped N segments of A bytes at address B
	Unmap               // MR is released or destroyed; once for each Map
	FastReg             // FastReg of the MR added to a chain
	LocalInv            // LOCAL_INV of the MR added to a chain
	RemInv              // the server invalidated the MR
	Recycle             // MR is destroyed; another is allocated on demand
	Recover             // MR destroyed, another allocated in its place
	Orphan              // MR could not be destroyed or replaced
	Dereg               // MR destroyed
	Alloc               // MR allocated
	SGErr               // N segments need more MRs than one chunk may have
	MapErr              // N segments could not be mapped
	PostSend            // RPC posted as one chain of N requests, A bytes inline
	PostSendErr         // post of an RPC failed after N requests
	PostLinv            // chain of N LOCAL_INVs posted
	PostLinvErr         // post of LOCAL_INVs failed after N requests
	WCFastReg           // FastReg failed or was flushed
	WCLocalInv          // LOCAL_INV failed or was flushed
	WCLocalInvWake      // last LOCAL_INV of an interrupted RPC completed: its caller may return
	WCLocalInvDone      // last LOCAL_INV of an answered RPC completed
	WCSend              // Send completed
	Reply               // reply of A bytes received, N credits granted
	BadReply            // invalid message from the server discarded
	Done                // RPC ended A nanoseconds after its start
	Resend              // RPC posted again with the same XID on another connection
	Interrupt           // caller gave up the RPC
	Timeout             // RPC exceeded its timeout
	Connect             // connection made
	Disconnect          // connection ended
	Nudge               // empty RDMA Write sent because the first reply is late
	Ping                // keepalive NULL call started
	NoSendCtx           // send queue has no room for the RPC
	kinds
)

var names = [kinds]string{
	"none",
	"map", "unmap", "fastreg", "localinv", "reminv", "recycle", "recover", "orphan", "dereg", "alloc",
	"sgerr", "maperr",
	"post_send", "post_send_err", "post_linv", "post_linv_err",
	"wc_fastreg", "wc_li", "wc_li_wake", "wc_li_done", "wc_send",
	"reply", "bad_reply", "done", "resend", "interrupt", "timeout",
	"connect", "disconnect", "nudge", "ping", "empty_sendctx",
}

func (k Kind) String() string {
	if k < kinds {
		return names[k]
	}
	return "?"
}

// An Event is one event of a ring. Fields that its kind does not use are zero.
type Event struct {
	Seq    uint64    // sequence number in the ring, from 0
	Time   time.Time // wall clock
	Kind   Kind
	Status uint8 // verbs.Status
	N      uint16
	XID    uint32
	MR     uint32 // number of the MR in the mount, from 1
	Handle uint32 // STag of the MR
	A, B   uint64
}

// words is the number of 64-bit words of an event in the ring.
const words = 5

// A cell holds one event.
type cell struct {
	// lap is 0 for an empty cell, 2·seq+1 while event seq is being written, and 2·seq+2 after.
	lap  atomic.Uint64
	word [words]atomic.Uint64
	// skip is 2·seq+2 for the newest dropped event of this cell, 0 for none. A reader does not wait
	// for a dropped event.
	skip atomic.Uint64
}

// A Ring holds the most recent events. Safe for concurrent use. A nil Ring records nothing.
type Ring struct {
	start   time.Time
	next    atomic.Uint64
	dropped atomic.Uint64
	cells   []cell
	mask    uint64
	status  func(uint8) string
}

// NewRing returns a ring of at least size events. It returns nil if size is not positive. The
// function status returns the name of a work completion status.
func NewRing(size int, status func(uint8) string) *Ring {
	if size <= 0 {
		return nil
	}
	n := 1
	for n < size {
		n *= 2
	}
	return &Ring{start: time.Now(), cells: make([]cell, n), mask: uint64(n - 1), status: status}
}

// Add records an event and sets its Seq and Time.
func (r *Ring) Add(e Event) {
	if r == nil {
		return
	}
	r.add(&e)
}

func (r *Ring) add(e *Event) {
	seq := r.next.Add(1) - 1
	c := &r.cells[seq&r.mask]
	lap := c.lap.Load()
	if lap&1 != 0 || lap > 2*seq || !c.lap.CompareAndSwap(lap, 2*seq+1) {
		c.drop(seq)
		r.dropped.Add(1)
		return
	}
	c.word[0].Store(uint64(time.Since(r.start)))
	c.word[1].Store(uint64(e.Kind)<<56 | uint64(e.Status)<<48 | uint64(e.N)<<32 | uint64(e.XID))
	c.word[2].Store(uint64(e.MR)<<32 | uint64(e.Handle))
	c.word[3].Store(e.A)
	c.word[4].Store(e.B)
	c.lap.Store(2*seq + 2)
}

// drop records for readers that event seq was dropped.
func (c *cell) drop(seq uint64) {
	for {
		newest := c.skip.Load()
		if newest >= 2*seq+2 || c.skip.CompareAndSwap(newest, 2*seq+2) {
			return
		}
	}
}

// Next returns the sequence number of the next event. A reader that wants only new events starts
// there.
func (r *Ring) Next() uint64 {
	if r == nil {
		return 0
	}
	return r.next.Load()
}

// Read appends the events from sequence number from on to buf, oldest first. The next Read
// continues at next. The result lost counts the overwritten or dropped events in between. Read
// stops before an event that is still being written.
func (r *Ring) Read(from uint64, buf []Event) (events []Event, next, lost uint64) {
	if r == nil {
		return buf, from, 0
	}
	end := r.next.Load()
	if size := uint64(len(r.cells)); end > size && from < end-size {
		lost, from = end-size-from, end-size
	}
	for ; from < end; from++ {
		c := &r.cells[from&r.mask]
		lap := c.lap.Load()
		if lap < 2*from+2 && c.skip.Load() < 2*from+2 && from+uint64(len(r.cells))/2 > end {
			break // still being written
		}
		e := Event{Seq: from, Time: r.start.Add(time.Duration(c.word[0].Load()))}
		w1, w2 := c.word[1].Load(), c.word[2].Load()
		e.Kind, e.Status, e.N, e.XID = Kind(w1>>56), uint8(w1>>48), uint16(w1>>32), uint32(w1)
		e.MR, e.Handle, e.A, e.B = uint32(w2>>32), uint32(w2), c.word[3].Load(), c.word[4].Load()
		if lap != 2*from+2 || c.lap.Load() != lap {
			lost++ // overwritten or dropped
			continue
		}
		buf = append(buf, e)
	}
	return buf, from, lost
}

// Dropped returns the number of events that were not recorded because their cell was in use.
func (r *Ring) Dropped() uint64 {
	if r == nil {
		return 0
	}
	return r.dropped.Load()
}

// Last returns the n newest events or fewer, oldest first.
func (r *Ring) Last(n int) []Event {
	if r == nil {
		return nil
	}
	from := uint64(0)
	if next := r.Next(); next > uint64(n) {
		from = next - uint64(n)
	}
	events, _, _ := r.Read(from, nil)
	return events
}

// Text formats e as one line of text.
func (r *Ring) Text(e *Event) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %-13s", e.Time.Format("15:04:05.000000"), e.Kind)
	for _, f := range r.fields(e) {
		fmt.Fprintf(&b, " %s=%v", f.name, f.value)
	}
	return b.String()
}

// JSON formats e as one JSON object.
func (r *Ring) JSON(e *Event) []byte {
	m := map[string]any{"seq": e.Seq, "time": e.Time.UTC().Format(time.RFC3339Nano), "event": e.Kind.String()}
	for _, f := range r.fields(e) {
		m[f.name] = f.value
	}
	b, err := json.Marshal(m)
	if err != nil {
		return []byte("{}") // cannot happen: numbers and strings always have a JSON form
	}
	return b
}

type field struct {
	name  string
	value any
}

// A hex is a number that text and JSON show in hexadecimal.
type hex uint64

func (h hex) String() string               { return fmt.Sprintf("%#x", uint64(h)) }
func (h hex) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

func (r *Ring) fields(e *Event) []field {
	var f []field
	if e.XID != 0 {
		f = append(f, field{"xid", hex(e.XID)})
	}
	if e.MR != 0 {
		f = append(f, field{"mr", e.MR}, field{"handle", hex(e.Handle)})
	}
	switch e.Kind {
	case Map:
		f = append(f, field{"segs", e.N}, field{"length", e.A}, field{"offset", hex(e.B)})
	case SGErr, MapErr:
		f = append(f, field{"segs", e.N})
	case PostSend:
		f = append(f, field{"requests", e.N}, field{"inline", e.A})
	case PostSendErr, PostLinv, PostLinvErr:
		f = append(f, field{"requests", e.N})
	case Reply:
		f = append(f, field{"credits", e.N}, field{"length", e.A})
	case Done:
		f = append(f, field{"microseconds", e.A / 1000})
	}
	switch e.Kind {
	case WCFastReg, WCLocalInv, WCLocalInvWake, WCLocalInvDone, WCSend:
		f = append(f, field{"status", r.status(e.Status)})
	}
	return f
}
