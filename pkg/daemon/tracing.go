package daemon

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
)

const (
	// tracePoll is how often the rings are looked at: writers of events tell nobody, as that would
	// cost them.
	tracePoll = 50 * time.Millisecond
	// traceGrace is what a reader gets to take what is left when the mount has ended.
	traceGrace = time.Second
)

func (r *TraceRequest) query() string {
	return url.Values{"dir": {r.Dir}, "json": {strconv.FormatBool(r.JSON)}, "follow": {strconv.FormatBool(r.Follow)},
		"last": {strconv.Itoa(r.Last)}}.Encode()
}

func parseTraceRequest(q url.Values) (r TraceRequest, err error) {
	bad := func(name string) (TraceRequest, error) {
		return r, errorf(CodeUsage, "control API: %s = %q of a trace is not understood; the daemon and its client may be of different versions", name, q.Get(name))
	}
	r.Dir = q.Get("dir")
	if r.JSON, err = strconv.ParseBool(q.Get("json")); err != nil {
		return bad("json")
	}
	if r.Follow, err = strconv.ParseBool(q.Get("follow")); err != nil {
		return bad("follow")
	}
	if r.Last, err = strconv.Atoi(q.Get("last")); err != nil || r.Last < -1 {
		return bad("last")
	}
	return r, nil
}

// traced finds the mount whose trace is asked for: its rings, and when it is gone.
func (t *Table) traced(ctx context.Context, dir string) (rings []*trace.Ring, gone <-chan struct{}, err error) {
	dir, err = t.resolve(ctx, dir)
	if err != nil {
		return nil, nil, err
	}
	e := t.find(dir, UmountForce)
	if e == nil {
		return nil, nil, errorf(CodeNotMounted, "trace of %s: no mount of this daemon is there; see nfsrdmad list", dir)
	}
	t.mu.Lock()
	l := e.live
	t.mu.Unlock()
	if l == nil {
		return nil, nil, errorf(CodeNotMounted, "trace of %s: it is still being mounted; try again when it is", dir)
	}
	for _, r := range l.Rings() {
		if r != nil {
			rings = append(rings, r)
		}
	}
	if len(rings) == 0 {
		return nil, nil, errorf(CodeUsage,
			"trace of %s: it is off for this mount; mount it again with -o trace=%d (events to keep)", dir, DefaultOptions().TraceEvents)
	}
	return rings, e.gone, nil
}

// traceHandler streams trace events. Whatever the reader does, the mount only writes into its
// rings: a slow reader loses events.
func traceHandler(t *Table) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := parseTraceRequest(r.URL.Query())
		if err != nil {
			writeError(w, err)
			return
		}
		found, cancel := context.WithTimeout(r.Context(), statusTimeout)
		defer cancel()
		rings, gone, err := t.traced(found, req.Dir)
		if err != nil {
			writeError(w, err)
			return
		}
		ctl := http.NewResponseController(w)
		_ = ctl.SetReadDeadline(time.Time{}) // the server's own would take its end for the reader's
		s := newTraceStream(rings, &req)
		w.Header().Set("Content-Type", s.contentType())
		_ = ctl.Flush() // so that the reader knows that it is heard
		ended := make(chan struct{})
		defer close(ended)
		go func() { // a reader that takes nothing must not hold what is left of the mount
			select {
			case <-gone:
				_ = ctl.SetWriteDeadline(time.Now().Add(traceGrace))
			case <-ended:
			}
		}()
		s.run(r.Context(), gone, func(b []byte) error {
			if _, err := w.Write(b); err != nil {
				return err
			}
			return ctl.Flush()
		})
	})
}

// A traceStream reads the rings of one mount and formats their events, merged by time.
type traceStream struct {
	req     *TraceRequest
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

func newTraceStream(rings []*trace.Ring, req *TraceRequest) *traceStream {
	s := &traceStream{req: req}
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

func (s *traceStream) contentType() string {
	if s.req.JSON {
		return "application/x-ndjson"
	}
	return "text/plain; charset=utf-8"
}

// run writes until ctx ends, a write fails, or gone is closed; one round only without Follow.
func (s *traceStream) run(ctx context.Context, gone <-chan struct{}, write func([]byte) error) {
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
		case <-gone:
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
