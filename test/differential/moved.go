package differential

import (
	"path/filepath"

	"golang.org/x/sys/unix"
)

// movedField tells in Difference.fields whether a rename moves or replaces a directory that a
// process moved on another mount.
const movedField = "moved"

// beforeRename reports whether an operation renames or replaces a directory that a process moved on
// another mount. moved records the rename, and must be called if the rename succeeds.
func (p *Pair) beforeRename(o *Op) (elsewhere bool, moved func()) {
	moved = func() {}
	if o.do != "rename" || p.Reference.Server == "" {
		return false, moved
	}
	dir, mount := filepath.Join(p.Reference.Server, p.dir), o.by%len(p.Processes)%len(p.Ours.Dirs)
	for _, path := range []string{o.to, o.path} {
		var st unix.Stat_t
		if unix.Lstat(dir+"/"+expandPath(path, len(dir)), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		by, found := p.movedBy[st.Ino]
		elsewhere = elsewhere || found && by != mount
		if path == o.path {
			moved = func() { p.movedBy[st.Ino] = mount }
		}
	}
	return elsewhere, moved
}
