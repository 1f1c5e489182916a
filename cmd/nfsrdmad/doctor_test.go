package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/doctor"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// source returns the arguments that name the server of w.
func (w *testEnv) source(export string) []string {
	return []string{"doctor", "--control-socket", w.socket, "127.0.0.1:" + export, "-o",
		fmt.Sprintf("port=%d,mountport=%s", w.server.RDMAAddr.Port(), w.tcpPort)}
}

// TestDoctorOfServer runs the command with a server that works and with an export that does not
// exist.
func TestDoctorOfServer(t *testing.T) {
	w := newTestEnv(t)
	o := nfsrdmad(t, append(w.source("/"), "--write")...).succeeds(t)
	wantText(t, "doctor", o.stdout, "this host", "mount of 127.0.0.1:/", "ok rdma-port", "ok read-write",
		"holds key-reuse", "measured", " 0 failed")
	wantColumns(t, o.stdout, columns)
	if o.stderr != "" {
		t.Errorf("got stderr %q", o.stderr)
	}

	o = nfsrdmad(t, w.source("/missing")...)
	if o.code != control.ExitMount || strings.Count(o.stderr, "\n") != 1 ||
		!strings.Contains(o.stderr, "MNT3ERR_NOENT") {
		t.Errorf("wrong export: got exit code %d, stderr %q", o.code, o.stderr)
	}
	wantText(t, "doctor", o.stdout, "FAILED mnt", "skipped getattr", "ok handshake", " 1 failed")

	o = nfsrdmad(t, append(w.source("/missing"), "--output", "json")...)
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
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		wantText(t, "doctor", nfsrdmad(t, append(w.source("/"), "--config", config)...).stdout, want, "ok rdma-port")
	}
	nfsrdmad(t, "doctor", "--config", config+".none").fails(t, control.ExitUsage, "no such file")
	nfsrdmad(t, "doctor", "--write").fails(t, control.ExitUsage, "HOST:/EXPORT")
	nfsrdmad(t, "doctor", "a:/b", "-o", "nonsense").fails(t, control.ExitUsage, "nonsense")
	nfsrdmad(t, "doctor", "a:/b", "--timeout", "0s").fails(t, control.ExitUsage, "--timeout")
}

// TestDoctorOnTerminal runs the command on a terminal of 70 columns, with an RDMA port that is
// silent. It shows the step that waits, and wraps the table.
func TestDoctorOnTerminal(t *testing.T) {
	kit.NeedsPrograms(t, "script", "stty")
	w := newTestEnv(t)
	inner := program(t, "nfsrdmad")
	cmd := exec.Command("script", "--quiet", "--flush", "--return", "--command", fmt.Sprintf(
		"stty cols 70; exec '%s' doctor --control-socket %s 127.0.0.1:/ --timeout 3s -o port=%d,mountport=%s",
		inner.Path, w.socket, peer(t, func(net.Conn) {}).Port(), w.tcpPort), "/dev/null")
	cmd.Env = inner.Env
	o := finish(t, cmd)
	if o.code != control.ExitMount {
		t.Errorf("got exit code %d, want %d", o.code, control.ExitMount)
	}
	table, _, _ := strings.Cut(o.stdout, "nfsrdmad: a mount of") // the error on standard error
	const erase = "\r\x1b[K"
	if !strings.Contains(table, "         rdma-port  ") || !strings.Contains(table, " s"+erase) {
		t.Errorf("got no progress of the step rdma-port: %q", table)
	}
	wantColumns(t, strings.ReplaceAll(table, erase, "\n"), 70)
}

// wantColumns checks the width of a table. A word that is too long, such as a path, cannot be
// broken.
func wantColumns(t *testing.T, table string, limit int) {
	t.Helper()
	for line := range strings.Lines(table) {
		line = strings.TrimRight(line, "\r\n")
		if n := utf8.RuneCountInString(line); n > limit && len(strings.Fields(line)) > 1 {
			t.Errorf("got a line of %d columns: %q", n, line)
		}
	}
}

// TestDoctorInterrupt sends SIGINT while the RDMA port is silent.
func TestDoctorInterrupt(t *testing.T) {
	w := newTestEnv(t)
	cmd := program(t, "nfsrdmad", "doctor", "--control-socket", w.socket, "127.0.0.1:/", "--timeout", "50s", "-o",
		fmt.Sprintf("port=%d,mountport=%s", peer(t, func(net.Conn) {}).Port(), w.tcpPort))
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	var text bytes.Buffer
	for buf := make([]byte, 4096); ; {
		n, err := out.Read(buf)
		text.Write(buf[:n])
		if strings.Contains(text.String(), "provider ") { // the next step is rdma-port
			_ = cmd.Process.Signal(syscall.SIGINT)
		}
		if err != nil {
			break
		}
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != control.ExitInterrupted ||
		!strings.Contains(errOut.String(), "interrupted") {
		t.Errorf("got exit code %d, stderr %q", code, &errOut)
	}
	wantText(t, "doctor", text.String(), "skipped lock-service interrupted")
}

// TestDoctorBundle makes an archive of a daemon whose mount has a file with a known name, and
// checks that neither the name nor a key is in it.
func TestDoctorBundle(t *testing.T) {
	const marker = "marker-of-a-file-name"
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	data := bytes.Repeat([]byte("marker-of-data"), 20_000)
	if err := os.WriteFile(filepath.Join(dir, marker), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, marker+"-dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(w.dir, "bundle.tar.gz")
	config := filepath.Join(w.dir, "config.toml")
	if err := os.WriteFile(config, []byte("# marker-of-a-comment\nlog_level = \"warn\"\nmetrics_listen = \"\"\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	args := append(w.source("/"), "--bundle", path, "--config", config)
	nfsrdmad(t, args...).succeeds(t)
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
		"slow.json":   `"name": "WRITE"`,
		"doctor.json": `"name": "rdma-port"`, "config.txt": `log_level = "warn"`, "version.json": `"daemon"`} {
		if !strings.Contains(all[name], want) {
			t.Errorf("entry %s: got %s, want %s in it", name, all[name], want)
		}
	}
	nfsrdmad(t, args...).fails(t, control.ExitUsage, "bundle.tar.gz", "exists", "remove it")
	if after, err := os.Stat(path); err != nil || after.Size() != st.Size() || !after.ModTime().Equal(st.ModTime()) {
		t.Errorf("the archive changed: %v, %v", after, err)
	}
}

// traceValues returns all values of fields of the trace of a mount.
func traceValues(t *testing.T, w *testEnv, dir string, fields ...string) (values []string) {
	t.Helper()
	o := nfsrdmad(t, "trace", dir, "--control-socket", w.socket, "--follow=false", "--output", "json").succeeds(t)
	for line := range strings.Lines(o.stdout) {
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		for _, f := range fields {
			if v, ok := e[f].(string); ok && !slices.Contains(values, v) {
				values = append(values, v)
			}
		}
	}
	return values
}
