package differential

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A keptFile is a removed open file that our client keeps under a hidden name. The client removes
// the hidden name after the last close, with the rights of the user who removed the file.
type keptFile struct {
	remover *identity
	// lostRight tells that the remover could not remove the hidden name after one of the later
	// operations. The name may then stay.
	lostRight bool
}

// removableField tells in Difference.fields of a walk whether our client should have removed a
// hidden name from the directory.
const removableField = "removable"

// hiddenNames calls f with each hidden name below a directory on the server of our side.
func (p *Pair) hiddenNames(dir string, f func(path string, dir, file *syscall.Stat_t)) error {
	top := filepath.Join(p.Ours.Server, p.dir, dir)
	return filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(e.Name(), hidden) {
			var inDir, file os.FileInfo
			if inDir, err = os.Lstat(filepath.Dir(path)); err == nil {
				file, err = e.Info()
			}
			if err == nil {
				f(path, inDir.Sys().(*syscall.Stat_t), file.Sys().(*syscall.Stat_t))
			}
		}
		if errors.Is(err, fs.ErrNotExist) { // the client removed it
			return nil
		}
		return err
	})
}

// watchKept finds the hidden names that the operation of a user made, and the rights of the users
// who made the others.
func (p *Pair) watchKept(as int) error {
	if !p.LikeNFS || p.Ours.Server == "" {
		return nil
	}
	return p.hiddenNames("", func(path string, dir, file *syscall.Stat_t) {
		k := p.kept[filepath.Base(path)]
		if k == nil {
			k = &keptFile{remover: users[as]}
			if p.kept == nil {
				p.kept = make(map[string]*keptFile)
			}
			p.kept[filepath.Base(path)] = k
		}
		k.lostRight = k.lostRight || !mayRemove(k.remover, dir, file)
	})
}

// isRemovable reports whether a directory has a hidden name that our client should have removed.
func (p *Pair) isRemovable(dir string) (removable bool) {
	own := filepath.Join(p.Ours.Server, p.dir, dir)
	err := p.hiddenNames(dir, func(path string, _, _ *syscall.Stat_t) {
		k := p.kept[filepath.Base(path)]
		removable = removable || filepath.Dir(path) == own && (k == nil || !k.lostRight)
	})
	return removable || err != nil
}

// awaitHiddenRemoved waits until our side has removed the hidden names of closed files, which it
// does after close(2) has returned. A name that stays for releaseTimeout is a difference.
func (p *Pair) awaitHiddenRemoved() error {
	if p.Ours.Server == "" {
		return nil
	}
	for deadline := time.Now().Add(releaseTimeout); ; time.Sleep(10 * time.Millisecond) {
		left := false
		err := p.hiddenNames("", func(path string, _, _ *syscall.Stat_t) {
			k := p.kept[filepath.Base(path)]
			left = left || k == nil || !k.lostRight
		})
		if err != nil || !left || !time.Now().Before(deadline) {
			return err
		}
	}
}

// mayRemove reports whether the modes let a user remove a file from a directory.
func mayRemove(u *identity, dir, file *syscall.Stat_t) bool {
	if u == root {
		return true
	}
	bits := dir.Mode
	switch {
	case int(dir.Uid) == u.id:
		bits >>= 6
	case int(dir.Gid) == u.id || slices.Contains(u.groups, dir.Gid):
		bits >>= 3
	}
	const need = unix.S_IWOTH | unix.S_IXOTH
	return bits&need == need && (dir.Mode&unix.S_ISVTX == 0 || int(dir.Uid) == u.id || int(file.Uid) == u.id)
}
