package nfsd

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestReplacedNewObjectIsRefused replaces each new object by another one before the server opens it
// by name. The server must refuse the other object, and not change it.
func TestReplacedNewObjectIsRefused(t *testing.T) {
	kit.NeedsRoot(t)
	both(t, func(t *testing.T, change func(*Config)) {
		var replace func(name string)
		c := start(t, func(cfg *Config) {
			change(cfg)
			cfg.newAge = 1
			cfg.between = func(name string) { replace(name) }
		})
		mode := 0o777 &^ c.s.umask // the server would add the bits of the umask
		old := func(name string) {
			c.OK(os.Mkdir(c.path(name), os.FileMode(mode)))
			kit.Eventually(t, "change time after the birth time", func() bool {
				c.OK(os.Chmod(c.path(name), os.FileMode(mode)))
				var st unix.Statx_t
				c.OK(unix.Statx(unix.AT_FDCWD, c.path(name), 0, unix.STATX_BTIME|unix.STATX_CTIME, &st))
				if st.Mask&unix.STATX_BTIME == 0 {
					t.Fatalf("this test needs a file system with birth times in %s", c.dir)
				}
				return st.Ctime.Sec > st.Btime.Sec || st.Ctime.Nsec > st.Btime.Nsec+1
			})
		}
		dir := func(name string) { c.OK(os.Mkdir(c.path(name), os.FileMode(mode))) }
		file := func(name string) { c.OK(os.WriteFile(c.path(name), nil, os.FileMode(mode))) }
		fifo := func(name string) { c.OK(unix.Mkfifo(c.path(name), mode)) }
		others := func(name string) { dir(name); c.OK(os.Chown(c.path(name), 1001, 1001)) }
		set, made := nfs3.SetAttr{HasMode: true, Mode: 0o777}, nfs3.CreateResult{}
		mkdir := func(name string) error { return c.Mkdir(c.Ctx, root, c.Root, name, &set, &made) }
		mknod := func(name string) error {
			return c.Mknod(c.Ctx, root, c.Root, name, nfs3.NF3FIFO, &set, nfs3.Device{}, &made)
		}
		symlink := func(name string) error { return c.Symlink(c.Ctx, root, c.Root, name, "to", &nfs3.SetAttr{}, &made) }
		for _, tt := range []struct {
			name  string
			call  func(name string) error
			other func(name string)
		}{
			{"MKDIR, file", mkdir, file}, {"MKDIR, directory of another user", mkdir, others},
			{"MKDIR, older directory", mkdir, old}, {"MKNOD, file", mknod, file}, {"SYMLINK, FIFO", symlink, fifo},
		} {
			tt.other("other")
			before := c.stat("other")
			replace = func(name string) {
				c.OK(os.Remove(c.path(name)))
				c.OK(os.Rename(c.path("other"), c.path(name)))
			}
			if err := tt.call("new"); nfs3.Errno(err) != unix.ENOENT {
				t.Errorf("%s: got %v, want %v", tt.name, err, unix.ENOENT)
			}
			if after := c.stat("new"); after.Mode != before.Mode {
				t.Errorf("%s: the other object changed its mode from %o to %o", tt.name, before.Mode, after.Mode)
			}
			c.OK(os.Remove(c.path("new")))
			replace = func(string) {}
			if err := tt.call("new"); err != nil {
				t.Errorf("%s, not replaced: %v", tt.name, err)
			}
			c.OK(os.Remove(c.path("new")))
		}
	})
}
