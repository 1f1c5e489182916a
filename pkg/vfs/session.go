package vfs

import (
	"maps"
	"slices"
)

// EndSession closes the files and directories that the kernel has open, and forgets its nodes. The
// next kernel begins with the root. No request may be in progress. EndSession does not wait for the
// server: data is written and locks are released in the background.
func (fs *FS) EndSession() {
	fs.handles.Lock()
	files := slices.Collect(maps.Keys(fs.handles.files))
	dirs := slices.Collect(maps.Keys(fs.handles.dirs))
	fs.handles.Unlock()
	for _, id := range files {
		fs.releaseFile(id)
	}
	for _, id := range dirs {
		fs.releaseDir(id)
	}
	fs.inodes.forgetAll()
}

// forgetAll releases all lookup references of the kernel.
func (t *inodeTable) forgetAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ino := range t.byID {
		ino.nlookup = 0
		t.state.setLookups(ino)
		t.dropIfUnused(ino)
	}
}
