package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// serve serves handler on a control socket, and returns the path of the socket.
func serve(t *testing.T, srv *http.Server) string {
	t.Helper()
	l, err := Listen(filepath.Join(t.TempDir(), "s"), Group{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-served; l.Close(); l.Release() })
	return l.path
}

func isError(t *testing.T, err error, code Code, text string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Text, text) || strings.Contains(e.Text, "\n") {
		t.Errorf("got error %q, want code %s and one line with %q", err, code, text)
	}
}

// fixedMounts is a Mounts with fixed replies.
type fixedMounts struct {
	Mounts
	err error
}

func (m fixedMounts) List() []MountInfo { return []MountInfo{{Dir: "/mnt"}} }

func (m fixedMounts) Umount(context.Context, UmountRequest) error { return m.err }

func TestClientReturnsReply(t *testing.T) {
	version := func() VersionInfo { return VersionInfo{Version: "v1"} }
	c := NewClient(serve(t, NewServer(fixedMounts{}, version, nil, Group{})))
	if l, err := c.List(t.Context()); err != nil || len(l) != 1 || l[0].Dir != "/mnt" {
		t.Errorf("list: got %+v and error %v, want /mnt", l, err)
	}
	if v, err := c.Version(t.Context()); err != nil || v.Version != "v1" {
		t.Errorf("version: got %+v and error %v, want v1", v, err)
	}
	if err := c.Umount(t.Context(), UmountRequest{}); err != nil {
		t.Errorf("umount: got error %v, want none", err)
	}
}

func TestClientReturnsErrorOfDaemon(t *testing.T) {
	busy := fixedMounts{err: Errorf(CodeMount, "unmount /mnt:\nbusy")}
	c := NewClient(serve(t, NewServer(busy, Version, nil, Group{})))
	isError(t, c.Umount(t.Context(), UmountRequest{}), CodeMount, "unmount /mnt: busy")
	c = NewClient(serve(t, NewServer(fixedMounts{err: errors.New("defect")}, Version, nil, Group{})))
	isError(t, c.Umount(t.Context(), UmountRequest{}), CodeInternal, "defect")
}

func TestClientWithoutDaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	_, err := NewClient(socket).List(t.Context())
	isError(t, err, CodeSystem, socket+": not running; start it")
	_, err = NewClient(socket).Mount(t.Context(), MountRequest{})
	isError(t, err, CodeSystem, "or mount with --foreground")
	isError(t, NewClient(socket).Umount(t.Context(), UmountRequest{}), CodeSystem, "or use umount(8)")
	_, err = NewClient("").List(t.Context())
	isError(t, err, CodeUsage, "--control-socket")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = NewClient(socket).List(ctx)
	isError(t, err, CodeCanceled, "interrupted")
}

func TestClientRejectsOtherHTTPServer(t *testing.T) {
	c := NewClient(serve(t, &http.Server{Handler: http.NotFoundHandler()}))
	_, err := c.List(t.Context())
	isError(t, err, CodeSystem, `unexpected reply "404 Not Found"`)
}

func TestTraceReportsEndOfDaemon(t *testing.T) {
	socket := serve(t, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "one line\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})})
	var out bytes.Buffer
	err := NewClient(socket).Trace(t.Context(), TraceRequest{Dir: "/x", Follow: true}, &out)
	isError(t, err, CodeSystem, "the daemon at "+socket+" ended")
	if out.String() != "one line\n" {
		t.Errorf("output: got %q, want the line before the end", out.String())
	}
}

func TestListenRefusesSecondDaemon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first, err := Listen(path, Group{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = Listen(path, Group{})
	isError(t, err, CodeSystem, fmt.Sprintf("in use by the daemon with pid %d", os.Getpid()))
	first.Close()
	first.Release()
	second, err := Listen(path, Group{})
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
	second.Release()
}

func TestListenKeepsOtherFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Listen(path, Group{})
	isError(t, err, CodeSystem, "not a socket")
	_, err = Listen("/"+strings.Repeat("x", maxSocketPath), Group{})
	isError(t, err, CodeUsage, "longer than")
}

func TestExitCode(t *testing.T) {
	for code, want := range map[Code]int{CodeUsage: 1, CodePermission: 1, CodeSystem: 2, CodeInternal: 4,
		CodeCanceled: 8, CodeMount: 32, CodeNotMounted: 32, "other": 4} {
		if got := ExitCode(fmt.Errorf("mount: %w", &Error{Code: code})); got != want {
			t.Errorf("exit code of %s: got %d, want %d", code, got, want)
		}
	}
	if got := ExitCode(errors.New("unknown flag")); got != ExitUsage {
		t.Errorf("exit code of an error without class: got %d, want %d", got, ExitUsage)
	}
	if got := ExitCode(nil); got != ExitOK {
		t.Errorf("exit code of nil: got %d, want %d", got, ExitOK)
	}
}

func TestBrief(t *testing.T) {
	if got := Brief("short"); got != "short" {
		t.Errorf("got %q, want the text itself", got)
	}
	got := Brief(strings.Repeat("ü", 200))
	if want := "... (400 bytes)"; !strings.HasSuffix(got, want) || len(got) != maxQuoted+len(want) {
		t.Errorf("got %q, want %d bytes and %q", got, maxQuoted, want)
	}
}

// TestListenRefusesDirectoriesOfOtherUsers checks directories in which another user could create
// the socket or the lock file.
func TestListenRefusesDirectoriesOfOtherUsers(t *testing.T) {
	kit.NeedsRoot(t)
	for _, tt := range []struct {
		name        string
		top, bottom os.FileMode // modes of the directory of the socket and of its parent
		topOwner    int
		bottomOwner int
		want        string // in the error; "" for success
	}{
		{"private", 0o755, 0o755, 0, 0, ""},
		{"sticky parent", os.ModeSticky | 0o777, 0o755, 0, 0, ""},
		{"writable by all", 0o755, 0o777, 0, 0, "writable by other users"},
		{"sticky", 0o755, os.ModeSticky | 0o777, 0, 0, "writable by other users"},
		{"of another user", 0o755, 0o755, 0, 1000, "belongs to uid 1000"},
		{"parent writable by all", 0o777, 0o755, 0, 0, "writable by other users"},
		{"parent of another user", 0o755, 0o755, 1000, 0, "belongs to uid 1000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			top := filepath.Join(t.TempDir(), "top")
			bottom := filepath.Join(top, "bottom")
			if err := errors.Join(os.MkdirAll(bottom, 0o755), os.Chmod(bottom, tt.bottom), os.Chmod(top, tt.top),
				os.Chown(bottom, tt.bottomOwner, 0), os.Chown(top, tt.topOwner, 0)); err != nil {
				t.Fatal(err)
			}
			l, err := Listen(filepath.Join(bottom, "s"), Group{})
			if err == nil {
				defer l.Release()
				defer l.Close()
			}
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
		})
	}
}

// A deadlineRecorder records the read deadline of a request.
type deadlineRecorder struct {
	*httptest.ResponseRecorder
	read []time.Time
}

func (r *deadlineRecorder) SetReadDeadline(at time.Time) error {
	r.read = append(r.read, at)
	return nil
}

// TestTraceOutlivesReadTimeout checks that a trace has no read deadline: ReadTimeout of the server
// would end it.
func TestTraceOutlivesReadTimeout(t *testing.T) {
	r := &TraceRequest{Dir: "/mnt", Follow: true}
	w := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
	traceHandler(fixedMounts{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, pathTrace+"?"+r.query(), nil))
	if w.Code != http.StatusOK || len(w.read) != 1 || !w.read[0].IsZero() {
		t.Errorf("got status %d and read deadlines %v, want 200 and one that is zero", w.Code, w.read)
	}
}
