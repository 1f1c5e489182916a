package csi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const (
	// privateDirMode keeps other users away from the private mounts.
	privateDirMode = 0o700
	// releaseTimeout bounds the unmount of a private mount.
	releaseTimeout = 45 * time.Second
	// volumeDirMode is the mode of a new directory, before the umask.
	volumeDirMode = 0o777
	// maxArchives bounds the names that archive tries.
	maxArchives = 1000
)

// errNotDirectory means that a name on the way to a volume is not a directory, for example a
// symbolic link.
var errNotDirectory = errors.New("not a directory; symbolic links are not allowed")

// withShare mounts the share of v in a private directory, calls f with a descriptor of its root
// directory, and unmounts the share. When ctx ends, it aborts the mount, so that f returns although
// the server does not reply. The caller has the lock of the volume.
func (d *Driver) withShare(ctx context.Context, v *volume, options string, f func(root int) error) (err error) {
	sum := sha256.Sum256([]byte(v.id()))
	dir := filepath.Join(d.cfg.WorkDir, hex.EncodeToString(sum[:16]))
	if err := d.makeWorkDir(); err != nil {
		return err
	}
	if err := d.release(ctx, dir); err != nil { // of a driver that was killed
		return err
	}
	if err := makeTarget(dir); err != nil {
		return err
	}
	request := control.MountRequest{Spec: v.share.String(), Dir: dir, Options: options}
	if _, err := d.client.Mount(ctx, request); err != nil {
		_ = os.Remove(dir)
		return err
	}
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		if failed := d.release(cleanup, dir); failed != nil {
			d.log.Warn("unmount of a private mount failed", "dir", dir, "error", failed)
		}
	}()
	done := make(chan error, 1)
	go func() {
		root, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("open %s: %w", v.share, err)
			return
		}
		err = f(root)
		unix.Close(root)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	abort, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if err := d.client.Umount(abort, control.UmountRequest{Dir: dir, Mode: control.UmountForce}); err != nil {
		d.log.Warn("abort of a private mount failed", "dir", dir, "error", err)
	}
	select {
	case <-done:
	case <-abort.Done(): // the goroutine ends with the mount
	}
	return ctx.Err()
}

// release unmounts a private mount and removes its directory. No data is lost: the driver writes no
// files.
func (d *Driver) release(ctx context.Context, dir string) error {
	m, err := topMount(dir)
	if err != nil {
		return err
	}
	if m != nil {
		err := d.client.Umount(ctx, control.UmountRequest{Dir: dir})
		if err != nil && control.CodeOf(err) != control.CodeNotMounted {
			err = d.client.Umount(ctx, control.UmountRequest{Dir: dir, Mode: control.UmountForce})
		}
		if control.CodeOf(err) == control.CodeNotMounted { // its daemon has ended
			err = unmountAll(dir, unix.MNT_DETACH)
		}
		if err != nil {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// releaseAll unmounts the private mounts that an earlier driver left.
func (d *Driver) releaseAll(ctx context.Context) {
	names, err := os.ReadDir(d.cfg.WorkDir)
	if err != nil {
		return // no work directory yet
	}
	for _, n := range names {
		if err := d.release(ctx, filepath.Join(d.cfg.WorkDir, n.Name())); err != nil {
			d.log.Warn("unmount of a private mount of an earlier driver failed", "name", n.Name(), "error", err)
		}
	}
}

// openDir opens the directory name in parent. The name is one name, and not that of a symbolic
// link.
func openDir(parent int, name string) (int, error) {
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return -1, fmt.Errorf("%s: %w", name, errNotDirectory)
	}
	if err != nil {
		return -1, fmt.Errorf("%s: %w", name, err)
	}
	return fd, nil
}

// walk calls f with a descriptor of the directory dir below root. With create it creates the
// directories that do not exist. It follows no symbolic link.
func walk(root int, dir string, create bool, f func(fd int) error) error {
	fd, err := unix.Openat(root, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { unix.Close(fd) }()
	if dir == "." || dir == "" {
		return f(fd)
	}
	for name := range strings.SplitSeq(dir, "/") {
		if create {
			if err := unix.Mkdirat(fd, name, volumeDirMode); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("create directory %s: %w", name, err)
			}
		}
		next, err := openDir(fd, name)
		if err != nil {
			return err
		}
		unix.Close(fd)
		fd = next
	}
	return f(fd)
}

// createDir creates the directory of a volume, or checks one that exists.
func createDir(root int, v *volume) error {
	return walk(root, v.subDir, true, func(fd int) error { return setMode(fd, v.permissions) })
}

// setMode sets the mode bits of a directory, unless they are 0.
func setMode(fd int, mode uint32) error {
	if mode == 0 {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&0o7777 == mode {
		return nil
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return fmt.Errorf("set mountPermissions %04o: %w", mode, err)
	}
	return nil
}

// inParent calls f with the parent directory of a volume and the name of its directory. If a
// directory on the way does not exist, it does not call f.
func inParent(root int, v *volume, f func(parent *os.Root, name string) error) error {
	err := walk(root, path.Dir(v.subDir), false, func(fd int) error {
		parent, err := os.OpenRoot("/proc/self/fd/" + strconv.Itoa(fd))
		if err != nil {
			return err
		}
		defer parent.Close()
		name := path.Base(v.subDir)
		fi, err := parent.Lstat(name)
		if err != nil {
			return err
		}
		if !fi.IsDir() {
			return fmt.Errorf("%s: %w", v.subDir, errNotDirectory)
		}
		return f(parent, name)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeDir removes the directory of a volume and all files in it.
func removeDir(root int, v *volume) error {
	return inParent(root, v, func(parent *os.Root, name string) error { return parent.RemoveAll(name) })
}

// archiveDir renames the directory of a volume: to archived-NAME, or archived-NAME-N if that
// exists. See [archiveName] for long names.
func archiveDir(root int, v *volume) error {
	return inParent(root, v, func(parent *os.Root, name string) error {
		base := archiveName(name)
		to := base
		for n := 1; n <= maxArchives; n++ {
			if _, err := parent.Lstat(to); errors.Is(err, fs.ErrNotExist) {
				return parent.Rename(name, to)
			} else if err != nil {
				return err
			}
			to = fmt.Sprintf("%s-%d", base, n)
		}
		return fmt.Errorf("archive %s: %d archives exist; remove some", v.subDir, maxArchives)
	})
}

// archiveName returns the new name of the directory name. It leaves room for the number that
// archiveDir may add. It replaces the end of a name that is too long by a hash of the name, so two
// long names have different archives.
func archiveName(name string) string {
	const prefix = "archived-"
	limit := maxName - len(prefix) - len("-") - len(strconv.Itoa(maxArchives))
	if len(name) <= limit {
		return prefix + name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "-" + hex.EncodeToString(sum[:16])
	end := limit - len(hash)
	for end > 0 && !utf8.RuneStart(name[end]) {
		end--
	}
	return prefix + name[:end] + hash
}

// existsDir reports whether the directory of a volume exists.
func existsDir(root int, v *volume) (bool, error) {
	found := false
	err := inParent(root, v, func(*os.Root, string) error { found = true; return nil })
	return found, err
}
