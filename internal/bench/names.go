package bench

import (
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// namesDir has the files of create.
const namesDir = "names"

// paths returns n paths in the directory of create.
func (d *Dir) paths(prefix string, n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = filepath.Join(d.path, namesDir, prefix+strconv.Itoa(i))
	}
	return list
}

// create makes files of 4 KiB in a new directory. It measures create, write and close of each.
func (d *Dir) create(m *measurement) error {
	if err := os.RemoveAll(d.join(namesDir)); err != nil {
		return err
	}
	if err := os.Mkdir(d.join(namesDir), 0o755); err != nil {
		return err
	}
	d.names = nil
	buf, free, err := pages(small)
	if err != nil {
		return err
	}
	defer free()
	paths := d.paths("file", d.opts.Files)
	err = m.time(func() error {
		return m.loop(len(paths), func(i int) error {
			fd, err := open(paths[i], unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
			if err != nil {
				return err
			}
			_, err = retry("write", paths[i], func() (int, error) { return unix.Write(fd, buf) })
			if closed := unix.Close(fd); err == nil && closed != nil {
				err = &os.PathError{Op: "close", Path: paths[i], Err: closed}
			}
			return err
		})
	})
	d.names, m.sample.Bytes = paths[:m.sample.Calls], int64(m.sample.Calls)*small
	return err
}

// needNames creates files if there are none.
func (d *Dir) needNames(m *measurement) error {
	if len(d.names) > 0 {
		return nil
	}
	return d.create(&measurement{ctx: m.ctx, limit: m.limit})
}

// each measures a call for the path of each file.
func (d *Dir) each(m *measurement, op string, call func(i int, path string) error) error {
	return m.time(func() error {
		return m.loop(len(d.names), func(i int) error {
			path := d.names[i]
			_, err := retry(op, path, func() (int, error) { return 0, call(i, path) })
			return err
		})
	})
}

// stat calls lstat(2) for each file, with empty caches.
func (d *Dir) stat(m *measurement) error {
	if err := d.needNames(m); err != nil {
		return err
	}
	d.caches.dropNames()
	var st unix.Stat_t
	return d.each(m, "lstat", func(_ int, path string) error { return unix.Lstat(path, &st) })
}

// rename gives each file another name in the same directory.
func (d *Dir) rename(m *measurement) error {
	if err := d.needNames(m); err != nil {
		return err
	}
	to := d.paths("renamed", len(d.names))
	return d.each(m, "rename", func(i int, path string) error {
		err := unix.Rename(path, to[i])
		if err == nil {
			d.names[i] = to[i]
		}
		return err
	})
}

// unlink removes the files.
func (d *Dir) unlink(m *measurement) error {
	if err := d.needNames(m); err != nil {
		return err
	}
	err := d.each(m, "unlink", func(_ int, path string) error { return unix.Unlink(path) })
	d.names = nil
	return err
}

// listBatch is about the number of names that readdir(3) reads with one system call.
const listBatch = 500

// list reads a directory and calls lstat(2) for each name. With a positive batch it does so after
// each batch of names, as ls -l does, and with -1 after it has read all names, as find does in a
// large directory. Without cold it finds the caches as the last workload has left them. The time
// limit does not apply.
func (d *Dir) list(m *measurement, batch int, cold bool) error {
	if err := d.needNames(m); err != nil {
		return err
	}
	dir := d.join(namesDir)
	if cold {
		d.caches.dropNames()
	}
	return m.time(func() error {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		for {
			names, err := f.Readdirnames(batch)
			if err == io.EOF || err == nil && len(names) == 0 {
				return nil
			}
			if err == nil {
				err = m.lstatAll(f, names)
			}
			if err != nil || batch < 0 {
				return err
			}
		}
	})
}

// lstatAll calls lstat(2) for names in a directory.
func (m *measurement) lstatAll(dir *os.File, names []string) error {
	var st unix.Stat_t
	for _, name := range names {
		if err := m.ctx.Err(); err != nil {
			return err
		}
		_, err := retry("lstat", filepath.Join(dir.Name(), name), func() (int, error) {
			return 0, unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		})
		if err != nil {
			return err
		}
		m.sample.Calls++
	}
	return nil
}
