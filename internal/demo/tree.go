package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	parallel = 8       // files under way at a time
	chunk    = 1 << 20 // octets of one read or write
)

// A tree is a list of what to copy, directories before what is in them.
type tree struct {
	root  string
	dirs  []string // relative
	files []string
	bytes int64
}

// listTree takes the first maxFiles regular files in lexical order. What is neither file nor
// directory is left out.
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
		err = fmt.Errorf("no files in %s; name another tree with --source", root)
	}
	return t, err
}

// progress is counted by workers and shown by its own goroutine.
type progress struct {
	files, bytes atomic.Int64
}

// show shows progress now and then until done is closed.
func (p *progress) show(out *screen, what string, t *tree, done <-chan struct{}) {
	ticker := time.NewTicker(out.tick())
	defer ticker.Stop()
	for {
		out.progress("%-10s %5d of %d files, %6.1f of %.1f MiB", what, p.files.Load(), len(t.files),
			mib(p.bytes.Load()), mib(t.bytes))
		select {
		case <-done:
			return
		case <-ticker.C:
		}
	}
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// stuckGrace is how long files under way get after an interrupt. Those that wait for a server that
// is gone end with the mount.
const stuckGrace = 3 * time.Second

// each runs f on every file of t, some at a time, and shows progress.
func (t *tree) each(ctx context.Context, out *screen, what string,
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
	case <-ctx.Done(): // by the caller, or by the first error
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(stuckGrace):
		return context.Cause(ctx)
	}
}

type buffers struct{ a, b []byte }

// dirsShown is after how many directories progress is shown.
const dirsShown = 200

// copyTo makes the tree anew below dst.
func (t *tree) copyTo(ctx context.Context, out *screen, dst string) error {
	for i, rel := range t.dirs {
		if err := ctx.Err(); err != nil {
			return err
		}
		if i%dirsShown == 0 {
			out.progress("%-10s %5d of %d directories", "copy in", i, len(t.dirs))
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
	defer func() { err = both(err, out.Close()) }()
	// Plain reads and writes: copy_file_range and its like would not show what is to be shown.
	return io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, buf)
}

// compareTo reads everything back from dst.
func (t *tree) compareTo(ctx context.Context, out *screen, dst string) error {
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
		if err := both(notEnd(errA), notEnd(errB)); err != nil {
			return at, fmt.Errorf("comparing %s: %w", got, err)
		}
		if !bytes.Equal(buf.a[:n], buf.b[:m]) {
			return at, fmt.Errorf("%s differs from %s within octets %d to %d", got, want, at, at+int64(max(n, m)))
		}
		at += int64(n)
		if errA != nil {
			return at, nil
		}
	}
}

// notEnd is err, but for those that a file's end gives.
func notEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
