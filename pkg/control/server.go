package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxRequestBytes = 64 << 10
	// serverUmountTimeout bounds a normal unmount, which may wait until dirty data is written.
	serverUmountTimeout = 30 * time.Second
	headerTimeout       = 5 * time.Second
	// traceGrace bounds the last writes of a trace after its mount has ended.
	traceGrace = time.Second
)

// peerKey is the context key of the credentials of the peer of a connection.
type peerKey struct{}

// Mounts are the mounts that a server of the control API serves. All methods may be called
// concurrently.
type Mounts interface {
	Mount(context.Context, MountRequest) (MountInfo, error)
	Umount(context.Context, UmountRequest) error
	List() []MountInfo
	// Status returns the status of the mount at dir, or of all mounts if dir is empty.
	Status(ctx context.Context, dir string) ([]MountStatus, error)
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
// of the daemon and does not wait for it; without stop the server refuses the request. The server
// serves only connections of root and of the user of this process (SO_PEERCRED, unix(7)); so the
// caller must serve on a [Listener].
func NewServer(m Mounts, version func() VersionInfo, stop func(StopRequest) (StopInfo, error)) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("POST "+pathMount, handle(func(r *http.Request) (any, error) {
		req, err := decode[MountRequest](r)
		if err != nil {
			return nil, err
		}
		return m.Mount(r.Context(), req)
	}))
	mux.Handle("POST "+pathUmount, handle(func(r *http.Request) (any, error) {
		req, err := decode[UmountRequest](r)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(r.Context(), serverUmountTimeout)
		defer cancel()
		return struct{}{}, m.Umount(ctx, req)
	}))
	if stop != nil {
		mux.Handle("POST "+pathStop, handle(func(r *http.Request) (any, error) {
			req, err := decode[StopRequest](r)
			if err != nil {
				return nil, err
			}
			return stop(req)
		}))
	}
	mux.Handle("GET "+pathMounts, handle(func(*http.Request) (any, error) { return m.List(), nil }))
	mux.Handle("GET "+pathStatus, handle(func(r *http.Request) (any, error) {
		ctx, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		return m.Status(ctx, r.URL.Query().Get("dir"))
	}))
	mux.Handle("GET "+pathTrace, traceHandler(m))
	mux.Handle("GET "+pathVersion, handle(func(*http.Request) (any, error) { return version(), nil }))
	mux.Handle("/", handle(func(r *http.Request) (any, error) {
		return nil, Errorf(CodeUsage, "control API: %s %s: unknown request; use a client and a daemon of one version",
			r.Method, r.URL.Path)
	}))
	return &http.Server{
		Handler:           onlyOwner(mux),
		ConnContext:       withPeer,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
	}
}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	cred, err := peerCred(c)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, cred)
}

// peerCred returns the credentials of the process that connected.
func peerCred(c net.Conn) (*unix.Ucred, error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.New("not a unix socket")
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return cred, errors.Join(ctlErr, err)
}

func onlyOwner(next http.Handler) http.Handler {
	own := uint32(os.Geteuid())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		uid := uint32(math.MaxUint32) // of a peer whose credentials are unknown
		if cred, ok := r.Context().Value(peerKey{}).(*unix.Ucred); ok {
			uid = cred.Uid
		}
		if uid != 0 && uid != own {
			writeError(w, Errorf(CodePermission,
				"control API: permission denied to uid %d; run as root or as the user of the daemon", uid))
			return
		}
		next.ServeHTTP(w, r)
	})
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
		_ = json.NewEncoder(w).Encode(v) // the client may have left
	})
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
	w.WriteHeader(statusByCode[code])
	_ = json.NewEncoder(w).Encode(errorReply{Code: code, Error: OneLine(err.Error())})
}
