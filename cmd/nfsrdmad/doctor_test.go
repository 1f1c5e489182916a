package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/doctor"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// source returns the arguments that name the server of w.
func (w *testEnv) source(export string) []string {
	return []string{"127.0.0.1:" + export, "-o", w.opts(w.server.RDMAAddr)}
}

// TestDoctorOfServer runs the command with a server that works and with an export that does not
// exist.
func TestDoctorOfServer(t *testing.T) {
	w := newTestEnv(t)
	o := w.run(t, "doctor", append(w.source("/"), "--write")...).succeeds(t)
	wantText(t, "doctor", o.stdout, "this host", "mount of 127.0.0.1:/", "ok rdma-port", "ok read-write",
		"holds key-reuse", "measured", " 0 failed")
	for line := range strings.Lines(o.stdout) {
		// A word that is too long, such as a path, cannot be broken.
		line = strings.TrimRight(line, "\r\n")
		if n := utf8.RuneCountInString(line); n > columns && len(strings.Fields(line)) > 1 {
			t.Errorf("got a line of %d columns: %q", n, line)
		}
	}
	if o.stderr != "" {
		t.Errorf("got stderr %q", o.stderr)
	}

	o = w.run(t, "doctor", w.source("/missing")...)
	if o.code != control.ExitMount || strings.Count(o.stderr, "\n") != 1 ||
		!strings.Contains(o.stderr, "MNT3ERR_NOENT") {
		t.Errorf("wrong export: got exit code %d, stderr %q", o.code, o.stderr)
	}
	wantText(t, "doctor", o.stdout, "FAILED mnt", "skipped getattr", "ok handshake", " 1 failed")

	o = w.run(t, "doctor", append(w.source("/missing"), "--output", "json")...)
	var r doctor.Report
	if err := json.Unmarshal([]byte(o.stdout), &r); err != nil {
		t.Fatalf("%v: %s", err, o.stdout)
	}
	if o.code != control.ExitMount || r.Outcome != doctor.OutcomeFailed || r.FirstFailure().Name != "mnt" ||
		r.Source != "127.0.0.1:/missing" {
		t.Errorf("got exit code %d, report %+v", o.code, r)
	}
	config := filepath.Join(w.dir, "allow.toml")
	for text, want := range map[string]string{"allow_mounts = \"nas:/**\"\n": "FAILED allow-mounts",
		"allow = \"nas:/**\"\n": "warning configuration"} {
		kit.Must(t, os.WriteFile(config, []byte(text), 0o600))
		wantText(t, "doctor", w.run(t, "doctor", append(w.source("/"), "--config", config)...).stdout, want,
			"ok rdma-port")
	}
}

// TestDoctorChecksLocks runs the command with a mount whose server has a lock service, with a mount
// whose locks are local, and with the port of a service that is not NLM.
func TestDoctorChecksLocks(t *testing.T) {
	w := newTestEnv(t)
	dir, local, other := w.mkdir(t, "mnt"), w.mkdir(t, "local"), w.mkdir(t, "other")
	w.mount(t, dir).succeeds(t)
	w.mountWith(t, local, "nolock")
	wantText(t, "doctor", w.run(t, "doctor").succeeds(t).stdout,
		"ok mount-locks", dir+": the lock service of the server replies; ", local+": all local")
	w.mountWith(t, other, "nlmport=1")
	wantText(t, "doctor", w.run(t, "doctor").succeeds(t).stdout,
		"warning mount-locks", "no NLM service", "127.0.0.1:1: connect", "start lockd on the server")
	f, err := os.Open(filepath.Join(other, "hello"))
	kit.Must(t, err)
	defer f.Close()
	_ = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	wantText(t, "status", w.run(t, "status", other).succeeds(t).stdout, "no NLM service", "mount with nolock")
}

// TestDoctorBundle makes an archive of a daemon whose mount has a file with a known name, and
// checks that neither the name nor a key is in it.
func TestDoctorBundle(t *testing.T) {
	const marker = "marker-of-a-file-name"
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	data := bytes.Repeat([]byte("marker-of-data"), 20_000)
	kit.Must(t, os.WriteFile(filepath.Join(dir, marker), data, 0o600))
	kit.Must(t, os.Mkdir(filepath.Join(dir, marker+"-dir"), 0o700))
	path, config := filepath.Join(w.dir, "bundle.tar.gz"), filepath.Join(w.dir, "config.toml")
	kit.Must(t, os.WriteFile(config, []byte("# marker-of-a-comment\nlog_level = \"warn\"\nmetrics_listen = \"\"\n"),
		0o600))
	args := append(w.source("/"), "--bundle", path, "--config", config)
	w.run(t, "doctor", args...).succeeds(t)
	keys := traceValues(t, w, dir, "handle", "offset")
	if len(keys) < 4 {
		t.Fatalf("the trace has only the values %q", keys)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("got mode %v, error %v; want 0600", st.Mode(), err)
	}
	all := kit.ReadArchive(t, path)
	for name, text := range all {
		for _, secret := range append(keys, marker, "marker-of-data", "marker-of-a-comment") {
			if strings.Contains(text, secret) {
				t.Errorf("entry %s has %q", name, secret)
			}
		}
	}
	for name, want := range map[string]string{"status.json": `"dir": "` + dir, "trace-0.jsonl": `"event":"map"`,
		"slow.json": `"name": "WRITE"`, "doctor.json": `"name": "rdma-port"`, "config.txt": `log_level = "warn"`,
		"version.json": `"daemon"`} {
		if !strings.Contains(all[name], want) {
			t.Errorf("entry %s: got %s, want %s in it", name, all[name], want)
		}
	}
	w.run(t, "doctor", args...).fails(t, control.ExitUsage, "bundle.tar.gz", "exists", "remove it")
}

// traceValues returns all values of fields of the trace of a mount.
func traceValues(t *testing.T, w *testEnv, dir string, fields ...string) (values []string) {
	t.Helper()
	o := w.run(t, "trace", dir, "--follow=false", "--output", "json").succeeds(t)
	for line := range strings.Lines(o.stdout) {
		var e map[string]any
		kit.Must(t, json.Unmarshal([]byte(line), &e))
		for _, f := range fields {
			if v, ok := e[f].(string); ok && !slices.Contains(values, v) {
				values = append(values, v)
			}
		}
	}
	return values
}
