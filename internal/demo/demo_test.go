package demo

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
)

func TestMain(m *testing.M) { verbstest.Main(m) }

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
		if err := os.WriteFile(filepath.Join(dir, name), bytes.Repeat([]byte(name+"."), size/4+1)[:size], 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRun(t *testing.T) {
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var out bytes.Buffer
	if err := Run(context.Background(), Config{Source: tree, Out: &out}); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"all 3 files equal", "nfsrdmad_mrs_allocated_total", "WRITE calls", "MiB/s"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	nothingLeft(t, tmp)
}

// cancelOn ends a context once a text has been written.
type cancelOn struct {
	text   string
	cancel context.CancelFunc
}

func (c cancelOn) Write(b []byte) (int, error) {
	if strings.Contains(string(b), c.text) {
		c.cancel()
	}
	return len(b), nil
}

func TestInterruptLeavesNothing(t *testing.T) {
	tree, tmp := smallTree(t), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	for _, when := range []string{"server:", "mounted:", "copying"} {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		err := Run(ctx, Config{Source: tree, Out: cancelOn{when, cancel}})
		cancel()
		var e *daemon.Error
		if !errors.As(err, &e) || e.Code != daemon.CodeCanceled {
			t.Errorf("at %q: %v", when, err)
		}
		nothingLeft(t, tmp)
	}
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
	if err := tr.compareTo(context.Background(), &bytes.Buffer{}, b); err == nil || !strings.Contains(err.Error(), "odd differs") {
		t.Errorf("got %v", err)
	}
}
