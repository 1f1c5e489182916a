package vfs

import (
	"cmp"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
)

// A restoration makes the tables of an FS from its State.
type restoration struct {
	fs    *FS
	s     *State
	creds map[string][]byte
	files map[uint64]*fileHandle // released ones too
	err   map[*fileHandle]bool   // has an error to report
	work  []func()               // to do when the mount continues
}

// restore continues the mount of an earlier process. FS.resume then starts the work that this
// process has left.
func (fs *FS) restore() (err error) {
	r := &restoration{fs: fs, s: fs.state, creds: make(map[string][]byte), files: make(map[uint64]*fileHandle),
		err: make(map[*fileHandle]bool)}
	defer func() {
		if err != nil {
			fs.endWatch()
			fs.Abort()
			fs.work.Wait()
		}
	}()
	fs.users.Restore(r.s.mount.Counter(r.s.mountSlot), time.Now().Add(name.SoleEndTime))
	for _, step := range []func() error{r.nodes, r.openFiles, r.openDirs, r.hiddenNames, r.extents,
		r.requests} {
		if err := step(); err != nil {
			return err
		}
	}
	r.finish()
	fs.restored = r.work
	return nil
}

// resume starts the work of restore. The kernel's requests are being handled.
func (fs *FS) resume() {
	for _, f := range fs.restored {
		fs.spawn(f)
	}
	fs.restored = nil
	fs.spawn(fs.settle)
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", slotfile.ErrCorrupt, fmt.Sprintf(format, args...))
}

// cred returns the credential of a record. Equal credentials have the same memory.
func (r *restoration) cred(k *keptCred) ([]byte, error) {
	if k.n == 0 || k.n > maxCred {
		return nil, damaged("credential of %d bytes", k.n)
	}
	c := string(k.b[:k.n])
	if r.creds[c] == nil {
		r.creds[c] = []byte(c)
	}
	return r.creds[c], nil
}

func (k *keptHandle) handle() (nfs.Handle, error) {
	if k.n == 0 || k.n > nfs.HandleSize {
		return nfs.Handle{}, damaged("file handle of %d bytes", k.n)
	}
	return nfs.NewHandle(k.b[:k.n])
}

func (r *restoration) nodes() error {
	t := &r.fs.inodes
	return r.s.nodes.All(func(slot keptSlot, k *nodeRecord) error {
		fh, err := k.fh.handle()
		if err != nil {
			return err
		}
		if t.byID[k.id] != nil {
			return damaged("two nodes have the number %d", k.id)
		}
		ino := &inode{id: k.id, fh: fh, kept: slot, nlookup: r.s.nodes.Counter(slot)}
		ino.attr.Restore(nfs.FileType(k.typ), k.fileID)
		t.byID[ino.id] = ino
		if other := t.byFH.get(fh); other == nil || other.id < ino.id {
			t.byFH.put(ino)
		}
		return nil
	})
}

func (r *restoration) openFiles() error {
	return r.s.files.All(func(slot keptSlot, k *fileRecord) error {
		ino := r.fs.inodes.byID[k.node]
		cred, err := r.cred(&k.cred)
		if err == nil && ino == nil {
			err = damaged("open file %d of an unknown node", k.id)
		}
		if err != nil {
			return err
		}
		h := r.fs.makeFile(ino, cred, k.flags)
		h.id, h.kept, h.open = k.id, slot, k.open
		h.flushed.Store(true) // perhaps: rmdir then waits for the RELEASE
		h.locks.used = r.fs.opts.Locks != nil
		if e := syscall.Errno(r.s.files.Counter(slot)); e != 0 {
			r.fs.written(ino).RestoreError(e)
			r.err[h] = true
		}
		r.files[h.id] = h
		r.s.files.restored(cred)
		r.fs.inodes.openFile(ino)
		if k.releasing == 0 {
			r.fs.addFile(h)
			return nil
		}
		h.closed = true
		r.work = append(r.work, func() { r.fs.finishRelease(h) })
		return nil
	})
}

func (r *restoration) openDirs() error {
	return r.s.dirs.All(func(slot keptSlot, k *dirRecord) error {
		ino := r.fs.inodes.byID[k.node]
		cred, err := r.cred(&k.cred)
		if err == nil && ino == nil {
			err = damaged("open directory %d of an unknown node", k.id)
		}
		if err != nil {
			return err
		}
		r.fs.inodes.open(ino)
		r.s.dirs.restored(cred)
		r.fs.handles.dirs[k.id] = &dirHandle{id: k.id, ino: ino, cred: cred, kept: slot, verf: k.verf,
			returned: returnedNames{all: &r.fs.returned}}
		return nil
	})
}

// hiddenNames restores hidden names. The RENAME to a hidden name may not have been executed.
func (r *restoration) hiddenNames() error {
	t := &r.fs.inodes
	r.fs.hiddenBefore = make(map[string]*inode)
	return r.s.hidden.All(func(slot keptSlot, k *hiddenRecord) error {
		fh, err := k.dir.handle()
		if err == nil && k.nameLen > maxHiddenName {
			err = damaged("hidden name of %d bytes", k.nameLen)
		}
		if err != nil {
			return err
		}
		cred, err := r.cred(&k.cred)
		if err != nil {
			return err
		}
		dir, ino := t.byID[k.dirNode], t.byID[k.node]
		if dir == nil {
			dir = &inode{id: k.dirNode, fh: fh} // the kernel does not use it any more
		}
		if ino == nil {
			ino = &inode{id: k.node}
		}
		name := string(k.name[:k.nameLen])
		ino.setSilly(&sillyName{dir: dir, name: name, cred: cred, kept: slot})
		t.addHidden(dir)
		r.s.hidden.restored(cred)
		r.fs.hiddenBefore[name] = ino
		if ino.opens == 0 {
			r.work = append(r.work, func() { r.fs.removeSilly(background{r.fs}, ino) })
		}
		return nil
	})
}

// A keptExtent is the record of an extent and its place.
type keptExtent struct {
	extentRecord
	slot keptSlot
}

// extents restores written data. The server may have some of it: all is sent again, in the order of
// the writes.
func (r *restoration) extents() error {
	var all []keptExtent
	err := r.s.extents.All(func(slot keptSlot, k *extentRecord) error {
		all = append(all, keptExtent{*k, slot})
		return nil
	})
	slices.SortFunc(all, func(a, b keptExtent) int { return cmp.Compare(a.seq, b.seq) })
	for i := range all {
		if err == nil {
			err = r.extent(&all[i])
		}
	}
	return err
}

func (r *restoration) extent(k *keptExtent) error {
	fs, n := r.fs, r.s.extents.Counter(k.slot)
	r.s.seq.Store(k.seq)
	if n == 0 { // killed before the first data
		r.s.extents.Remove(&k.slot)
		return nil
	}
	ino := fs.inodes.byID[k.node]
	cred, err := r.cred(&k.cred)
	if err == nil && ino == nil {
		err = damaged("data of an unknown node")
	}
	if err != nil {
		return err
	}
	buf, err := fs.buffers.Take(int(k.buffer))
	if err != nil {
		return err
	}
	if n > uint64(len(buf)) {
		return damaged("%d bytes in a buffer of %d", n, len(buf))
	}
	w := data.Writer{Cred: cred, State: k.open}
	r.work = append(r.work, fs.written(ino).RestoreExtent(&w, k.off, buf, int(n), data.Record(k.slot)))
	return nil
}

func (r *restoration) requests() error {
	return r.s.requests.All(func(slot keptSlot, k *requestRecord) error {
		if k.nCalls > maxKeptCalls {
			return damaged("%d calls of one request", k.nCalls)
		}
		r.s.mu.byUnique[k.unique] = &requestState{slot: slot, rec: *k, earlier: int(k.nCalls), restored: true}
		r.s.active.Store(int64(len(r.s.mu.byUnique)))
		return nil
	})
}

// finish sets which errors the open files have reported, and drops nodes that are not in use.
func (r *restoration) finish() {
	for _, h := range r.files {
		h.ino.data.Load().RestoreErrors(&h.errors, r.err[h])
	}
	t := &r.fs.inodes
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ino := range t.byID {
		t.dropIfUnused(ino)
	}
}
