package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/nfsrdmad/nfsrdmad/internal/screen"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// checkClean fails the test when the demo left a file or a mount in its temporary directory.
func checkClean(t *testing.T, tmp string) {
	t.Helper()
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("temporary directory %s: got %v, %v, want it empty", tmp, left, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), tmp) {
		t.Errorf("mount left below %s (%v)", tmp, err)
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

func TestRunCopiesAndCompares(t *testing.T) {
	kit.NeedsFUSE(t)
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var out bytes.Buffer
	if err := Run(context.Background(), Config{Source: tree, Out: &out}); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"3 files", "all bytes are equal", "  mrs_allocated_total ", "  WRITE ", "MiB/s"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, &out)
		}
	}
	if !regexp.MustCompile(`(?m)^  CREATE +3 +0$`).MatchString(out.String()) {
		t.Errorf("output lacks the 3 calls of CREATE:\n%s", &out)
	}
	for line := range strings.Lines(out.String()) {
		tooLong := len(line) > 80+1 && !strings.Contains(line, tmp) && !strings.Contains(line, tree)
		if tooLong || strings.ContainsFunc(strings.TrimSuffix(line, "\n"), unicode.IsControl) {
			t.Errorf("line is too long or has control characters: %q", line)
		}
	}
	checkClean(t, tmp)
}

// A trigger calls do when a text is written for the nth time.
type trigger struct {
	text string
	nth  int
	do   func()
}

func (o *trigger) Write(b []byte) (int, error) {
	if strings.Contains(string(b), o.text) {
		if o.nth--; o.nth == 0 {
			o.do()
		}
	}
	return len(b), nil
}

// TestInterruptLeavesNothing interrupts the demo in several phases.
func TestInterruptLeavesNothing(t *testing.T) {
	kit.NeedsFUSE(t)
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	for _, phase := range []trigger{
		{text: "server ", nth: 1},
		{text: "copy in ", nth: 1},
		{text: "remount ", nth: 1},
		{text: "read back ", nth: 1},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		name := fmt.Sprintf("%q, number %d", phase.text, phase.nth)
		phase.do = cancel
		err := Run(ctx, Config{Source: tree, Out: &phase})
		cancel()
		var e *control.Error
		if !errors.As(err, &e) || e.Code != control.CodeCanceled {
			t.Errorf("interrupt at %s: got %v, want CodeCanceled", name, err)
		}
		checkClean(t, tmp)
	}
}

func removeSource(tree, _ string) error { return os.Remove(filepath.Join(tree, "odd")) }

func truncateCopy(_, export string) error { return os.Truncate(filepath.Join(export, "big"), 3<<20) }

func removeExport(_, export string) error { return os.RemoveAll(export) }

// TestFailureLeavesNothing removes a source file, changes the copy behind the mount, and removes
// the served directory, while the demo runs.
func TestFailureLeavesNothing(t *testing.T) {
	kit.NeedsFUSE(t)
	for _, tt := range []struct {
		name   string
		at     trigger
		damage func(tree, export string) error
		want   string
	}{
		{"source removed", trigger{text: "tree ", nth: 1}, removeSource, "odd"},
		{"copy changed", trigger{text: "copied in ", nth: 1}, truncateCopy, "big: differs"},
		{"export removed", trigger{text: "tree ", nth: 1}, removeExport, "/mnt/"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tree, tmp, damaged := smallTree(t), t.TempDir(), make(chan error, 1)
			t.Setenv("TMPDIR", tmp)
			var export string
			tt.at.do = func() { damaged <- tt.damage(tree, export) }
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			err := Run(ctx, Config{Source: tree, Out: &tt.at, onReady: func(s *site) { export = s.export }})
			var e *control.Error
			if !errors.As(err, &e) || e.Code != control.CodeMount || !strings.Contains(e.Text, tt.want) ||
				strings.Contains(e.Text, "\n") {
				t.Errorf("got %v", err)
			}
			if err := <-damaged; err != nil {
				t.Error(err)
			}
			checkClean(t, tmp)
		})
	}
}

func TestCompareReportsDifference(t *testing.T) {
	a, b := smallTree(t), smallTree(t)
	if err := os.WriteFile(filepath.Join(b, "odd"), bytes.Repeat([]byte("odd!"), 4097/4+1)[:4097], 0o644); err != nil {
		t.Fatal(err)
	}
	tr, err := listTree(a, 10)
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.compareTo(context.Background(), screen.New(&bytes.Buffer{}), b); err == nil ||
		!strings.Contains(err.Error(), "odd: differs") {
		t.Errorf("got %v", err)
	}
}

// TestCompareErrorIsOneLine checks that the error of a comparison has one line, and does not
// mention the end of the other file.
func TestCompareErrorIsOneLine(t *testing.T) {
	dir := smallTree(t)
	buf := &buffers{make([]byte, chunk), make([]byte, chunk)}
	_, err := compareFile(filepath.Join(dir, "odd"), dir, buf)
	if err == nil || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "EOF") ||
		!errors.Is(err, syscall.EISDIR) {
		t.Errorf("got %v", err)
	}
	if err := joinErrors(errors.New("one"), errors.New("two")); err.Error() != "one; two" {
		t.Errorf("got %v", err)
	}
}
