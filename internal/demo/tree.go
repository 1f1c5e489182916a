package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"github.com/nfsrdmad/nfsrdmad/internal/screen"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	parallel = 8       // workers
	chunk    = 1 << 20 // bytes of one read or write
)

// A tree lists what the demo copies. A directory comes before the objects in it.
type tree struct {
	root  string
	dirs  []string // relative to root
	files []string
	bytes int64
}

// listTree lists the directories and the first maxFiles regular files in lexical order. It ignores
// other objects.
func listTree(root string, maxFiles int) (*tree, error) {
	t := &tree{root: root}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir():
			t.dirs = append(t.dirs, rel)
		case d.Type().IsRegular():
			info, err := d.Info()
			if err != nil {
				return err
			}
			t.files = append(t.files, rel)
			t.bytes += info.Size()
			if len(t.files) >= maxFiles {
				return fs.SkipAll
			}
		}
		return nil
	})
	if err == nil && len(t.files) == 0 {
		err = fmt.Errorf("list %s: no files found; name another tree with --source", root)
	}
	return t, err
}

// progress counts the work done. Workers write it, and show reads it.
type progress struct {
	files, bytes atomic.Int64
}

// show prints progress at every tick until done is closed.
func (p *progress) show(out *screen.Screen, what string, t *tree, done <-chan struct{}) {
	ticker := time.NewTicker(out.Tick())
	defer ticker.Stop()
	for {
		out.Progress("%-10s %5d of %d files, %6.1f of %.1f MiB", what, p.files.Load(), len(t.files),
			mib(p.bytes.Load()), mib(t.bytes))
		select {
		case <-done:
			return
		case <-ticker.C:
		}
	}
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// interruptTimeout bounds the wait for workers after an interrupt. A worker that waits for a server
// that has ended returns only after the unmount.
const interruptTimeout = 3 * time.Second

// each calls f for every file, with parallel workers, and shows progress. It returns the first
// error.
func (t *tree) each(ctx context.Context, out *screen.Screen, what string,
	f func(rel string, buf *buffers) (int64, error)) error {
	var p progress
	done, shown := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(shown)
		p.show(out, what, t, done)
	}()
	defer func() { close(done); <-shown }()
	work := make(chan string)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(work)
		for _, rel := range t.files {
			select {
			case work <- rel:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	for range parallel {
		g.Go(func() error {
			buf := &buffers{make([]byte, chunk), make([]byte, chunk)}
			for rel := range work {
				n, err := f(rel, buf)
				if err != nil {
					return err
				}
				p.files.Add(1)
				p.bytes.Add(n)
			}
			return nil
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- g.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done(): // the caller or the first error canceled it
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(interruptTimeout):
		return context.Cause(ctx)
	}
}

type buffers struct{ a, b []byte }

// dirsPerReport is the number of directories between two reports of progress.
const dirsPerReport = 200

// copyTo copies the tree to dst.
func (t *tree) copyTo(ctx context.Context, out *screen.Screen, dst string) error {
	for i, rel := range t.dirs {
		if err := ctx.Err(); err != nil {
			return err
		}
		if i%dirsPerReport == 0 {
			out.Progress("%-10s %5d of %d directories", "copy in", i, len(t.dirs))
		}
		if err := os.MkdirAll(filepath.Join(dst, rel), 0o755); err != nil {
			return err
		}
	}
	return t.each(ctx, out, "copy in", func(rel string, buf *buffers) (int64, error) {
		return copyFile(filepath.Join(t.root, rel), filepath.Join(dst, rel), buf.a)
	})
}

func copyFile(src, dst string, buf []byte) (n int64, err error) {
	in, err := os.Open(src)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return 0, err
	}
	defer func() { err = joinErrors(err, out.Close()) }()
	// The demo shows reads and writes, so io.CopyBuffer must not use copy_file_range.
	return io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, buf)
}

// compareTo compares every file with its copy below dst.
func (t *tree) compareTo(ctx context.Context, out *screen.Screen, dst string) error {
	return t.each(ctx, out, "read back", func(rel string, buf *buffers) (int64, error) {
		return compareFile(filepath.Join(t.root, rel), filepath.Join(dst, rel), buf)
	})
}

func compareFile(want, got string, buf *buffers) (int64, error) {
	a, err := os.Open(want)
	if err != nil {
		return 0, err
	}
	defer a.Close()
	b, err := os.Open(got)
	if err != nil {
		return 0, err
	}
	defer b.Close()
	var at int64
	for {
		n, errA := io.ReadFull(a, buf.a)
		m, errB := io.ReadFull(b, buf.b)
		if err := joinErrors(ignoreEOF(errA), ignoreEOF(errB)); err != nil {
			return at, fmt.Errorf("compare %s: %w", got, err)
		}
		if !bytes.Equal(buf.a[:n], buf.b[:m]) {
			return at, fmt.Errorf("compare %s: differs from %s between bytes %d and %d", got, want, at,
				at+int64(max(n, m)))
		}
		at += int64(n)
		if errA != nil {
			return at, nil
		}
	}
}

// ignoreEOF returns err, or nil for the errors of io.ReadFull at the end of a file.
func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
