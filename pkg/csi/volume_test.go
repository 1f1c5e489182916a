package csi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestVolumeIDRoundTrip(t *testing.T) {
	for _, tt := range []struct {
		name   string
		params map[string]string
		id     string
		spec   string
	}{
		{"defaults", map[string]string{"server": "h", "share": "/export"}, "h#export#pvc-1##", "h:/export/pvc-1"},
		{"root of the server", map[string]string{"server": "h", "share": "/"}, "h##pvc-1##", "h:/pvc-1"},
		{"nested", map[string]string{"Server": "h", "SHARE": "/a/b/", "subDir": "c/d"}, "h#a/b#c/d#pvc-1#",
			"h:/a/b/c/d"},
		{"IPv6", map[string]string{"server": "2001:db8::1", "share": "/e"}, "2001:db8::1#e#pvc-1##",
			"[2001:db8::1]:/e/pvc-1"},
		{"IPv6 in brackets", map[string]string{"server": "[2001:db8::1]", "share": "/e"}, "2001:db8::1#e#pvc-1##",
			"[2001:db8::1]:/e/pvc-1"},
		{"variables", map[string]string{"server": "h", "share": "/e",
			"subdir":                           "${pvc.metadata.namespace}-${pv.metadata.name}",
			"csi.storage.k8s.io/pvc/namespace": "shop", "csi.storage.k8s.io/pv/name": "pv"}, "h#e#shop-pv#pvc-1#",
			"h:/e/shop-pv"},
		{"onDelete", map[string]string{"server": "h", "share": "/e", "onDelete": "Retain"}, "h#e#pvc-1##retain",
			"h:/e/pvc-1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v, err := newVolume("pvc-1", tt.params)
			if err != nil {
				t.Fatal(err)
			}
			if v.id() != tt.id || v.spec().String() != tt.spec {
				t.Errorf("got ID %q and source %q, want %q and %q", v.id(), v.spec(), tt.id, tt.spec)
			}
			parsed, err := parseID(v.id())
			if err != nil || parsed.spec() != v.spec() || parsed.onDelete != v.onDelete {
				t.Errorf("parse of the ID: got %+v, %v, want %+v", parsed, err, v)
			}
			again, err := volumeOf(v.context())
			if err != nil || again.spec() != v.spec() {
				t.Errorf("volume of the attributes: got %+v, %v, want %+v", again, err, v)
			}
		})
	}
}

func FuzzParseID(f *testing.F) {
	for _, id := range []string{"h#e#pvc-1##", "h##a/b#c#archive", "h##../x##", "2001:db8::1#e#x##", "####",
		"h#e#a\x00##"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		v, err := parseID(id)
		if err != nil {
			return
		}
		if v.id() != id {
			t.Errorf("ID %q became %q", id, v.id())
		}
		export := v.spec().Export
		if filepath.Clean(export) != export || strings.ContainsRune(export, 0) ||
			!strings.HasPrefix(export, strings.TrimSuffix(v.share.Export, "/")+"/") {
			t.Errorf("ID %q: source %q leads out of the share %q", id, export, v.share.Export)
		}
	})
}

// Directories of volumes are created, checked and removed without following symbolic links.
func TestWalkFollowsNoLink(t *testing.T) {
	root := t.TempDir()
	outside := t.TempDir()
	for link, target := range map[string]string{"out": outside, "self": "."} {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, dir := range []string{"out", "out/x", "self/x", "self"} {
		v := &volume{subDir: dir}
		for name, f := range map[string]func(int, *volume) error{"create": createDir, "remove": removeDir,
			"archive": archiveDir} {
			if err := f(fd, v); !errors.Is(err, errNotDirectory) {
				t.Errorf("%s %s: got error %v, want %v", name, dir, err, errNotDirectory)
			}
		}
	}
	if names, err := os.ReadDir(outside); err != nil || len(names) > 0 {
		t.Errorf("outside of the share: got %v, %v, want nothing", names, err)
	}
	v := &volume{subDir: "a/b", permissions: 0o700}
	if err := createDir(fd, v); err != nil {
		t.Fatal(err)
	}
	if found, err := existsDir(fd, v); err != nil || !found {
		t.Errorf("existsDir: got %v, %v, want true", found, err)
	}
	if err := removeDir(fd, v); err != nil {
		t.Error(err)
	}
	if found, err := existsDir(fd, v); err != nil || found {
		t.Errorf("existsDir after removal: got %v, %v, want false", found, err)
	}
}

// An archive has a name that a file system accepts, and no archive replaces another.
func TestArchiveNamesAreBounded(t *testing.T) {
	long := strings.Repeat("n", maxName-1)
	names := []string{"pvc-1", strings.Repeat("n", 240), long + "a", long + "b", "e" + strings.Repeat("é", maxName/2)}
	root := t.TempDir()
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, name := range names {
		v := &volume{subDir: name}
		for range 3 {
			if err := createDir(fd, v); err != nil {
				t.Fatal(err)
			}
			if err := archiveDir(fd, v); err != nil {
				t.Errorf("archive of a name of %d bytes: %v", len(name), err)
			}
		}
		base := archiveName(name)
		if len(fmt.Sprintf("%s-%d", base, maxArchives)) > maxName || !utf8.ValidString(base) {
			t.Errorf("archive name %q: longer than %d bytes with a number, or not UTF-8", base, maxName)
		}
	}
	if archiveName(names[2]) == archiveName(names[3]) {
		t.Errorf("two names have the archive %s", archiveName(names[2]))
	}
	left, err := os.ReadDir(root)
	if err != nil || len(left) != 3*len(names) {
		t.Errorf("archives: got %d (error %v), want %d", len(left), err, 3*len(names))
	}
	for _, l := range left {
		if !strings.HasPrefix(l.Name(), "archived-") {
			t.Errorf("%s: not archived", l.Name())
		}
	}
}

func TestLockRefusesSecondCall(t *testing.T) {
	var l volumeLocks
	release, err := l.acquire("a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.acquire("a"); status.Code(err) != codes.Aborted {
		t.Errorf("second call: got error %v, want Aborted", err)
	}
	other, err := l.acquire("b")
	if err != nil {
		t.Errorf("call for another volume: %v", err)
	}
	other()
	release()
	if release, err = l.acquire("a"); err != nil {
		t.Errorf("call after release: %v", err)
	}
	release()
}

// The default work directory is below the directory of the control socket, which is not private.
func TestWorkDirIsPrivateAndItsParentIsNot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run", "csi")
	d := &Driver{cfg: Config{WorkDir: dir}}
	for range 2 {
		if err := d.makeWorkDir(); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Dir(dir): 0o755} {
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
			t.Errorf("%s: got mode %v (error %v), want %v", path, fi.Mode().Perm(), err, want)
		}
	}
}

// A driver replaces the socket of an earlier one, and removes its own.
func TestListenReplacesSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi", "csi.sock")
	first, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	first.SetUnlinkOnClose(false) // as when a driver is killed
	first.Close()
	l, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Lstat(path); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket: got mode %v (error %v), want %v", fi.Mode(), err, os.ModeSocket|0o600)
	}
	l.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket after close: got error %v, want %v", err, os.ErrNotExist)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := listen(path); err == nil {
		l.Close()
		t.Error("listen at the name of a file: got no error")
	}
}
