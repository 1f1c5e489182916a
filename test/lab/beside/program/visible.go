package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// visible changes files of one directory through either client, and looks at them through either:
// who opens a file after another client has closed it sees what that one wrote (nfs(5),
// "Close-to-open cache consistency"). What the files hold is known all the time.
func visible(args []string) error {
	f := flag.NewFlagSet("visible", flag.ExitOnError)
	kernel := f.String("kernel", "", "directory on the mount of the kernel's client")
	ours := f.String("ours", "", "the same directory on our mount")
	seed := f.Uint64("seed", 1, "of the changes")
	rounds := f.Int("rounds", 300, "number of changes")
	f.Parse(args)
	sides := []string{*kernel, *ours}
	names := []string{"a", "b", "c"}
	g := newGenerator(*seed)
	want := make(map[string][]byte)
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(sides[0], name), nil, 0o644); err != nil {
			return err
		}
	}
	var log []string
	for range *rounds {
		name, by := pick(g, names), g.r.IntN(len(sides))
		text, content, err := change(g, filepath.Join(sides[by], name), want[name])
		if err != nil {
			return fmt.Errorf("%s: %s: %w", sides[by], text, err)
		}
		want[name] = content
		log = append(log, fmt.Sprintf("%s %s: %s", sides[by], name, text))
		nextTick() // two changes in one tick of the server's clock look like one
		for at := range sides {
			if at == by && g.chance(70) {
				continue
			}
			got, size, err := lookAt(filepath.Join(sides[at], name))
			if err == nil && bytes.Equal(got, content) && size == int64(len(content)) {
				continue
			}
			for _, line := range log[max(0, len(log)-20):] {
				fmt.Println(line)
			}
			return fmt.Errorf("%s sees %s of %s, %d octets by its attributes, want %s: %v", sides[at], digest(got),
				name, size, digest(content), err)
		}
	}
	fmt.Printf("%d changes were seen by both clients\n", *rounds)
	return nil
}

// change opens a file, changes what it holds, was until then, and closes it. It returns what it did
// and what the file holds then.
func change(g *generator, path string, was []byte) (text string, content []byte, err error) {
	o := op{off: min(pick(g, sizes), 100_000), n: 1 + min(pick(g, sizes), 100_000), seed: 1 + g.r.IntN(250)}
	flags, do := unix.O_RDWR, pick(g, []string{"pwrite", "pwrite", "append", "replace", "truncate", "same size"})
	switch do {
	case "append":
		flags |= unix.O_APPEND
		o.off = len(was)
	case "replace":
		flags |= unix.O_TRUNC
		o.off, was = 0, nil
	case "same size":
		o.off, o.n = 0, max(1, len(was))
	}
	text = fmt.Sprintf("%s off=%d n=%d seed=%d", do, o.off, o.n, o.seed)
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return text, nil, err
	}
	size := len(was)
	if do == "truncate" {
		size = o.n
		err = unix.Ftruncate(fd, int64(o.n))
	} else {
		size = max(size, o.off+o.n)
		_, err = unix.Pwrite(fd, payload(&o), int64(o.off))
	}
	content = make([]byte, size)
	copy(content, was)
	if do != "truncate" {
		copy(content[o.off:], payload(&o))
	}
	if e := unix.Close(fd); err == nil {
		err = e
	}
	return text, content, err
}

// lookAt opens a file and reads it.
func lookAt(path string) (content []byte, size int64, err error) {
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
