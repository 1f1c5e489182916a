package integration

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// powerChildEnv makes the test binary write files until its input ends. The test itself must not
// have open files on the mount: the processes that it starts would close copies of them, and
// closing needs the server. The value is "SEED DIRECTORY", and descriptor 3 is a powerState.
const powerChildEnv = "NFSRDMAD_POWER_CHILD"

const (
	powerFiles  = 6
	powerBlocks = 192  // of each file
	powerBlock  = 1024 // bytes
)

// A powerState is memory that the test shares with the process that writes. A version counts the
// writes of a block.
type powerState struct {
	steps atomic.Uint32 // completed calls
	files [powerFiles]struct {
		// latest has the newest version of each block, which the program has started to write.
		// confirmed has the version that fsync or close has confirmed.
		latest, confirmed [powerBlocks]atomic.Uint32
	}
	// replaced is a file that renames replace. Its blocks have one version.
	replacedLatest, replacedConfirmed atomic.Uint32
}

func mapPowerState(f *os.File) (*powerState, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, int(unsafe.Sizeof(powerState{})), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*powerState)(unsafe.Pointer(unsafe.SliceData(b))), nil
}

func init() {
	spec := os.Getenv(powerChildEnv)
	if spec == "" {
		return
	}
	if err := powerChild(spec); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// powerChild writes files until its input ends, and then makes everything stable.
func powerChild(spec string) error {
	var seed uint64
	var dir string
	if _, err := fmt.Sscan(spec, &seed, &dir); err != nil {
		return err
	}
	state, err := mapPowerState(os.NewFile(3, "state"))
	if err != nil {
		return err
	}
	var stop atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	errs := make([]error, powerFiles+1)
	var wg sync.WaitGroup
	for i := range powerFiles {
		w := &powerWriter{path: filepath.Join(dir, "f"+strconv.Itoa(i)), file: uint32(i), state: state,
			rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		wg.Go(func() { errs[i] = w.run(&stop) })
	}
	wg.Go(func() { errs[powerFiles] = powerReplace(dir, state, &stop) })
	wg.Wait()
	return errors.Join(errs...)
}

// fillPowerBlock fills a block with what its position and its version determine.
func fillPowerBlock(b []byte, file, block, version uint32) {
	for at := 0; at < len(b); at += 16 {
		binary.LittleEndian.PutUint32(b[at:], file)
		binary.LittleEndian.PutUint32(b[at+4:], block)
		binary.LittleEndian.PutUint32(b[at+8:], version)
		binary.LittleEndian.PutUint32(b[at+12:], ^version)
	}
}

// powerVersion returns the version of a block. A block of zeros has version 0.
func powerVersion(b []byte, file, block uint32) (version uint32, err error) {
	want := make([]byte, len(b))
	if bytes.Equal(b, want) {
		return 0, nil
	}
	version = binary.LittleEndian.Uint32(b[8:])
	fillPowerBlock(want, file, block, version)
	if !bytes.Equal(b, want) {
		return 0, fmt.Errorf("block %d of file %d is damaged: %x...", block, file, b[:16])
	}
	return version, nil
}

// A powerWriter writes one file.
type powerWriter struct {
	path  string
	file  uint32
	state *powerState
	rng   *rand.Rand
	f     *os.File
}

func (w *powerWriter) open() (err error) {
	flags := []int{0, 0, 0, syscall.O_DIRECT, syscall.O_SYNC}
	w.f, err = os.OpenFile(w.path, os.O_RDWR|os.O_CREATE|flags[w.rng.IntN(len(flags))], 0o644)
	return err
}

func (w *powerWriter) run(stop *atomic.Bool) error {
	if err := w.open(); err != nil {
		return err
	}
	for !stop.Load() {
		if err := w.step(); err != nil {
			return errors.Join(err, w.f.Close())
		}
		w.state.steps.Add(1)
	}
	return errors.Join(w.confirm(w.f.Sync), w.f.Close())
}

func (w *powerWriter) step() error {
	switch at := w.rng.IntN(100); {
	case at < 8:
		return w.confirm(w.f.Sync)
	case at < 12:
		if err := w.confirm(w.f.Close); err != nil {
			return err
		}
		return w.open()
	case at < 30:
		return w.verify()
	}
	return w.write()
}

// confirm calls fsync or close, which confirm what was written before.
func (w *powerWriter) confirm(call func() error) error {
	s := &w.state.files[w.file]
	var versions [powerBlocks]uint32
	for i := range versions {
		versions[i] = s.latest[i].Load()
	}
	if err := call(); err != nil {
		return err
	}
	for i, v := range versions {
		s.confirmed[i].Store(v)
	}
	return nil
}

func (w *powerWriter) write() error {
	s := &w.state.files[w.file]
	from := w.rng.IntN(powerBlocks)
	n := 1 + w.rng.IntN(min(powerBlocks-from, []int{1, 4, 64}[w.rng.IntN(3)]))
	b := make([]byte, n*powerBlock)
	for i := range n {
		fillPowerBlock(b[i*powerBlock:][:powerBlock], w.file, uint32(from+i), s.latest[from+i].Add(1))
	}
	_, err := w.f.WriteAt(b, int64(from)*powerBlock)
	return err
}

// verify reads a part of the file, which must have the newest versions.
func (w *powerWriter) verify() error {
	s := &w.state.files[w.file]
	from := w.rng.IntN(powerBlocks)
	b := make([]byte, (1+w.rng.IntN(powerBlocks-from))*powerBlock)
	n, err := w.f.ReadAt(b, int64(from)*powerBlock)
	if err != nil && err != io.EOF {
		return err
	}
	clear(b[n:])
	for i := range len(b) / powerBlock {
		want := s.latest[from+i].Load()
		got, err := powerVersion(b[i*powerBlock:][:powerBlock], w.file, uint32(from+i))
		if err != nil || got != want {
			return fmt.Errorf("WRONG DATA: read of %s, block %d: got version %d, %v, want %d", w.path, from+i, got, err,
				want)
		}
	}
	return nil
}

// powerReplaced is the number of the file that renames replace.
const powerReplaced = powerFiles

// powerReplace writes a file under another name, makes it stable, and renames it.
func powerReplace(dir string, state *powerState, stop *atomic.Bool) error {
	b := make([]byte, 20*powerBlock)
	for !stop.Load() {
		version := state.replacedLatest.Load() + 1
		for i := range len(b) / powerBlock {
			fillPowerBlock(b[i*powerBlock:][:powerBlock], powerReplaced, uint32(i), version)
		}
		tmp := filepath.Join(dir, "r.tmp")
		f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
		if err != nil {
			return err
		}
		if _, err = f.Write(b); err == nil && version%2 == 0 {
			err = f.Sync()
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		state.replacedLatest.Store(version)
		if err := os.Rename(tmp, filepath.Join(dir, "r")); errors.Is(err, os.ErrNotExist) {
			// A server that is killed between the rename and its reply executes the rename again.
			if _, err := os.Stat(dir); err != nil { // the mount has ended
				return err
			}
		} else if err != nil {
			return err
		}
		state.replacedConfirmed.Store(version)
		state.steps.Add(1)
	}
	return nil
}
