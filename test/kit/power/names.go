package power

import (
	"os"
	"path/filepath"
	"testing"
)

// ChangeNames makes a directory on a mount and changes names in it. It returns the names that the
// directory then has, in order.
func ChangeNames(t *testing.T, dir string) []string {
	t.Helper()
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, err := range []error{
		os.Mkdir(dir, 0o755),
		os.WriteFile(path("old"), []byte("data"), 0o644), // close makes the data stable
		os.WriteFile(path("removed"), []byte("data"), 0o644),
		os.Symlink("target", path("symlink")),
		os.Link(path("old"), path("link")),
		// A server that makes files stable, but not directories, loses the following changes.
		os.Rename(path("old"), path("new")),
		os.Remove(path("removed")),
		os.Mkdir(path("dir"), 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return []string{"dir", "link", "new", "symlink"}
}
