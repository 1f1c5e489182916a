package differential

import (
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A listing reads an open directory.
type listing struct {
	fd  int
	buf []byte
	at  []byte // unread part of buf
}

// direntHeader is the size in bytes of the fields before the name in struct linux_dirent64
// (getdents64(2)).
const direntHeader = 19

// next returns the next entry that is not hidden, and the offset of the entry after it. At the end
// the name is empty.
func (l *listing) next() (name string, offset int64, err error) {
	for {
		if len(l.at) == 0 {
			n, err := unix.Getdents(l.fd, l.buf)
			if err != nil || n == 0 {
				return "", 0, err
			}
			l.at = l.buf[:n]
		}
		offset = *(*int64)(unsafe.Pointer(&l.at[8]))
		length := int(*(*uint16)(unsafe.Pointer(&l.at[16])))
		name, _, _ = strings.Cut(string(l.at[direntHeader:length]), "\x00")
		l.at = l.at[length:]
		if !strings.HasPrefix(name, hidden) {
			return name, offset, nil
		}
	}
}

// rest returns the names from the current position to the end.
func (l *listing) rest() (names []string, err error) {
	for {
		name, _, err := l.next()
		if err != nil || name == "" {
			return names, err
		}
		names = append(names, name)
	}
}

// seek sets the position to the offset of an entry.
func (l *listing) seek(offset int64) error {
	l.at = nil
	_, err := unix.Seek(l.fd, offset, io.SeekStart)
	return err
}

// list opens a directory and reads it with a buffer of this size in bytes.
func list(p string, size int) (*listing, error) {
	fd, err := unix.Open(p, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	return &listing{fd: fd, buf: make([]byte, size)}, err
}

func (l *listing) close() { unix.Close(l.fd) }

func namesField(names []string) Field {
	names = slices.Clone(names)
	slices.Sort(names)
	for i, n := range names {
		names[i] = shown(n)
	}
	return Field{"names", strings.Join(names, " ")}
}

// hidden is the prefix of the names that both clients give to open files that are removed.
const hidden = ".nfs"

func shown(name string) string {
	if len(name) > 200 {
		return fmt.Sprintf("~%d", len(name))
	}
	return url.PathEscape(name)
}

func shownPath(path string) string {
	parts := strings.Split(path, "/")
	for i, p := range parts {
		parts[i] = shown(p)
	}
	return strings.Join(parts, "/")
}

// doReaddir reads a directory once. It ignores hidden files.
func doReaddir(p string, _ *Op) ([]Field, error) {
	l, err := list(p, 1<<15)
	if err != nil {
		return nil, err
	}
	defer l.close()
	names, err := l.rest()
	return []Field{namesField(names)}, err
}

// fillPrefix is the prefix of the names that doFill creates. They are long, so that a directory of
// them needs several requests.
var fillPrefix = strings.Repeat("f", 200)

func doFill(p string, o *Op) ([]Field, error) {
	for i := range o.n {
		fd, err := unix.Open(fmt.Sprintf("%s/%s%d", p, fillPrefix, i), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return nil, err
		}
		if err := unix.Close(fd); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// doSweep reads the directory and removes each file of doFill when it finds the entry.
func doSweep(p string, _ *Op) ([]Field, error) {
	l, err := list(p, 1<<11)
	if err != nil {
		return nil, err
	}
	defer l.close()
	var others []string
	removed := 0
	for {
		name, _, err := l.next()
		if err != nil {
			return nil, err
		}
		if name == "" {
			break
		}
		if !strings.HasPrefix(name, fillPrefix) {
			others = append(others, name)
		} else if err := unix.Unlink(p + "/" + name); err != nil {
			return nil, err
		} else {
			removed++
		}
	}
	return []Field{namesField(others), {"removed", fmt.Sprint(removed)}}, nil
}

// doSeekdir reads a directory, seeks to its o.off-th entry, and then to the start.
func doSeekdir(p string, o *Op) ([]Field, error) {
	l, err := list(p, 1<<11)
	if err != nil {
		return nil, err
	}
	defer l.close()
	var all []string
	var place int64
	skipped := 0
	for {
		name, offset, err := l.next()
		if err != nil {
			return nil, err
		}
		if name == "" {
			break
		}
		if all = append(all, name); len(all) <= o.off {
			place, skipped = offset, len(all)
		}
	}
	if err := l.seek(place); err != nil {
		return nil, err
	}
	again, err := l.rest()
	if err != nil {
		return nil, err
	}
	if err := l.seek(0); err != nil {
		return nil, err
	}
	anew, err := l.rest()
	return []Field{namesField(all), {"again", fmt.Sprint(slices.Equal(again, all[skipped:]))},
		{"anew", fmt.Sprint(slices.Equal(anew, all))}}, err
}

// doWalk returns the attributes of the whole tree and the checksums of all files.
func doWalk(root string) ([]Field, error) {
	var out []Field
	var visit func(dir string) error
	visit = func(dir string) error {
		entries, err := os.ReadDir(root + "/" + dir)
		if err != nil {
			return err
		}
		left := 0
		for _, e := range entries {
			name := dir + e.Name()
			if strings.HasPrefix(e.Name(), hidden) {
				left++
				continue
			}
			var st unix.Stat_t
			if err := unix.Lstat(root+"/"+name, &st); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			f := Field{shownPath(name), fmt.Sprintf("%o %d %d:%d %s", st.Mode, st.Nlink, st.Uid, st.Gid, sizeOf(&st))}
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFREG:
				content, err := digestFile(root+"/"+name, st.Size)
				if err != nil {
					return err
				}
				f.Value += " " + content
			case unix.S_IFLNK:
				target, err := os.Readlink(root + "/" + name)
				if err != nil {
					return err
				}
				f.Value += " " + shownPath(target)
			case unix.S_IFDIR:
				if err := visit(name + "/"); err != nil {
					return err
				}
			}
			out = append(out, f)
		}
		out = append(out, Field{dir + hidden, fmt.Sprint(left)})
		return nil
	}
	err := visit("")
	return out, err
}

// digestFile reads these parts of a file, because some files have large holes.
const digestHead, digestTail = 3 << 20, 64 << 10

func digestFile(name string, size int64) (string, error) {
	file, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer file.Close()
	b := make([]byte, min(size, digestHead))
	if _, err := io.ReadFull(file, b); err != nil {
		return "", err
	}
	out := digest(b)
	if size > digestHead {
		b = b[:min(size-digestHead, digestTail)]
		if _, err := file.ReadAt(b, size-int64(len(b))); err != nil {
			return "", err
		}
		out += " " + digest(b)
	}
	return out, nil
}
