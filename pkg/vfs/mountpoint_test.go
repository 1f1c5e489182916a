package vfs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// newFS returns an FS of the export that is not mounted.
func (e *export) newFS(t *testing.T) *FS {
	t.Helper()
	kit.NeedsFUSE(t)
	conn, err := e.dial(t.Context())
	must(t, err)
	pool := membuf.NewPool(MaxIOSize, 1)
	opts := DefaultOptions()
	opts.Buffers = pool
	fs, err := New(t.Context(), nfs3.NewServer(nfs3.NewClient(conn)), e.root, opts)
	must(t, err)
	t.Cleanup(func() {
		fs.Close(t.Context())
		pool.Close()
		conn.Close()
	})
	return fs
}

// mountsBelow returns the lines of the mount table for mounts at or below dir.
func mountsBelow(t *testing.T, dir string) (lines []string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); f[4] == dir || strings.HasPrefix(f[4], dir+"/") {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestMountPointCannotBeSwapped replaces a mount point by a symbolic link between the check and the
// mount, as a user can who owns the parent directory. Nothing may be mounted.
func TestMountPointCannotBeSwapped(t *testing.T) {
	e := startOwnExport(t)
	for name, swap := range map[string]func(t *testing.T, dir, victim string){
		"mount point": func(t *testing.T, dir, victim string) {
			must(t, os.Rename(dir, dir+".old"))
			must(t, os.Symlink(victim, dir))
		},
		"parent": func(t *testing.T, dir, victim string) {
			parent := filepath.Dir(dir)
			must(t, os.Rename(parent, parent+".old"))
			must(t, os.Symlink(filepath.Dir(victim), parent))
		},
		"another directory": func(t *testing.T, dir, victim string) {
			must(t, os.Rename(dir, dir+".old"))
			must(t, os.Rename(victim, dir))
		},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			dir, victim := filepath.Join(top, "home", "mnt"), filepath.Join(top, "etc", "mnt")
			must(t, os.MkdirAll(dir, 0o755))
			must(t, os.MkdirAll(victim, 0o755))
			p, err := mountpoint.Open(dir)
			must(t, err)
			defer p.Close()
			swap(t, dir, victim)
			s, err := MountAt(p, e.newFS(t), MountOptions{})
			// MountAt also finds a swap later, when it has mounted.
			if err == nil || !strings.Contains(err.Error(), "directory was moved to ") {
				t.Errorf("mount: got %v, want the error of the check before it", err)
			}
			if err == nil {
				must(t, s.Unmount())
			}
			if lines := mountsBelow(t, top); len(lines) != 0 {
				t.Errorf("mount table: got %s, want no mount", lines)
			}
		})
	}
}

// TestUnmountCannotBeRedirected replaces the parent of a mount point by a symbolic link to the
// parent of another mount, after an unmount has opened the parent.
func TestUnmountCannotBeRedirected(t *testing.T) {
	t.Parallel()
	kit.NeedsRoot(t)
	e := startOwnExport(t)
	top := t.TempDir()
	dir, victim := filepath.Join(top, "home", "mnt"), filepath.Join(top, "etc", "mnt")
	must(t, os.MkdirAll(dir, 0o755))
	must(t, os.MkdirAll(victim, 0o755))
	must(t, unix.Mount("tmpfs", victim, "tmpfs", 0, ""))
	defer unix.Unmount(victim, unix.MNT_DETACH)
	s, err := Mount(dir, e.newFS(t), MountOptions{})
	must(t, err)
	defer s.ForceUnmount()
	must(t, os.Rename(filepath.Dir(dir), filepath.Join(top, "moved")))
	must(t, os.Symlink(filepath.Dir(victim), filepath.Dir(dir)))
	if err := s.Unmount(); err == nil {
		t.Error("unmount through the link: got success, want an error")
	}
	if lines := mountsBelow(t, top); len(lines) != 2 {
		t.Errorf("mount table: got %s, want both mounts", lines)
	}
	must(t, os.Remove(filepath.Dir(dir)))
	must(t, os.Rename(filepath.Join(top, "moved"), filepath.Dir(dir)))
	must(t, s.Unmount())
	if lines := mountsBelow(t, top); len(lines) != 1 || !strings.Contains(lines[0], victim) {
		t.Errorf("mount table after the parent has its path again: got %s, want the mount of %s alone", lines, victim)
	}
}
