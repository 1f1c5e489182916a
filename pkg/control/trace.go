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
	invalid := func(name string) (TraceRequest, error) {
		return r, Errorf(CodeUsage, "control API: trace: invalid %s = %q; use a client and a daemon of one version",
			name,
			q.Get(name))
	}
	r.Dir = q.Get("dir")
	if r.JSON, err = strconv.ParseBool(q.Get("json")); err != nil {
		return invalid("json")
	}
	if r.Follow, err = strconv.ParseBool(q.Get("follow")); err != nil {
		return invalid("follow")
	}
	if r.Last, err = strconv.Atoi(q.Get("last")); err != nil || r.Last < -1 {
		return invalid("last")
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
		limited, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		s, err := m.Trace(limited, req)
		if err != nil {
			writeError(w, err)
			return
		}
		ctl := http.NewResponseController(w)
		_ = ctl.SetReadDeadline(time.Time{}) // ReadTimeout would end the trace
		w.Header().Set("Content-Type", req.contentType())
		_ = ctl.Flush() // the reader gets its status at once
		ended := make(chan struct{})
		defer close(ended)
		go func() { // a blocked reader must not delay the end of the mount
			select {
			case <-s.Ended():
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
