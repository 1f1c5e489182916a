package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// nothingLeft looks below the temporary directory that the demo was given, and for mounts in it.
func nothingLeft(t *testing.T, tmp string) {
	t.Helper()
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left in %s: %v, %v", tmp, left, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), tmp) {
		t.Errorf("a mount is left below %s, %v", tmp, err)
	}
}

func smallTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, size := range map[string]int{"empty": 0, "odd": 4097, "big": 3<<20 + 1} {
		if err := os.WriteFile(filepath.Join(dir, name), bytes.Repeat([]byte(name+"."), size/4+1)[:size],
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRun(t *testing.T) {
	testutil.NeedsFUSE(t)
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var out bytes.Buffer
	if err := Run(context.Background(), Config{Source: tree, Out: &out}); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"3 files", "every octet is equal", "  mrs_allocated_total ", "  WRITE ", "MiB/s"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	for line := range strings.Lines(out.String()) {
		if len(line) > 80+1 && !strings.Contains(line, tmp) || strings.ContainsFunc(strings.TrimSuffix(line, "\n"),
			unicode.IsControl) {
			t.Errorf("too long, or with control characters: %q", line)
		}
	}
	nothingLeft(t, tmp)
}

// on calls do once a text has been written for the nth time.
type on struct {
	text string
	nth  int
	do   func()
}

func (o *on) Write(b []byte) (int, error) {
	if strings.Contains(string(b), o.text) {
		if o.nth--; o.nth == 0 {
			o.do()
		}
	}
	return len(b), nil
}

// Interrupted in any phase, it leaves nothing.
func TestInterruptLeavesNothing(t *testing.T) {
	testutil.NeedsFUSE(t)
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	for _, phase := range []on{{text: "server ", nth: 1}, {text: "mounted ", nth: 1}, {text: "tree ", nth: 1},
		{text: "copy in ", nth: 1}, {text: "copy in ", nth: 2},
		{text: "copied in ", nth: 1}, {text: "remount ", nth: 1}, {text: "mounted ", nth: 2}, {text: "read back ",
			nth: 1}, {text: "compared ", nth: 1}, {text: "from /metrics", nth: 1}} {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		name := fmt.Sprint(phase.nth, " of ", phase.text)
		phase.do = cancel
		err := Run(ctx, Config{Source: tree, Out: &phase})
		cancel()
		var e *control.Error
		if !errors.As(err, &e) || e.Code != control.CodeCanceled {
			t.Errorf("at %s: %v", name, err)
		}
		nothingLeft(t, tmp)
	}
}

// Failures half-way: what is to be copied vanishes, the copy is changed behind the mount, the disk
// of the server is gone.
func TestFailureLeavesNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		at   on
		harm func(tree, export string) error
		says string
	}{
		{"source vanishes", on{text: "tree ", nth: 1},
			func(tree, _ string) error { return os.Remove(filepath.Join(tree, "odd")) }, "odd"},
		{"copy changes", on{text: "copied in ", nth: 1},
			func(_, export string) error { return os.Truncate(filepath.Join(export, "big"), 3<<20) }, "big differs"},
		{"export vanishes", on{text: "tree ", nth: 1}, func(_, export string) error { return os.RemoveAll(export) },
			"/mnt/"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tree, tmp, harmed := smallTree(t), t.TempDir(), make(chan error, 1)
			t.Setenv("TMPDIR", tmp)
			var export string
			tt.at.do = func() { harmed <- tt.harm(tree, export) }
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			err := Run(ctx, Config{Source: tree, Out: &tt.at, inside: func(s *site) { export = s.export }})
			var e *control.Error
			if !errors.As(err, &e) || e.Code != control.CodeMount || !strings.Contains(e.Text, tt.says) ||
				strings.Contains(e.Text, "\n") {
				t.Errorf("got %v", err)
			}
			if err := <-harmed; err != nil {
				t.Error(err)
			}
			nothingLeft(t, tmp)
		})
	}
}

// A server that dies leaves the files under way waiting; the time limit ends them, and nothing is
// left.
func TestDeadServerLeavesNothing(t *testing.T) {
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var server *nfsserve.Server
	out := &on{text: "tree ", nth: 1, do: func() { server.Close() }}
	err := Run(context.Background(), Config{Source: tree, Out: out, Timeout: 3 * time.Second,
		inside: func(s *site) { server = s.server }})
	var e *control.Error
	if !errors.As(err, &e) || !strings.Contains(e.Text, "not done after 3s") {
		t.Errorf("got %v", err)
	}
	nothingLeft(t, tmp)
}

func TestCompareFindsADifference(t *testing.T) {
	a, b := smallTree(t), smallTree(t)
	if err := os.WriteFile(filepath.Join(b, "odd"), bytes.Repeat([]byte("odd!"), 4097/4+1)[:4097], 0o644); err != nil {
		t.Fatal(err)
	}
	tr, err := listTree(a, 10)
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.compareTo(context.Background(), newScreen(&bytes.Buffer{}), b); err == nil ||
		!strings.Contains(err.Error(), "odd differs") {
		t.Errorf("got %v", err)
	}
}

// An error is one line, and names what failed alone: not the end of the file that is compared with.
func TestCompareFailsInOneLine(t *testing.T) {
	dir := smallTree(t)
	buf := &buffers{make([]byte, chunk), make([]byte, chunk)}
	_, err := compareFile(filepath.Join(dir, "odd"), dir, buf)
	if err == nil || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "EOF") ||
		!errors.Is(err, syscall.EISDIR) {
		t.Errorf("got %v", err)
	}
	if err := both(errors.New("one"), errors.New("two")); err.Error() != "one; two" {
		t.Errorf("got %v", err)
	}
}
