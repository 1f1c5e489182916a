package control

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// A daemon that is gone in the middle is no end of the mount.
func TestTraceSaysThatTheDaemonDied(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "one line\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-served })
	var out bytes.Buffer
	err = NewClient(socket).Trace(context.Background(), TraceRequest{Dir: "/x", Follow: true}, &out)
	var e *Error
	if want := "the daemon at " + socket + " ended"; !errors.As(err, &e) || e.Code != CodeSystem ||
		!strings.Contains(e.Text, want) {
		t.Errorf("got %v, want code %s and %q", err, CodeSystem, want)
	}
	if out.String() != "one line\n" {
		t.Errorf("got %q", out.String())
	}
}
