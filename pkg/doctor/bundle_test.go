package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestBundleWithoutDaemon makes an archive on a host without a daemon. The tests of cmd/nfsrdmad
// have a daemon.
func TestBundleWithoutDaemon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "b.tar.gz")
	b, err := CreateBundle(path)
	kit.Must(t, err)
	err = b.Write(t.Context(), BundleConfig{Report: &Report{Source: "server:/export", Time: time.Now()},
		Socket: filepath.Join(t.TempDir(), "none"), Settings: []Setting{{"log_level", "in\"fo"}},
		Unit: "no-such.service"})
	kit.Must(t, err)
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("got mode %v, error %v; want 0600", st.Mode(), err)
	}
	all := kit.ReadArchive(t, path)
	for name, want := range map[string]string{
		"README.txt": "Left out", "doctor.json": `"source": "server:/export"`, "config.txt": `log_level = "in\"fo"`,
		"kernel.txt": "== /proc/version\nLinux", "status.json": "not available: ",
		"slow.json": "not available: ", "metrics.txt": "not available: ",
		"version.json": "not available: ", "unit.txt": "", "journal.txt": "", "devices.txt": "",
	} {
		if got, found := all[name]; !found || !strings.Contains(got, want) {
			t.Errorf("entry %s: got %q, found %v; want %q in it", name, got, found, want)
		}
	}
	for name := range all {
		if !strings.Contains(all["README.txt"], name) && !strings.HasPrefix(name, "README") {
			t.Errorf("README.txt does not name %s", name)
		}
	}
}

// TestCreateBundleReplacesNothing uses paths at which something exists.
func TestCreateBundleReplacesNothing(t *testing.T) {
	dir := t.TempDir()
	file, link, dangling, sub := filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "dangling"),
		filepath.Join(dir, "sub")
	kit.Must(t, errors.Join(os.WriteFile(file, []byte("old"), 0o644), os.Symlink(file, link),
		os.Symlink(filepath.Join(dir, "new"), dangling), os.Symlink(t.TempDir(), sub)))
	for path, want := range map[string]string{file: "remove it", link: "", dangling: "",
		filepath.Join(sub, "b"): "without symbolic links", filepath.Join(dir, "none", "b"): "another path"} {
		b, err := CreateBundle(path)
		if err == nil {
			b.Discard()
		}
		if err == nil || !strings.Contains(err.Error(), want) || control.CodeOf(err) != control.CodeUsage {
			t.Errorf("%s: got error %v, want one with %q", path, err, want)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "old" {
		t.Errorf("the file changed: %q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target of a symbolic link exists: %v", err)
	}
}

// TestInterruptedBundleIsRemoved cancels an archive.
func TestInterruptedBundleIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "b.tar.gz")
	b, err := CreateBundle(path)
	kit.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Write(ctx, BundleConfig{Report: &Report{}, Unit: "x"}); !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want %v", err, context.Canceled)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the archive exists: %v", err)
	}
}

// TestJournal runs other programs in place of journalctl.
func TestJournal(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for _, x := range []struct{ script, want, without string }{
		{"", "not available: journalctl: exec", ""},
		{"echo no journal >&2; exit 1", "not available: journalctl: exit status 1 no journal", ""},
		{`echo "host nfsrdmad[7]: [INFO]  nfsrdmad: mounted: dir=/mnt handle=0102"; echo "[DEBUG] name=secret"`,
			"mounted: dir=/mnt handle=(removed)\n(1 lines left out", "secret"},
	} {
		if x.script != "" {
			program := []byte("#!/bin/sh\n" + x.script + "\n")
			kit.Must(t, os.WriteFile(filepath.Join(dir, "journalctl"), program, 0o755))
		}
		got := string(journalEntry(t.Context(), "x.service"))
		if !strings.Contains(got, x.want) || x.without != "" && strings.Contains(got, x.without) {
			t.Errorf("journalctl %q: got %q, want %q", x.script, got, x.want)
		}
	}
}

func TestRedactTrace(t *testing.T) {
	const lines = `{"event":"map","handle":"0x12345678","length":8192,"mr":3,"offset":"0xab","seq":7}
{"lost":17}
no JSON with secret
{"event":"new","path":"/secret","connection":1}
`
	const want = `{"event":"map","length":8192,"mr":3,"seq":7}
{"lost":17}
{"connection":1,"event":"new"}
`
	if got := string(redactTrace([]byte(lines))); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestRedactLog(t *testing.T) {
	const prefix = "2026-01-02T03:04:05+0000 host nfsrdmad[7]: 2026-01-02T03:04:05.000Z "
	for _, x := range []struct{ line, want string }{
		{prefix + `[INFO]  nfsrdmad: mounted: spec=a:/b dir=/mnt options="rw,hard"`,
			prefix + `[INFO]  nfsrdmad: mounted: spec=a:/b dir=/mnt options="rw,hard"`},
		{prefix + `[ERROR] nfsrdmad: written data lost: dir=/mnt fileid=77 handle="01 \"02" uid=0 bytes=9 pid=4`,
			prefix + `[ERROR] nfsrdmad: written data lost: dir=/mnt fileid=(removed) handle=(removed) uid=(removed) ` +
				`bytes=9 pid=(removed)`},
		{prefix + `[DEBUG] nfsrdmad: LOOKUP: name=secret`, ""},
		{prefix + `  | goroutine 7 [running]`, ""},
		{"2026-01-02T03:04:05+0000 host systemd[1]: Started nfsrdmad.service.",
			"2026-01-02T03:04:05+0000 host systemd[1]: Started nfsrdmad.service."},
		{`host nfsrdmad[7]: {"@level":"warn","@message":"m","error":"e","handle":"0102","file":{"name":"secret"}}`,
			`host nfsrdmad[7]: {"@level":"warn","@message":"m","error":"e","file":"(removed)","handle":"(removed)"}`},
		{`host nfsrdmad[7]: {"@level":"debug","@message":"m"}`, ""},
		{`host nfsrdmad[7]: {"broken secret`, ""},
	} {
		got := string(redactLog([]byte(x.line + "\n")))
		if want := x.want + "\n"; x.want != "" && got != want {
			t.Errorf("got  %swant %s", got, want)
		}
		if x.want == "" && !strings.HasPrefix(got, "(1 lines left out") {
			t.Errorf("%s: got %s, want it left out", x.line, got)
		}
	}
}
