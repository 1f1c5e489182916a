package control

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

func (r *TraceRequest) query() string {
	return url.Values{"dir": {r.Dir}, "json": {strconv.FormatBool(r.JSON)}, "follow": {strconv.FormatBool(r.Follow)},
		"last": {strconv.Itoa(r.Last)}}.Encode()
}

func parseTraceRequest(q url.Values) (r TraceRequest, err error) {
	bad := func(name string) (TraceRequest, error) {
		return r, Errorf(CodeUsage, "control API: %s = %q of a trace is not understood; the daemon and its client may be of different versions", name, q.Get(name))
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

func (r *TraceRequest) contentType() string {
	if r.JSON {
		return "application/x-ndjson"
	}
	return "text/plain; charset=utf-8"
}

// traceHandler streams trace events. A slow reader loses events; it never delays the mount.
func traceHandler(m Mounts) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := parseTraceRequest(r.URL.Query())
		if err != nil {
			writeError(w, err)
			return
		}
		found, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		s, err := m.Trace(found, req)
		if err != nil {
			writeError(w, err)
			return
		}
		ctl := http.NewResponseController(w)
		_ = ctl.SetReadDeadline(time.Time{}) // the server's own would take its end for the reader's
		w.Header().Set("Content-Type", req.contentType())
		_ = ctl.Flush() // so that the reader knows that it is heard
		ended := make(chan struct{})
		defer close(ended)
		go func() { // a reader that takes nothing must not hold what is left of the mount
			select {
			case <-s.Gone():
				_ = ctl.SetWriteDeadline(time.Now().Add(traceGrace))
			case <-ended:
			}
		}()
		s.Run(r.Context(), func(b []byte) error {
			if _, err := w.Write(b); err != nil {
				return err
			}
			return ctl.Flush()
		})
	})
}
