package bench

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Sizes of the calls, in bytes.
const (
	small = 4 << 10
	large = 1 << 20
)

// dataFile has the data of the sequential write of 1 MiB blocks, which all reads use. smallFile is
// that of the sequential write of 4 KiB blocks.
const (
	dataFile  = "data"
	smallFile = "small"
)

// pages returns n bytes outside the Go heap, aligned as O_DIRECT requires, until free is called.
func pages(n int) (b []byte, free func(), err error) {
	b, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, fmt.Errorf("allocate %d bytes: %w", n, err)
	}
	return b, func() { _ = unix.Munmap(b) }, nil
}

// write writes a new file in blocks, up to the size of Options, and then calls fsync(2) and
// close(2). Both belong to the measured time.
func (d *Dir) write(m *measurement, name string, block int) error {
	path := d.join(name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	buf, free, err := pages(block)
	if err != nil {
		return err
	}
	defer free()
	rand.NewChaCha8([32]byte{byte(d.seed)}).Read(buf)
	fd, err := open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	err = m.time(func() error {
		err := m.loop(int(d.opts.Size)/block, func(int) error {
			n, err := retry("write", path, func() (int, error) { return unix.Write(fd, buf) })
			if err == nil && n < len(buf) { // the next write would return the cause
				_, err = retry("write", path, func() (int, error) { return unix.Write(fd, buf[n:]) })
			}
			m.sample.Bytes += int64(block)
			return err
		})
		if err == nil {
			_, err = retry("fsync", path, func() (int, error) { return 0, unix.Fsync(fd) })
		}
		closed := unix.Close(fd)
		fd = -1
		if err == nil && closed != nil {
			err = &os.PathError{Op: "close", Path: path, Err: closed}
		}
		return err
	})
	if fd >= 0 {
		_ = unix.Close(fd)
	}
	if name == dataFile {
		d.size = m.sample.Bytes
	}
	return err
}

// needData writes the file that the reads use, if it does not exist.
func (d *Dir) needData(m *measurement) error {
	if d.size > 0 {
		return nil
	}
	unlimited := &measurement{ctx: m.ctx, limit: m.limit}
	return d.write(unlimited, dataFile, large)
}

// read reads the file from its start in blocks.
func (d *Dir) read(m *measurement, block int) error {
	if err := d.needData(m); err != nil {
		return err
	}
	path := d.join(dataFile)
	buf, free, err := pages(block)
	if err != nil {
		return err
	}
	defer free()
	fd, err := open(path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	d.caches.dropData(fd)
	return m.time(func() error {
		return m.loop(int(d.size)/block, func(int) error {
			n, err := retry("read", path, func() (int, error) { return unix.Read(fd, buf) })
			if err == nil && n == 0 {
				err = fmt.Errorf("read %s: %w", path, io.ErrUnexpectedEOF)
			}
			m.sample.Bytes += int64(n)
			return err
		})
	})
}

// randomRead reads 4 KiB at random offsets until the time is over, with several callers.
func (d *Dir) randomRead(m *measurement, callers int) error {
	if err := d.needData(m); err != nil {
		return err
	}
	path := d.join(dataFile)
	fd, err := open(path, unix.O_RDONLY|unix.O_DIRECT)
	if errors.Is(err, unix.EINVAL) {
		d.direct = false
		fd, err = open(path, unix.O_RDONLY)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if !d.direct {
		_ = unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM)
	}
	buf, free, err := pages(callers * small)
	if err != nil {
		return err
	}
	defer free()
	d.caches.dropData(fd)
	// One caller stays on the thread of Run.
	run := parallel
	if callers == 1 {
		run = func(_ int, f func(int) (int, error)) (int, error) { return f(0) }
	}
	err = m.time(func() (err error) {
		m.sample.Calls, err = run(callers, func(caller int) (calls int, err error) {
			own := buf[caller*small:][:small]
			r := rand.New(rand.NewPCG(d.seed, uint64(caller)))
			for {
				if err := m.next(); err != nil && (err != errDone || calls > 0) {
					return calls, finished(err)
				}
				off := r.Int64N(d.size/small) * small
				n, err := retry("read", path, func() (int, error) { return unix.Pread(fd, own, off) })
				if err == nil && n != small {
					err = fmt.Errorf("read %s: got %d bytes at %d, want %d", path, n, off, small)
				}
				if err != nil {
					return calls, err
				}
				calls++
			}
		})
		return err
	})
	m.sample.Bytes = int64(m.sample.Calls) * small
	runtime.KeepAlive(buf)
	return err
}
