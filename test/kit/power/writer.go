package power

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

// writerEnv makes the test binary write files until its input ends. The value is "SEED NAMES
// DIRECTORY", where NAMES is true if the server may lose names. Descriptor 3 is a record.
const writerEnv = "NFSRDMAD_POWER_CHILD"

const (
	files      = 6
	fileBlocks = 192
	blockSize  = 1024 // bytes

	replacedFile   = "r" // the file that renames replace
	replacedNumber = files
	replacedBlocks = 20
)

// A record is memory that the test shares with the writer. A version counts the writes of a block.
type record struct {
	steps atomic.Uint32 // completed calls
	files [files]struct {
		// latest has the newest version of each block, which the writer has started to write.
		// confirmed has the version that fsync or close has confirmed.
		latest, confirmed [fileBlocks]atomic.Uint32
	}
	// All blocks of replacedFile have one version. replacedLatest is the version that the writer
	// has started to rename, and replacedConfirmed the version that rename has confirmed.
	replacedLatest, replacedConfirmed atomic.Uint32
}

// fileName returns the name of a file that is written in place.
func fileName(file int) string { return "f" + strconv.Itoa(file) }

func mapRecord(f *os.File) (*record, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, int(unsafe.Sizeof(record{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*record)(unsafe.Pointer(unsafe.SliceData(b))), nil
}

func init() {
	spec := os.Getenv(writerEnv)
	if spec == "" {
		return
	}
	if err := writeFiles(spec); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// writeFiles writes files until its input ends, and then makes everything stable.
func writeFiles(spec string) error {
	var seed uint64
	var losesNames bool
	var dir string
	if _, err := fmt.Sscan(spec, &seed, &losesNames, &dir); err != nil {
		return err
	}
	rec, err := mapRecord(os.NewFile(3, "record"))
	if err != nil {
		return err
	}
	var stop atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	errs := make([]error, files+1)
	var wg sync.WaitGroup
	for i := range files {
		w := &fileWriter{path: filepath.Join(dir, fileName(i)), file: uint32(i), rec: rec,
			rng: rand.New(rand.NewPCG(seed, uint64(i)))}
		wg.Go(func() { errs[i] = w.run(&stop) })
	}
	r := replacer{dir: dir, rec: rec, losesNames: losesNames}
	wg.Go(func() { errs[files] = r.run(&stop) })
	wg.Wait()
	return errors.Join(errs...)
}

// fillBlock fills a block with what its position and its version determine.
func fillBlock(b []byte, file, block, version uint32) {
	for at := 0; at < len(b); at += 16 {
		binary.LittleEndian.PutUint32(b[at:], file)
		binary.LittleEndian.PutUint32(b[at+4:], block)
		binary.LittleEndian.PutUint32(b[at+8:], version)
		binary.LittleEndian.PutUint32(b[at+12:], ^version)
	}
}

// blockVersion returns the version of a block. A block of zeros has version 0.
func blockVersion(b []byte, file, block uint32) (version uint32, err error) {
	want := make([]byte, len(b))
	if bytes.Equal(b, want) {
		return 0, nil
	}
	version = binary.LittleEndian.Uint32(b[8:])
	fillBlock(want, file, block, version)
	if !bytes.Equal(b, want) {
		return 0, fmt.Errorf("block %d of file %d is damaged: it begins with %x", block, file, b[:16])
	}
	return version, nil
}

// A fileWriter writes one file.
type fileWriter struct {
	path string
	file uint32
	rec  *record
	rng  *rand.Rand
	f    *os.File
}

func (w *fileWriter) open() (err error) {
	flags := []int{0, 0, 0, syscall.O_DIRECT, syscall.O_SYNC}
	w.f, err = os.OpenFile(w.path, os.O_RDWR|os.O_CREATE|flags[w.rng.IntN(len(flags))], 0o644)
	return err
}

func (w *fileWriter) run(stop *atomic.Bool) error {
	if err := w.open(); err != nil {
		return err
	}
	for !stop.Load() {
		if err := w.step(); err != nil {
			return errors.Join(err, w.f.Close())
		}
		w.rec.steps.Add(1)
	}
	return errors.Join(w.confirm(w.f.Sync), w.f.Close())
}

func (w *fileWriter) step() error {
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
func (w *fileWriter) confirm(call func() error) error {
	s := &w.rec.files[w.file]
	var versions [fileBlocks]uint32
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

func (w *fileWriter) write() error {
	s := &w.rec.files[w.file]
	from := w.rng.IntN(fileBlocks)
	n := 1 + w.rng.IntN(min(fileBlocks-from, []int{1, 4, 64}[w.rng.IntN(3)]))
	b := make([]byte, n*blockSize)
	for i := range n {
		fillBlock(b[i*blockSize:][:blockSize], w.file, uint32(from+i), s.latest[from+i].Add(1))
	}
	_, err := w.f.WriteAt(b, int64(from)*blockSize)
	return err
}

// verify reads a part of the file, which must have the newest versions.
func (w *fileWriter) verify() error {
	s := &w.rec.files[w.file]
	from := w.rng.IntN(fileBlocks)
	b := make([]byte, (1+w.rng.IntN(fileBlocks-from))*blockSize)
	n, err := w.f.ReadAt(b, int64(from)*blockSize)
	if err != nil && err != io.EOF {
		return err
	}
	clear(b[n:])
	for i := range len(b) / blockSize {
		want := s.latest[from+i].Load()
		got, err := blockVersion(b[i*blockSize:][:blockSize], w.file, uint32(from+i))
		if err != nil || got != want {
			return fmt.Errorf(WrongData+": read of %s, block %d: got version %d, %v, want %d", w.path, from+i, got, err,
				want)
		}
	}
	return nil
}

// A replacer writes a file under another name, makes it stable, and renames it.
type replacer struct {
	dir        string
	rec        *record
	losesNames bool // the server may lose a new file
}

func (r *replacer) run(stop *atomic.Bool) error {
	for !stop.Load() {
		err := r.replace()
		if r.losesNames && errors.Is(err, syscall.ESTALE) {
			continue // the server has lost the new file, and the program has seen the error
		}
		if err != nil {
			return err
		}
		r.rec.steps.Add(1)
	}
	return nil
}

// replace replaces the file by its next version.
func (r *replacer) replace() error {
	version := r.rec.replacedLatest.Load() + 1
	tmp := filepath.Join(r.dir, replacedFile+".tmp")
	if err := writeReplacement(tmp, version); err != nil {
		return err
	}
	r.rec.replacedLatest.Store(version)
	err := os.Rename(tmp, filepath.Join(r.dir, replacedFile))
	if errors.Is(err, os.ErrNotExist) {
		// A server that is killed between the rename and its reply executes the rename again.
		_, err = os.Stat(r.dir) // fails if the mount has ended
	}
	if err == nil {
		r.rec.replacedConfirmed.Store(version)
	}
	return err
}

// writeReplacement writes a version of the file and makes it stable.
func writeReplacement(path string, version uint32) error {
	b := make([]byte, replacedBlocks*blockSize)
	for i := range replacedBlocks {
		fillBlock(b[i*blockSize:][:blockSize], replacedNumber, uint32(i), version)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.Write(b); err == nil && version%2 == 0 {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
