package nfsserve

import (
	"crypto/rand"
	"encoding/binary"
	"os"
	"path"
	"strings"
	"sync"
	"syscall"
)

// handleSize is a handle's size: the tree's random identity, and the node's number.
const handleSize = 16

// inode names a file on this host.
type inode struct{ dev, ino uint64 }

// A place is one name of a node.
type place struct {
	dir  *node
	name string
}

// A node is one file of the export, whatever it is called now. Its handle lives until its last
// known name is removed.
type node struct {
	id     uint64
	inode  inode
	places []place // empty for the root and for what is gone
}

// tree knows which handle means which file. Handles go by inode, so that a rename keeps them and
// hard links share one; they are valid for the life of the tree. Memory grows with the number of
// files that clients have seen.
type tree struct {
	root *os.Root
	id   [8]byte

	calls sync.RWMutex // held for the length of a call, see doc.go

	mu      sync.Mutex
	last    uint64           // guarded by mu
	byID    map[uint64]*node // guarded by mu, with the nodes' places
	byInode map[inode]*node  // guarded by mu
	byPlace map[place]*node  // guarded by mu
	top     *node
}

func newTree(root *os.Root) (*tree, error) {
	t := &tree{root: root, byID: map[uint64]*node{}, byInode: map[inode]*node{}, byPlace: map[place]*node{}}
	if _, err := rand.Read(t.id[:]); err != nil {
		return nil, err
	}
	info, err := root.Lstat(".")
	if err != nil {
		return nil, err
	}
	t.top = t.add(inodeOf(info))
	return t, nil
}

func inodeOf(info os.FileInfo) inode {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return inode{}
	}
	return inode{dev: uint64(st.Dev), ino: st.Ino}
}

// add makes a node. mu is held, or the tree is new.
func (t *tree) add(i inode) *node {
	t.last++
	n := &node{id: t.last, inode: i}
	t.byID[n.id], t.byInode[i] = n, n
	return n
}

func (t *tree) handle(n *node) []byte {
	return binary.BigEndian.AppendUint64(append(make([]byte, 0, handleSize), t.id[:]...), n.id)
}

// toHandle gives the handle of the file that elems names now; of nothing there, one that is never
// valid.
func (t *tree) toHandle(elems []string) []byte {
	if len(elems) == 0 {
		return t.handle(t.top)
	}
	info, err := t.root.Lstat(path.Join(elems...))
	if err != nil {
		return t.handle(&node{})
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	dir := t.dirNode(elems[:len(elems)-1])
	if dir == nil {
		return t.handle(&node{})
	}
	at, i := place{dir, elems[len(elems)-1]}, inodeOf(info)
	if n := t.byPlace[at]; n != nil {
		if n.inode == i {
			return t.handle(n)
		}
		t.forget(at) // replaced behind our back
	}
	n := t.byInode[i]
	// a directory has one name: it was moved behind our back
	if n == nil || info.IsDir() && len(n.places) > 0 {
		if n != nil {
			t.forget(n.places[0])
		}
		n = t.add(i)
	}
	n.places = append(n.places, at)
	t.byPlace[at] = n
	return t.handle(n)
}

// dirNode finds the node of a directory whose own handle was given out before, as go-nfs guarantees
// by walking from a handle.
func (t *tree) dirNode(elems []string) *node {
	n := t.top
	for _, e := range elems {
		if n = t.byPlace[place{n, e}]; n == nil {
			return nil
		}
	}
	return n
}

// forget takes a name away; with its last name a node is gone. mu is held.
func (t *tree) forget(at place) {
	n := t.byPlace[at]
	if n == nil {
		return
	}
	delete(t.byPlace, at)
	for i := range n.places {
		if n.places[i] == at {
			n.places = append(n.places[:i], n.places[i+1:]...)
			break
		}
	}
	if len(n.places) == 0 {
		delete(t.byID, n.id)
		if t.byInode[n.inode] == n {
			delete(t.byInode, n.inode)
		}
	}
}

// fromHandle gives a path at which the handle's file is now; nil and false when there is none.
func (t *tree) fromHandle(fh []byte) ([]string, bool) {
	if len(fh) != handleSize || string(fh[:8]) != string(t.id[:]) {
		return nil, false
	}
	t.mu.Lock()
	n := t.byID[binary.BigEndian.Uint64(fh[8:])]
	var candidates [][]string
	if n != nil && n != t.top {
		for _, at := range n.places {
			if p, ok := t.pathOf(at); ok {
				candidates = append(candidates, p)
			}
		}
	}
	t.mu.Unlock()
	if n == nil {
		return nil, false
	}
	if n == t.top {
		return []string{}, true
	}
	for _, p := range candidates {
		if info, err := t.root.Lstat(path.Join(p...)); err == nil && inodeOf(info) == n.inode {
			return p, true
		}
	}
	return nil, false
}

// maxDepth ends a walk that a loop of directories, moved behind our back, would make endless.
const maxDepth = 4096

func (t *tree) pathOf(at place) ([]string, bool) {
	var p []string
	for range maxDepth {
		p = append(p, at.name)
		if at.dir == t.top {
			for i, j := 0, len(p)-1; i < j; i, j = i+1, j-1 {
				p[i], p[j] = p[j], p[i]
			}
			return p, true
		}
		if len(at.dir.places) == 0 {
			return nil, false
		}
		at = at.dir.places[0]
	}
	return nil, false
}

func (t *tree) placeOf(name string) (place, bool) {
	elems := strings.Split(name, "/")
	dir := t.dirNode(elems[:len(elems)-1])
	return place{dir, elems[len(elems)-1]}, dir != nil
}

// removed tells that a name is gone.
func (t *tree) removed(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at, ok := t.placeOf(name); ok {
		t.forget(at)
	}
}

// renamed tells that from is called to now, and what was to before is not any more. Renaming one
// link of a file to another of its links does nothing (rename(2)).
func (t *tree) renamed(from, to string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	src, ok1 := t.placeOf(from)
	dst, ok2 := t.placeOf(to)
	if !ok1 || !ok2 || src == dst {
		return
	}
	n := t.byPlace[src]
	if n != nil && t.byPlace[dst] == n {
		return
	}
	t.forget(dst)
	if n == nil {
		return
	}
	delete(t.byPlace, src)
	for i := range n.places {
		if n.places[i] == src {
			n.places[i] = dst
		}
	}
	t.byPlace[dst] = n
}
