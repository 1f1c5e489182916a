package mount

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
)

// tracePoll is the interval at which a stream polls the rings. Writers of events do not notify
// readers, because that would slow the data path.
const tracePoll = 50 * time.Millisecond

// findRings returns the rings of the mount at dir, and a channel that is closed when the mount has
// ended.
func (t *Table) findRings(ctx context.Context, dir string) (rings []*trace.Ring, ended <-chan struct{}, err error) {
	dir, err = t.resolve(ctx, dir)
	if err != nil {
		return nil, nil, err
	}
	e := t.find(dir, control.UmountForce)
	if e == nil {
		return nil, nil, notMounted("trace", dir)
	}
	t.mu.Lock()
	instance := e.instance
	t.mu.Unlock()
	if instance == nil {
		return nil, nil, control.Errorf(control.CodeNotMounted, "trace %s: mount not complete; try again later", dir)
	}
	for _, r := range instance.Rings() {
		if r != nil {
			rings = append(rings, r)
		}
	}
	if len(rings) == 0 {
		return nil, nil, control.Errorf(control.CodeUsage,
			"trace %s: this mount keeps no events; mount it with -o trace=%d", dir, DefaultOptions().TraceEvents)
	}
	return rings, e.removed, nil
}

// Trace returns a stream of the trace events of the mount at r.Dir.
func (t *Table) Trace(ctx context.Context, r control.TraceRequest) (control.TraceStream, error) {
	rings, ended, err := t.findRings(ctx, r.Dir)
	if err != nil {
		return nil, err
	}
	return newTraceStream(rings, ended, &r), nil
}

// A traceStream reads the rings of one mount and formats their events, merged by time.
type traceStream struct {
	ended   <-chan struct{} // closed when the mount has ended
	req     *control.TraceRequest
	sources []traceSource
	merged  []tracedEvent
	out     bytes.Buffer
}

type traceSource struct {
	ring *trace.Ring
	next uint64
	name string // number of the connection; "" if the mount has only one
	buf  []trace.Event
}

type tracedEvent struct {
	source *traceSource
	event  *trace.Event
}

func newTraceStream(rings []*trace.Ring, ended <-chan struct{}, req *control.TraceRequest) *traceStream {
	s := &traceStream{req: req, ended: ended}
	for i, r := range rings {
		src := traceSource{ring: r, next: r.Next()}
		if len(rings) > 1 {
			src.name = strconv.Itoa(i)
		}
		if req.Last != 0 {
			n := req.Last
			if n < 0 {
				n = maxTraceEvents
			}
			if kept := r.Last(n); len(kept) > 0 {
				src.next = kept[0].Seq
			}
		}
		s.sources = append(s.sources, src)
	}
	return s
}

// Ended implements control.TraceStream.
func (s *traceStream) Ended() <-chan struct{} { return s.ended }

// Run implements control.TraceStream.
func (s *traceStream) Run(ctx context.Context, write func([]byte) error) {
	tick := time.NewTicker(tracePoll)
	defer tick.Stop()
	trim := s.req.Last > 0 // Last is the sum over the connections
	for last := !s.req.Follow; ; {
		s.round(trim)
		trim = false
		if s.out.Len() > 0 && write(s.out.Bytes()) != nil || last {
			return
		}
		select {
		case <-tick.C:
		case <-s.ended:
			last = true // read the last events
		case <-ctx.Done():
			return
		}
	}
}

// round formats the new events. With trim it keeps only the newest of the first round.
func (s *traceStream) round(trim bool) {
	s.out.Reset()
	s.merged = s.merged[:0]
	for i := range s.sources {
		src := &s.sources[i]
		var lost uint64
		src.buf, src.next, lost = src.ring.Read(src.next, src.buf[:0])
		if lost > 0 {
			s.lost(src, lost)
		}
		for j := range src.buf {
			s.merged = append(s.merged, tracedEvent{src, &src.buf[j]})
		}
	}
	slices.SortStableFunc(s.merged, func(a, b tracedEvent) int {
		return cmp.Or(a.event.Time.Compare(b.event.Time), cmp.Compare(a.event.Seq, b.event.Seq))
	})
	if trim && len(s.merged) > s.req.Last {
		s.merged = s.merged[len(s.merged)-s.req.Last:]
	}
	for _, m := range s.merged {
		s.line(m.source, m.event)
	}
}

// lost writes the number of events that a slow reader has missed.
func (s *traceStream) lost(src *traceSource, n uint64) {
	switch {
	case !s.req.JSON && src.name != "":
		fmt.Fprintf(&s.out, "… #%s %d events lost\n", src.name, n)
	case !s.req.JSON:
		fmt.Fprintf(&s.out, "… %d events lost\n", n)
	case src.name != "":
		fmt.Fprintf(&s.out, "{\"connection\":%s,\"lost\":%d}\n", src.name, n)
	default:
		fmt.Fprintf(&s.out, "{\"lost\":%d}\n", n)
	}
}

func (s *traceStream) line(src *traceSource, e *trace.Event) {
	if !s.req.JSON {
		if src.name != "" {
			s.out.WriteString("#" + src.name + " ")
		}
		s.out.WriteString(src.ring.Text(e))
		s.out.WriteByte('\n')
		return
	}
	object := src.ring.JSON(e)
	if src.name != "" {
		s.out.WriteString("{\"connection\":" + src.name + ",")
		object = object[1:]
	}
	s.out.Write(object)
	s.out.WriteByte('\n')
}
