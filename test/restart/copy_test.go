package restart

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// copiers is the number of goroutines that copy a tree.
const copiers = 4

// A copied file is a file of the tree that is copied.
type copiedFile struct {
	name string // DIR/SUBDIR/FILE
	seed uint64
	size int
}

// copies copies a tree of many files again and again. It compares each file when it reads it, and
// again when the copy of the tree is complete.
func (l *load) copies(dir string, rng *rand.Rand) error {
	a, err := amountOf()
	if err != nil {
		return err
	}
	files := make([]copiedFile, a.files)
	for i := range files {
		size := rng.IntN(4000)
		if i%50 == 0 {
			size = rng.IntN(100_000)
		}
		files[i] = copiedFile{fmt.Sprintf("d%d/e%d/file%d", i%7, i/7%20, i), rng.Uint64(), size}
	}
	src := filepath.Join(dir, "src")
	var group sync.WaitGroup
	errs := make([]error, copiers)
	for w := range copiers {
		group.Go(func() {
			var mine []copiedFile
			for i := w; i < len(files); i += copiers {
				mine = append(mine, files[i])
			}
			if errs[w] = l.copier(dir, w, src, mine); errs[w] != nil {
				l.stop.Store(true)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// copier makes its files of the tree, and copies them at least once.
func (l *load) copier(dir string, w int, src string, files []copiedFile) error {
	for i := range files {
		if err := l.write(filepath.Join(src, files[i].name), files[i].content()); err != nil {
			return err
		}
	}
	if err := l.keepAll(src, files); err != nil {
		return err
	}
	tree := func(pass int) string { return filepath.Join(dir, fmt.Sprintf("copy%d-%d", pass, w)) }
	done := 0
	for k := range l.atLeast(len(files), "copy") {
		pass, i := k/len(files), k%len(files)
		if i == 0 && pass > 1 {
			if err := os.RemoveAll(tree(pass - 2)); err != nil {
				return err
			}
		}
		data, err := os.ReadFile(filepath.Join(src, files[i].name))
		if err == nil {
			err = files[i].check(data)
		}
		if err == nil {
			err = l.write(filepath.Join(tree(pass), files[i].name), data)
		}
		if err == nil && i == len(files)-1 {
			err = verifyTree(tree(pass), files)
		}
		if err != nil {
			return err
		}
		done = k + 1
	}
	if done < len(files) {
		return nil // another task has failed
	}
	pass, n := (done-1)/len(files), (done-1)%len(files)+1
	if pass > 0 {
		if err := l.keepAll(tree(pass-1), files); err != nil {
			return err
		}
	}
	return errors.Join(verifyTree(tree(pass), files[:n]), l.keepAll(tree(pass), files[:n]))
}

func (f *copiedFile) content() []byte { return kit.RandomBytes(f.seed, f.size) }

func (f *copiedFile) check(data []byte) error {
	if got, want := sha256.Sum256(data), sha256.Sum256(f.content()); !bytes.Equal(got[:], want[:]) {
		return fmt.Errorf("%s: other data (%d bytes, want %d)", f.name, len(data), f.size)
	}
	return nil
}

func (l *load) write(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

func (l *load) keepAll(root string, files []copiedFile) error {
	for i := range files {
		if err := l.keep(filepath.Join(root, files[i].name), files[i].content()); err != nil {
			return err
		}
	}
	return nil
}

func verifyTree(root string, files []copiedFile) error {
	for i := range files {
		data, err := os.ReadFile(filepath.Join(root, files[i].name))
		if err == nil {
			err = files[i].check(data)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
