package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxRequestBody = 64 << 10
	// how long a normal unmount waits for data on its way to the server
	umountTimeout = 30 * time.Second
	headerTimeout = 5 * time.Second
	// traceGrace is what a reader gets to take what is left when the mount has ended.
	traceGrace = time.Second
)

// peerKey is the context key of a connection's peer credentials.
type peerKey struct{}

// Mounts are what a server of the control API serves. All methods may be called concurrently.
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
	// Gone returns a channel that is closed when the mount has ended.
	Gone() <-chan struct{}
	// Run calls write with one or more whole lines at a time. It returns when ctx ends, when write
	// fails, when the mount has ended, and, without TraceRequest.Follow, after one round.
	Run(ctx context.Context, write func([]byte) error)
}

// NewServer serves the control API for m. Only root and the daemon's own user are let in
// (SO_PEERCRED, unix(7)). The caller serves it on a [Listener].
func NewServer(m Mounts, v VersionInfo) *http.Server {
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
		ctx, cancel := context.WithTimeout(r.Context(), umountTimeout)
		defer cancel()
		return struct{}{}, m.Umount(ctx, req)
	}))
	mux.Handle("GET "+pathMounts, handle(func(*http.Request) (any, error) { return m.List(), nil }))
	mux.Handle("GET "+pathStatus, handle(func(r *http.Request) (any, error) {
		ctx, cancel := context.WithTimeout(r.Context(), StatusTimeout)
		defer cancel()
		return m.Status(ctx, r.URL.Query().Get("dir"))
	}))
	mux.Handle("GET "+pathTrace, traceHandler(m))
	mux.Handle("GET "+pathVersion, handle(func(*http.Request) (any, error) { return v, nil }))
	mux.Handle("/", handle(func(r *http.Request) (any, error) {
		return nil, Errorf(CodeUsage, "control API: no %s %s; the daemon and its client may be of different versions",
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

// peerCred asks the kernel who connected.
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
		cred, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
		if !ok || (cred.Uid != 0 && cred.Uid != own) {
			writeError(w, Errorf(CodePermission,
				"control API: only root and the daemon's own user may use it; run as root"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// decode reads a JSON body strictly.
func decode[T any](r *http.Request) (T, error) {
	var v T
	dec := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxRequestBody))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		return v, Errorf(CodeUsage, "control API: the body of %s is not what is expected: %w", r.URL.Path, err)
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
		_ = json.NewEncoder(w).Encode(v) // a client that went away needs no answer
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
