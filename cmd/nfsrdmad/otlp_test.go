package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/collector"
)

// TestTraces traces all requests of a mount. The certificate of the collector is among the roots of
// the system. pkg/metrics/otlp has tests of the spans, and of collectors that fail.
func TestTraces(t *testing.T) {
	c, roots := collector.StartTLS(t)
	t.Setenv("SSL_CERT_FILE", roots)
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--otlp-endpoint", c.URL, "--otlp-ratio", "1")
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	if _, err := os.Stat(filepath.Join(dir, "missing")); !os.IsNotExist(err) {
		t.Errorf("stat of a missing file: got %v", err)
	}
	data := kit.RandomBytes(1, 300_000)
	writeDirty(t, filepath.Join(dir, "written"), data) // the WRITE is part of the unmount
	w.stop(t, w.daemon)
	w.wantOnServer(t, "written", data)

	spans := c.Spans()
	byID, found := make(map[string]*collector.Span), make(map[string]*collector.Span)
	for i := range spans {
		byID[spans[i].ID], found[spans[i].Name] = &spans[i], &spans[i]
	}
	own := 0
	for i := range spans {
		s := &spans[i]
		if p := byID[s.Parent]; s.Parent != "" && (p == nil || p.Trace != s.Trace || s.Start.Before(p.Start) ||
			s.End.After(p.End)) {
			t.Fatalf("%+v: got parent %+v, want one of the same trace that includes it", s, p)
		}
		if s.Attributes["nfsrdmad.owner.pid"] == int64(os.Getpid()) {
			own++
		}
		if strings.HasPrefix(s.Name, "fuse/") && s.Attributes["nfsrdmad.mount.dir"] != dir {
			t.Errorf("got %+v, want the mount at %s", s, dir)
		}
	}
	if own == 0 {
		t.Errorf("got no request of this process: %+v", spans)
	}
	for _, want := range []string{"fuse/lookup", "fuse/open", "fuse/read", "fuse/write", "fuse/create", "nfs/LOOKUP",
		"nfs/READ", "nfs/WRITE", "nfs/CREATE", "queue", "server", "reply"} {
		if found[want] == nil {
			t.Errorf("got %d spans without %s", len(spans), want)
		}
	}
	if all := fmt.Sprint(spans); strings.Contains(all, "hello") || strings.Contains(all, "written") ||
		strings.Contains(all, "missing") {
		t.Errorf("got %s, want no names of files", all)
	}
	if strings.Contains(w.log.String(), "dropped") {
		t.Errorf("got log %s, want no dropped spans", w.log)
	}
}
