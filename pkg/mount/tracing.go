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
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
)

const (
	// tracePoll is how often the rings are looked at: writers of events tell nobody, as that would
	// cost them.
	tracePoll = 50 * time.Millisecond
)

// traced finds the mount whose trace is asked for: its rings, and when it is gone.
func (t *Table) traced(ctx context.Context, dir string) (rings []*trace.Ring, gone <-chan struct{}, err error) {
	dir, err = t.resolve(ctx, dir)
	if err != nil {
		return nil, nil, err
	}
	e := t.find(dir, control.UmountForce)
	if e == nil {
		return nil, nil, control.Errorf(control.CodeNotMounted, "trace of %s: no mount of this daemon is there; see nfsrdmad list", dir)
	}
	t.mu.Lock()
	l := e.instance
	t.mu.Unlock()
	if l == nil {
		return nil, nil, control.Errorf(control.CodeNotMounted, "trace of %s: it is still being mounted; try again when it is", dir)
	}
	for _, r := range l.Rings() {
		if r != nil {
			rings = append(rings, r)
		}
	}
	if len(rings) == 0 {
		return nil, nil, control.Errorf(control.CodeUsage,
			"trace of %s: it is off for this mount; mount it again with -o trace=%d (events to keep)", dir, DefaultOptions().TraceEvents)
	}
	return rings, e.gone, nil
}

// Trace returns a stream of the trace events of the mount at r.Dir.
func (t *Table) Trace(ctx context.Context, r control.TraceRequest) (control.TraceStream, error) {
	rings, gone, err := t.traced(ctx, r.Dir)
	if err != nil {
		return nil, err
	}
	return newTraceStream(rings, gone, &r), nil
}

// A traceStream reads the rings of one mount and formats their events, merged by time.
type traceStream struct {
	gone    <-chan struct{} // closed when the mount has ended
	req     *control.TraceRequest
	sources []traceSource
	merged  []tracedEvent
	out     bytes.Buffer
}

type traceSource struct {
	ring *trace.Ring
	next uint64
	name string // "" when there is only one
	buf  []trace.Event
}

type tracedEvent struct {
	source *traceSource
	event  *trace.Event
}

func newTraceStream(rings []*trace.Ring, gone <-chan struct{}, req *control.TraceRequest) *traceStream {
	s := &traceStream{req: req, gone: gone}
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
			if held := r.Last(n); len(held) > 0 {
				src.next = held[0].Seq
			}
		}
		s.sources = append(s.sources, src)
	}
	return s
}

// Gone implements control.TraceStream.
func (s *traceStream) Gone() <-chan struct{} { return s.gone }

// Run implements control.TraceStream.
func (s *traceStream) Run(ctx context.Context, write func([]byte) error) {
	tick := time.NewTicker(tracePoll)
	defer tick.Stop()
	trim := s.req.Last > 0 // of several connections the newest together
	for over := !s.req.Follow; ; {
		s.round(trim)
		trim = false
		if s.out.Len() > 0 && write(s.out.Bytes()) != nil || over {
			return
		}
		select {
		case <-tick.C:
		case <-s.gone:
			over = true // one more round for its last events
		case <-ctx.Done():
			return
		}
	}
}

// round formats what is new.
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

// lost tells a reader that was too slow how many events it missed.
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
