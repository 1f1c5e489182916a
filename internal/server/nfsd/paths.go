package nfsd

import (
	"encoding/binary"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of a pathTable.
const (
	maxPlaces   = 1 << 20                // files whose names are remembered
	maxWalk     = 10 * time.Second       // one search of the whole export
	walkShare   = 4                      // times the duration of a search until the next one
	shortPause  = 100 * time.Millisecond // a call waits so long for the next search
	maxDepth    = 4096                   // directories on the way from the export's root to a file
	direntsRoom = 64 << 10
)

// An inodeKey names a file on this host until the kernel reuses the inode number.
type inodeKey struct{ dev, ino uint64 }

// A place is a name of a file.
type place struct {
	parent inodeKey
	name   string
}

// A pathTable finds files by inode number where the kernel cannot open them by handle: on file
// systems without export support, and without CAP_DAC_READ_SEARCH. It remembers where each file
// that clients have seen is. A file that is not there is searched for in the whole export, for
// example after a restart of the server or after a local rename; one search runs at a time, and the
// time for it is bounded.
type pathTable struct {
	root int
	top  inodeKey

	state struct {
		sync.Mutex
		places map[inodeKey]place
	}
	walk struct {
		sync.Mutex
		began time.Time // of the last search
		next  time.Time // no search before
	}
}

func newPathTable(root int, st *unix.Stat_t) *pathTable {
	t := &pathTable{root: root, top: keyOf(st)}
	t.state.places = make(map[inodeKey]place)
	return t
}

func keyOf(st *unix.Stat_t) inodeKey { return inodeKey{uint64(st.Dev), st.Ino} }

// add notes that name in parent is the file k.
func (t *pathTable) add(k, parent inodeKey, name string) {
	if k == t.top || name == "" || name == "." || name == ".." {
		return
	}
	t.state.Lock()
	defer t.state.Unlock()
	if len(t.state.places) >= maxPlaces {
		for old := range t.state.places { // any: it can be searched for again
			delete(t.state.places, old)
			break
		}
	}
	t.state.places[k] = place{parent, name}
}

// path returns the path of a file below the root.
func (t *pathTable) path(k inodeKey) (string, bool) {
	t.state.Lock()
	defer t.state.Unlock()
	var names []string
	for k != t.top {
		p, ok := t.state.places[k]
		if !ok || len(names) == maxDepth {
			return "", false
		}
		names = append(names, p.name)
		k = p.parent
	}
	for i, j := 0, len(names)-1; i < j; i, j = i+1, j-1 {
		names[i], names[j] = names[j], names[i]
	}
	return strings.Join(names, "/"), true
}

// bodyOf is the body of the handle of an open file: its inode number and creation time, which tells
// apart files that had the same number one after the other.
func (t *pathTable) bodyOf(fd int, b []byte) ([]byte, error) {
	var st unix.Statx_t
	err := retry(func() error {
		return unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st)
	})
	if err != nil {
		return nil, err
	}
	var born unix.StatxTimestamp
	if st.Mask&unix.STATX_BTIME != 0 {
		born = st.Btime
	}
	b = binary.BigEndian.AppendUint64(b, st.Ino)
	b = binary.BigEndian.AppendUint64(b, uint64(born.Sec))
	return binary.BigEndian.AppendUint32(b, born.Nsec), nil
}

// open opens the file of a handle's body with O_PATH.
func (t *pathTable) open(body []byte) (int, error) {
	if len(body) != inodeBodySize {
		return -1, unix.ESTALE
	}
	k := inodeKey{t.top.dev, binary.BigEndian.Uint64(body)}
	if k == t.top {
		return retryFD(func() (int, error) {
			return unix.Openat(t.root, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		})
	}
	if fd, err := t.try(k, body); err == nil {
		return fd, nil
	}
	if err := t.search(k, body); err != nil {
		return -1, err
	}
	return t.try(k, body)
}

// try opens the file where it was seen last.
func (t *pathTable) try(k inodeKey, body []byte) (int, error) {
	path, ok := t.path(k)
	if !ok {
		return -1, unix.ESTALE
	}
	fd, err := openLongPath(t.root, path)
	if err != nil {
		return -1, unix.ESTALE
	}
	var room [inodeBodySize]byte
	if now, err := t.bodyOf(fd, room[:0]); err != nil || string(now) != string(body) {
		unix.Close(fd)
		return -1, unix.ESTALE
	}
	return fd, nil
}

// openLongPath is openPath for a path that may exceed the PATH_MAX of the kernel.
func openLongPath(dir int, path string) (int, error) {
	at := dir
	for len(path) >= unix.PathMax {
		cut := strings.LastIndexByte(path[:unix.PathMax-1], '/')
		if cut < 0 {
			cut = len(path)
		}
		fd, err := openPath(at, path[:cut])
		if at != dir {
			unix.Close(at)
		}
		if err != nil {
			return -1, err
		}
		at, path = fd, path[min(cut+1, len(path)):]
	}
	fd, err := openPath(at, path)
	if at != dir {
		unix.Close(at)
	}
	return fd, err
}

// search reads the whole export and notes the place of each file. It returns ESTALE when k is not
// there, and EAGAIN when it is too early for another search.
func (t *pathTable) search(k inodeKey, body []byte) error {
	called := time.Now()
	t.walk.Lock()
	defer t.walk.Unlock()
	if fd, err := t.try(k, body); err == nil { // found by the search of another call
		unix.Close(fd)
		return nil
	}
	if t.walk.began.After(called) { // that search saw the export as it was after this call came
		return unix.ESTALE
	}
	pause := time.Until(t.walk.next)
	if pause > shortPause {
		return unix.EAGAIN
	}
	time.Sleep(pause)
	began := time.Now()
	t.walk.began = began
	defer func() { t.walk.next = time.Now().Add(walkShare * time.Since(began)) }()
	deadline, seen, found := began.Add(maxWalk), 0, false
	buf := make([]byte, direntsRoom)
	type dir struct {
		key  inodeKey
		path string
	}
	for queue := []dir{{t.top, "."}}; len(queue) > 0 && seen < maxPlaces && time.Now().Before(deadline); {
		d := queue[0]
		queue = queue[1:]
		t.readDir(d.path, buf, func(e *dirent) {
			at, name := inodeKey{t.top.dev, e.ino}, string(e.name)
			seen++
			t.add(at, d.key, name)
			found = found || at == k
			if e.typ == unix.DT_DIR || e.typ == unix.DT_UNKNOWN {
				queue = append(queue, dir{at, d.path + "/" + name})
			}
		})
	}
	if !found {
		return unix.ESTALE
	}
	return nil
}

// readDir calls each for the entries of a directory. It skips what cannot be read.
func (t *pathTable) readDir(path string, buf []byte, each func(*dirent)) {
	fd, err := openLongPath(t.root, path)
	if err != nil {
		return
	}
	list, err := reopen(fd, unix.O_RDONLY|unix.O_DIRECTORY)
	unix.Close(fd)
	if err != nil {
		return
	}
	defer unix.Close(list)
	for {
		n, err := unix.Getdents(list, buf)
		if err != nil || n <= 0 {
			return
		}
		for e := range dirents(buf[:n]) {
			if name := string(e.name); name != "." && name != ".." {
				each(&e)
			}
		}
	}
}
