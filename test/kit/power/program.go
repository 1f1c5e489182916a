package power

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
	"unsafe"
)

// waitTimeout bounds the progress and the end of the writer. A restart of the server takes a small
// part of it on a busy machine.
const waitTimeout = 10 * time.Minute

// WrongData is in the error of Finish if the writer has read data that it has not written.
const WrongData = "WRONG DATA"

// Config says what a Program writes.
type Config struct {
	Dir  string // directory on the mount
	Seed uint64
	// LosesNames says that the server replies to RENAME and CREATE before the directory is on
	// stable storage. A power failure may then undo the last rename, and may remove a file that the
	// writer has not made stable. The writer then gets ESTALE and writes the file again.
	LosesNames bool
}

// A Program is the process that writes. Its methods must not be called concurrently.
type Program struct {
	config Config
	rec    *record
	cmd    *exec.Cmd
	stdin  io.Closer
	out    bytes.Buffer // read after ended
	ended  chan error
	lost   uint32 // renames that were confirmed, and that the last Check did not find
}

// Start starts the writer. The writer is killed when the test ends.
func Start(t *testing.T, c Config) *Program {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	memory, err := os.Create(filepath.Join(t.TempDir(), "record"))
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	if err := memory.Truncate(int64(unsafe.Sizeof(record{}))); err != nil {
		t.Fatal(err)
	}
	p := &Program{config: c, cmd: exec.Command(self), ended: make(chan error, 1)}
	if p.rec, err = mapRecord(memory); err != nil {
		t.Fatal(err)
	}
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %t %s", writerEnv, c.Seed, c.LosesNames, c.Dir))
	p.cmd.ExtraFiles = []*os.File{memory}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	return p
}

// Progress waits until the writer has made n more calls.
func (p *Program) Progress(t *testing.T, n uint32) {
	t.Helper()
	deadline := time.Now().Add(waitTimeout)
	for want := p.rec.steps.Load() + n; p.rec.steps.Load() < want; time.Sleep(time.Millisecond) {
		select {
		case err := <-p.ended:
			p.ended <- err
			t.Fatalf("the process that writes ended: %v\n%s", err, p.out.String())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("no progress for %v", waitTimeout)
		}
	}
}

// Finish lets the writer make everything stable, and returns its error.
func (p *Program) Finish(t *testing.T) error {
	t.Helper()
	p.stdin.Close()
	select {
	case err := <-p.ended:
		p.ended <- err
		if err != nil {
			return fmt.Errorf("%w\n%s", err, p.out.String())
		}
		return nil
	case <-time.After(waitTimeout):
		t.Fatalf("the process that writes did not end within %v", waitTimeout)
		return nil
	}
}

// A Read returns the content of a file on the server's disk. The error for a missing file is
// os.ErrNotExist.
type Read func(name string) ([]byte, error)

// Dir returns a Read for a directory.
func Dir(dir string) Read {
	return func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(dir, name)) }
}

// Check checks after a power failure that the disk has all confirmed data, and no data that was
// never written. The server must not have executed a call since the power failure.
func (p *Program) Check(t *testing.T, read Read) {
	t.Helper()
	p.checkFiles(t, read, false)
	lost := uint32(0)
	if p.config.LosesNames {
		// The new file became stable after the last rename but one. A failure thus loses one
		// rename more than the failure before at most.
		lost = p.lost + 1
	}
	p.checkReplaced(t, read, lost)
}

// CheckAll checks after Finish that the disk has the newest data.
func (p *Program) CheckAll(t *testing.T, read Read) {
	t.Helper()
	p.checkFiles(t, read, true)
	p.checkReplaced(t, read, 0)
}

func (p *Program) checkFiles(t *testing.T, read Read, all bool) {
	t.Helper()
	for file := range files {
		name := fileName(file)
		b, err := read(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if len(b)%blockSize != 0 || len(b) > fileBlocks*blockSize {
			t.Errorf("%s has %d bytes, want a multiple of %d up to %d", name, len(b), blockSize, fileBlocks*blockSize)
			continue
		}
		b = append(b, make([]byte, fileBlocks*blockSize-len(b))...)
		s := &p.rec.files[file]
		for i := range fileBlocks {
			low, high := s.confirmed[i].Load(), s.latest[i].Load()
			if all {
				low = high
			}
			got, err := blockVersion(b[i*blockSize:][:blockSize], uint32(file), uint32(i))
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if got < low || got > high {
				t.Errorf("%s, block %d: got version %d, want %d to %d", name, i, got, low, high)
			}
		}
	}
}

// checkReplaced checks the version of the file that renames replace. Up to lost confirmed renames
// may be missing.
func (p *Program) checkReplaced(t *testing.T, read Read, lost uint32) {
	t.Helper()
	got, err := replacedVersion(read)
	confirmed, high := p.rec.replacedConfirmed.Load(), p.rec.replacedLatest.Load()
	low := confirmed - min(confirmed, lost)
	if err != nil || got < low || got > high {
		t.Errorf("file that renames replace: got version %d, %v, want %d to %d", got, err, low, high)
	}
	if p.lost = confirmed - min(confirmed, got); p.lost > 0 {
		t.Logf("the power failure undid the last renames: got version %d, confirmed was %d", got, confirmed)
	}
}

// replacedVersion returns the version of the file that renames replace. It is 0 without the file.
func replacedVersion(read Read) (version uint32, err error) {
	b, err := read(replacedFile)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if len(b) != replacedBlocks*blockSize {
		return 0, fmt.Errorf("got %d bytes, want %d", len(b), replacedBlocks*blockSize)
	}
	for i := range replacedBlocks {
		v, err := blockVersion(b[i*blockSize:][:blockSize], replacedNumber, uint32(i))
		if err != nil {
			return 0, err
		}
		if i > 0 && v != version {
			return 0, fmt.Errorf("block %d has version %d, block 0 version %d", i, v, version)
		}
		version = v
	}
	return version, nil
}
