package integration

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/lockrace"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// TestLocksExclude lets processes open, lock, and close a file of two mounts again and again, in
// several ways. No lock may end before its owner releases it.
func TestLocksExclude(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	rounds := lockrace.Rounds(t, 300)
	e := serveLocks(t)
	a, b := e.mount(t, nil), e.mount(t, nil)
	for _, x := range []struct {
		name  string
		kinds []string
		dirs  []string
	}{
		{"fcntl", []string{"fcntl", "fcntl"}, []string{a.dir, a.dir}},
		{"ofd", []string{"ofd", "ofd"}, []string{a.dir, a.dir}},
		{"flock", []string{"flock", "flock"}, []string{a.dir, a.dir}},
		{"all kinds on two mounts", []string{"fcntl", "ofd", "flock", "fcntl", "ofd", "flock"},
			[]string{a.dir, a.dir, a.dir, b.dir, b.dir, b.dir}},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := lockrace.Race{Kinds: x.kinds, Rounds: rounds, Marker: filepath.Join(t.TempDir(), "marker")}
			name := filepath.Base(t.Name())
			kit.Must(t, os.WriteFile(filepath.Join(a.dir, name), nil, 0o666))
			for _, dir := range x.dirs {
				r.Paths = append(r.Paths, filepath.Join(dir, name))
			}
			lost, all, err := r.Run()
			kit.Must(t, err)
			if lost > 0 || all != rounds*len(x.kinds) {
				t.Errorf("locks lost: got %d in %d rounds, want 0 in %d", lost, all, rounds*len(x.kinds))
			}
		})
	}
}
