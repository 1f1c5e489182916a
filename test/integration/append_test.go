package integration

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// TestAppendAfterChangeOnServer appends to an open file that has become longer on the server. A
// mount without attribute caches must not overwrite the new data.
func TestAppendAfterChangeOnServer(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	mnt := mounts.MountServed(t, mounts.ServeDir(t, served, "--no-root-squash"), "noac")
	for name, flags := range map[string]int{"read and write": os.O_RDWR, "write": os.O_WRONLY} {
		f, err := os.OpenFile(filepath.Join(mnt, name), flags|os.O_CREATE|os.O_APPEND, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		old, more := bytes.Repeat([]byte("o"), 9999), bytes.Repeat([]byte("m"), 700)
		if err := os.WriteFile(filepath.Join(served, name), old, 0o644); err != nil {
			t.Error(err)
		}
		if _, err := f.Write(more); err != nil {
			t.Error(err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		got, err := os.ReadFile(filepath.Join(served, name))
		if want := append(old, more...); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: got %d bytes, first %.4q, %v, want %d bytes, first %.4q", name, len(got), got, err, len(want),
				want)
		}
	}
}
