package knfsd

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// randomFile makes a file of the host.
func randomFile(t *testing.T, size int) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "random")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.CopyN(f, noise(size), int64(size)); err != nil {
		t.Fatal(err)
	}
	return file
}

// copying copies a file in, in the background, and returns when it is under way. wait waits for its end, and fails the test if the copy was over
// before it was called.
func copying(t *testing.T, m *mount, src, name string) (wait func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*limit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "dd", "if="+src, "of="+filepath.Join(m.dir, name), "bs=1M", "conv=fsync", "status=none")
	before := m.tr.Stats().ReadChunks
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for m.tr.Stats().ReadChunks < before+4 {
		select {
		case err := <-done:
			t.Fatalf("the copy ended before it was under way: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return func() {
		t.Helper()
		select {
		case <-done:
			t.Fatal("the copy was over before the server went away")
		default:
		}
		if err := <-done; err != nil {
			t.Errorf("the copy: %v", err)
		}
	}
}
