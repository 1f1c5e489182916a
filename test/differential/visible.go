package differential

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Visible changes files of one directory through its mounts, and reads them through each. A client
// that opens a file after another one has closed it sees the other's writes (nfs(5), "Close-to-open
// cache consistency"). The function keeps a copy of all contents.
func Visible(sides []string, seed uint64, rounds int) error {
	names := []string{"a", "b", "c"}
	g := newGenerator(seed)
	want := make(map[string][]byte)
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(sides[0], name), nil, 0o644); err != nil {
			return err
		}
	}
	var log []string
	for range rounds {
		name, by := pick(g, names), g.r.IntN(len(sides))
		text, content, err := change(g, filepath.Join(sides[by], name), want[name])
		if err != nil {
			return fmt.Errorf("%s: %s: %w", sides[by], text, err)
		}
		want[name] = content
		log = append(log, fmt.Sprintf("%s %s: %s", sides[by], name, text))
		NextTick() // within one tick of the server's clock two changes get the same time
		for at := range sides {
			if at == by && g.chance(70) {
				continue
			}
			got, size, err := readBack(filepath.Join(sides[at], name))
			if err != nil {
				err = fmt.Errorf("read on %s: %w", sides[at], err)
			} else if !bytes.Equal(got, content) || size != int64(len(content)) {
				err = fmt.Errorf("read on %s: got %s of %s and size %d, want %s", sides[at], digest(got), name, size,
					digest(content))
			}
			if err != nil {
				for _, line := range log[max(0, len(log)-20):] {
					fmt.Println(line)
				}
				return err
			}
		}
	}
	fmt.Printf("all mounts saw %d changes\n", rounds)
	return nil
}

// change opens a file, changes its content and closes it. before is the old content. It returns a
// description and the new content.
func change(g *generator, path string, before []byte) (text string, content []byte, err error) {
	o := Op{off: min(pick(g, sizes), 100_000), n: 1 + min(pick(g, sizes), 100_000), seed: 1 + g.r.IntN(250)}
	flags, do := unix.O_RDWR, pick(g, []string{"pwrite", "pwrite", "append", "replace", "truncate", "same size"})
	switch do {
	case "append":
		flags |= unix.O_APPEND
		o.off = len(before)
	case "replace":
		flags |= unix.O_TRUNC
		o.off, before = 0, nil
	case "same size":
		o.off, o.n = 0, max(1, len(before))
	}
	text = fmt.Sprintf("%s off=%d n=%d seed=%d", do, o.off, o.n, o.seed)
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return text, nil, err
	}
	size := len(before)
	if do == "truncate" {
		size = o.n
		err = unix.Ftruncate(fd, int64(o.n))
	} else {
		size = max(size, o.off+o.n)
		_, err = unix.Pwrite(fd, payload(&o), int64(o.off))
	}
	content = make([]byte, size)
	copy(content, before)
	if do != "truncate" {
		copy(content[o.off:], payload(&o))
	}
	if e := unix.Close(fd); err == nil {
		err = e
	}
	return text, content, err
}

// readBack opens a file and reads it.
func readBack(path string) (content []byte, size int64, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return nil, 0, err
	}
	content, err = io.ReadAll(file)
	return content, st.Size(), err
}
