// Package trace is the flight recorder of a transport: a ring of typed events with the names of the
// kernel client's trace points (docs/features.md S24), written without a lock or an allocation,
// read by whoever wants to see, and written to the log when a connection dies of an error.
//
// A nil *Ring records nothing and costs one comparison. Writers never wait: an event that meets
// another in its cell, one whole ring later, is dropped and counted.
package trace

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
)

// Kind of an event.
type Kind uint8

// The events. The comment says what N, A and B hold; Status is that of a work completion, as its
// own text.
const (
	None           Kind = iota
	Map                 // N segments given, MR registered for them, length A, address B
	Unmap               // MR given back unsent
	FastReg             // MR put on a chain
	LocalInv            // MR put on a chain of LOCAL_INVs
	RemInv              // the server invalidated the MR
	Recycle             // MR destroyed, a new one is made on demand
	Recover             // MR destroyed and made anew in its place
	Orphan              // MR could not be destroyed or made anew
	Dereg               // MR destroyed
	Alloc               // MR made
	SGErr               // memory of N segments does not fit a chunk
	MapErr              // no MR for N segments
	PostSend            // RPC posted as one chain of N requests; A octets inline
	PostSendErr         // the post failed after N requests
	PostLinv            // chain of N LOCAL_INVs posted
	PostLinvErr         // the post failed after N requests
	WCFastReg           // FastReg completed, in error
	WCLocalInv          // LOCAL_INV completed, in error
	WCLocalInvWake      // the last LOCAL_INV of an interrupted RPC completed: its caller may leave
	WCLocalInvDone      // the last LOCAL_INV of an answered RPC completed
	WCSend              // Send completed
	Reply               // reply of A octets taken: N credits granted
	BadReply            // message of the server discarded
	Done                // RPC ended, A nanoseconds after it began
	Resend              // RPC goes again, with the same XID, on another connection
	Interrupt           // the caller of the RPC gave up
	Timeout             // the RPC waited too long
	Connect             // connection made
	Disconnect          // connection ended
	Nudge               // the first reply is late: an empty RDMA Write was sent
	Ping                // liveness NULL sent
	NoSendCtx           // the send queue has no room for the RPC
	kinds
)

var names = [kinds]string{"none", "map", "unmap", "fastreg", "localinv", "reminv", "recycle", "recover", "orphan",
	"dereg", "alloc",
	"sgerr", "maperr", "post_send", "post_send_err", "post_linv", "post_linv_err", "wc_fastreg", "wc_li", "wc_li_wake", "wc_li_done",
	"wc_send", "reply", "bad_reply", "done", "resend", "interrupt", "timeout", "connect", "disconnect", "nudge", "ping", "empty_sendctx"}

func (k Kind) String() string {
	if k < kinds {
		return names[k]
	}
	return "?"
}

// An Event is one thing that happened. Fields that a kind does not name are zero.
type Event struct {
	Seq    uint64    // grows by one with each event of the ring
	Time   time.Time // wall clock
	Kind   Kind
	Status uint8 // verbs.Status
	N      uint16
	XID    uint32
	MR     uint32 // number of the MR, 1 for the first of the mount
	Handle uint32 // its STag
	A, B   uint64
}

// words is how many 64-bit words an event takes in the ring.
const words = 5

type cell struct {
	// lap is 0 for an empty cell, odd while event (lap-1)/2 is being written, and even, 2·seq+2,
	// when it stands.
	lap  atomic.Uint64
	word [words]atomic.Uint64
	// skip is 2·seq+2 for the newest event of this cell that was dropped, 0 for none: a reader
	// waits for an event on its way, and not for that.
	skip atomic.Uint64
}

// A Ring holds the last events. Safe for concurrent use; the nil Ring is off.
type Ring struct {
	start   time.Time
	next    atomic.Uint64
	dropped atomic.Uint64
	cells   []cell
	mask    uint64
	status  func(uint8) string
}

// NewRing makes a ring of at least size events; none, nil, for size 0. status names the statuses of
// work completions.
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

// Add records an event; its Seq and Time are set here.
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

// drop tells readers that event seq will not come.
func (c *cell) drop(seq uint64) {
	for {
		newest := c.skip.Load()
		if newest >= 2*seq+2 || c.skip.CompareAndSwap(newest, 2*seq+2) {
			return
		}
	}
}

// Next is the number that the next event will have: where a reader that wants new events only
// begins.
func (r *Ring) Next() uint64 {
	if r == nil {
		return 0
	}
	return r.next.Load()
}

// Read appends the events from number from on to buf, oldest first, and returns where to go on and
// how many between were lost: overwritten, or dropped. An event that is being written at the moment
// ends the reading.
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
			break // on its way
		}
		e := Event{Seq: from, Time: r.start.Add(time.Duration(c.word[0].Load()))}
		w1, w2 := c.word[1].Load(), c.word[2].Load()
		e.Kind, e.Status, e.N, e.XID = Kind(w1>>56), uint8(w1>>48), uint16(w1>>32), uint32(w1)
		e.MR, e.Handle, e.A, e.B = uint32(w2>>32), uint32(w2), c.word[3].Load(), c.word[4].Load()
		if lap != 2*from+2 || c.lap.Load() != lap {
			lost++ // overwritten, or dropped
			continue
		}
		buf = append(buf, e)
	}
	return buf, from, lost
}

// Dropped is how many events met another in their cell and were not recorded.
func (r *Ring) Dropped() uint64 {
	if r == nil {
		return 0
	}
	return r.dropped.Load()
}

// Last returns up to n of the newest events, oldest first.
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

// Text is e as one line for people.
func (r *Ring) Text(e *Event) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %-13s", e.Time.Format("15:04:05.000000"), e.Kind)
	for _, f := range r.fields(e) {
		fmt.Fprintf(&b, " %s=%v", f.name, f.value)
	}
	return b.String()
}

// JSON is e as one object for programs.
func (r *Ring) JSON(e *Event) []byte {
	m := map[string]any{"seq": e.Seq, "time": e.Time.UTC().Format(time.RFC3339Nano), "event": e.Kind.String()}
	for _, f := range r.fields(e) {
		m[f.name] = f.value
	}
	b, err := json.Marshal(m)
	if err != nil {
		return []byte("{}") // numbers and strings always have a form
	}
	return b
}

type field struct {
	name  string
	value any
}

// hex is a number that is read in hexadecimal, also by programs.
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
