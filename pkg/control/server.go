package control

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"time"
)

const (
	maxRequestBytes = 64 << 10
	// serverUmountTimeout bounds a normal unmount, which may wait until dirty data is written.
	serverUmountTimeout = 30 * time.Second
	headerTimeout       = 5 * time.Second
	// traceGrace bounds the last writes of a trace after its mount has ended.
	traceGrace = time.Second
)

// Mounts are the mounts that a server of the control API serves. All methods may be called
// concurrently.
type Mounts interface {
	Mount(context.Context, MountRequest) (MountInfo, error)
	Umount(context.Context, UmountRequest) error
	List() []MountInfo
	// Status returns the status of the mount at dir, or of all mounts if dir is empty.
	Status(ctx context.Context, dir string) ([]MountStatus, error)
	// Stats returns the counters of the mount at dir, or of all mounts if dir is empty.
	Stats(ctx context.Context, dir string) ([]MountStats, error)
	// Slow returns the slowest calls of the mount at dir, or of all mounts if dir is empty.
	Slow(ctx context.Context, dir string) ([]SlowCalls, error)
	Trace(context.Context, TraceRequest) (TraceStream, error)
}

// A TraceStream writes the trace events of one mount.
type TraceStream interface {
	// Ended returns a channel that is closed when the mount has ended.
	Ended() <-chan struct{}
	// Run calls write with one or more whole lines at a time. It returns when ctx ends, when write
	// fails, and when the mount has ended. Without TraceRequest.Follow it returns after the events
	// that are kept.
	Run(ctx context.Context, write func([]byte) error)
}

// NewServer returns a server of the control API for m. version returns the reply to GET
// /v1/version, and stop that to POST /v1/stop; both may be called concurrently. stop starts the end
// of the daemon and does not wait for it; without stop the server refuses the request.
//
// The server decides for each request by the credentials of the peer (SO_PEERCRED and
// SO_PEERGROUPS, unix(7)); so the caller must serve on a [Listener]. Root and the user of this
// process may use every verb. Members of readers may only list mounts and show status and version.
// A trace has file handles, with which its reader could access files, so it is not for readers.
func NewServer(m Mounts, version func() VersionInfo, stop func(StopRequest) (StopInfo, error),
	readers Group) *http.Server {
	mux, may := http.NewServeMux(), newAccess(readers)
	mux.Handle("POST "+pathMount, may.forOwner("mount", handle(func(r *http.Request) (any, error) {
		req, err := decode[MountRequest](r)
		if err != nil {
			return nil, err
		}
		if c, ok := connOf(r); ok {
			req.Process = c.peer.pid
		}
		return m.Mount(r.Context(), req)
	})))
	mux.Handle("POST "+pathUmount, may.forOwner("umount", handle(func(r *http.Request) (any, error) {
		req, err := decode[UmountRequest](r)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(r.Context(), serverUmountTimeout)
		defer cancel()
		return struct{}{}, m.Umount(ctx, req)
	})))
	if stop != nil {
		mux.Handle("POST "+pathStop, may.forOwner("stop", handle(func(r *http.Request) (any, error) {
			req, err := decode[StopRequest](r)
			if err != nil {
				return nil, err
			}
			return stop(req)
		})))
	}
	mux.Handle("GET "+pathMounts, may.forGroup("list", handle(func(*http.Request) (any, error) {
		return m.List(), nil
	})))
	mux.Handle("GET "+pathStatus, may.forGroup("status", handle(func(r *http.Request) (any, error) {
		ctx, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		return m.Status(ctx, r.URL.Query().Get("dir"))
	})))
	mux.Handle("GET "+pathStats, may.forGroup("stats", handle(func(r *http.Request) (any, error) {
		ctx, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		return m.Stats(ctx, r.URL.Query().Get("dir"))
	})))
	mux.Handle("GET "+pathSlow, may.forGroup("status", handle(func(r *http.Request) (any, error) {
		ctx, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		return m.Slow(ctx, r.URL.Query().Get("dir"))
	})))
	mux.Handle("GET "+pathTrace, may.forOwner("trace", traceHandler(m)))
	mux.Handle("GET "+pathVersion, may.forGroup("version", handle(func(*http.Request) (any, error) {
		return version(), nil
	})))
	mux.Handle("/", may.forOwner("unknown request", handle(func(r *http.Request) (any, error) {
		return nil, Errorf(CodeUsage, "control API: %s %s: unknown request; use a client and a daemon of one version",
			r.Method, r.URL.Path)
	})))
	return &http.Server{
		Handler:           mux,
		ConnContext:       withConn,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
	}
}

// decode decodes a JSON body and refuses unknown fields.
func decode[T any](r *http.Request) (T, error) {
	var v T
	dec := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxRequestBytes))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		return v, Errorf(CodeUsage, "control API: decode body of %s: %w", r.URL.Path, err)
	}
	return v, nil
}

func handle(f func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, err := f(r)
		if err != nil {
			writeError(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		limitWrite(w)
		_ = json.NewEncoder(w).Encode(v) // the client may have left
	})
}

// limitWrite bounds the time to write a reply to a client that does not read it.
func limitWrite(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(StatusTimeout)) // not supported in tests
}

var statusByCode = map[Code]int{
	CodeUsage:      http.StatusBadRequest,
	CodePermission: http.StatusForbidden,
	CodeNotMounted: http.StatusNotFound,
	CodeMount:      http.StatusConflict,
	CodeSystem:     http.StatusServiceUnavailable,
	CodeCanceled:   http.StatusRequestTimeout,
	CodeInternal:   http.StatusInternalServerError,
}

func writeError(w http.ResponseWriter, err error) {
	code := cmp.Or(CodeOf(err), CodeInternal)
	w.Header().Set("Content-Type", "application/json")
	limitWrite(w)
	w.WriteHeader(statusByCode[code])
	_ = json.NewEncoder(w).Encode(errorReply{Code: code, Error: OneLine(err.Error())})
}
