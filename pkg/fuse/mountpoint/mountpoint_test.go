package mountpoint

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// mountsBelow returns the lines of the mount table for mounts at or below dir.
func mountsBelow(t *testing.T, dir string) (lines []string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	kit.Must(t, err)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); f[4] == dir || strings.HasPrefix(f[4], dir+"/") {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestMountOnDescriptor mounts on the descriptor of a directory whose path leads elsewhere, with
// both interfaces of the kernel.
func TestMountOnDescriptor(t *testing.T) {
	kit.NeedsFUSE(t)
	for name, mount := range map[string]func(int, *Point) (Device, error){
		"fsopen": func(fd int, p *Point) (Device, error) {
			return p.mountNew(fd, &Options{ReadOnly: true, NoExec: true}, "host:/x", 4096)
		},
		"mount": func(fd int, p *Point) (Device, error) {
			return p.mountOld(fd, &Options{ReadOnly: true, NoExec: true}, "host:/x", 4096)
		},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			dir, moved, victim := filepath.Join(top, "mnt"), filepath.Join(top, "moved"), filepath.Join(top, "victim")
			kit.Must(t, os.Mkdir(dir, 0o755))
			kit.Must(t, os.Mkdir(victim, 0o755))
			p, err := Open(dir)
			kit.Must(t, err)
			defer p.Close()
			kit.Must(t, os.Rename(dir, moved))
			kit.Must(t, os.Symlink(victim, dir))
			fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
			kit.Must(t, err)
			defer unix.Close(fd)
			dev, err := mount(fd, p)
			kit.Must(t, err)
			lines := mountsBelow(t, top)
			if len(lines) != 1 {
				t.Fatalf("mount table: got %s, want one mount", lines)
			}
			f := strings.Fields(lines[0])
			number := strconv.Itoa(int(dev.Major)) + ":" + strconv.Itoa(int(dev.Minor))
			options := "ro,nosuid,nodev,noexec,relatime"
			end := f[len(f)-3:] // type, source and options of the file system
			if f[2] != number || f[4] != moved || f[5] != options || end[0] != FSType || end[1] != "host:/x" ||
				!strings.HasPrefix(end[2], "ro,") {
				t.Errorf("mount table: got %s, want device %s at %s with %s, type %s, source host:/x, read-only",
					lines[0], number, moved, options, FSType)
			}
			kit.Must(t, p.detach(dev))
			if lines := mountsBelow(t, top); len(lines) != 0 {
				t.Errorf("mount table after unmount: got %s, want no mount", lines)
			}
		})
	}
}

// TestIsMount checks which lines of the mount table are a mount.
func TestIsMount(t *testing.T) {
	const table = `22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
90 22 0:77 / /mnt/with\040blank\134and\011more rw,nosuid - fuse.nfsrdma host:/x rw
91 90 0:78 /sub /mnt/plain rw - fuse.nfsrdma host:/x rw
`
	for _, c := range []struct {
		name, dir string
		dev       Device
		want      bool
	}{
		{"escaped", "/mnt/with blank\\and\tmore", Device{0, 77}, true},
		{"plain", "/mnt/plain", Device{0, 78}, true},
		{"other device there", "/mnt/plain", Device{0, 77}, false},
		{"prefix of the number", "/mnt/plain", Device{0, 7}, false},
		{"below", "/mnt", Device{0, 78}, false},
		{"same number and place, other type", "/", Device{8, 1}, false},
	} {
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(table), isMount(c.dir, c.dev))
		if got := len(mounts) > 0; err != nil || got != c.want {
			t.Errorf("%s: got %v and error %v, want %v", c.name, got, err, c.want)
		}
	}
}
