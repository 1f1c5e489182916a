package vfs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The environment variables mmapStep and mmapFile make TestMmapChildProcess run one of mmapSteps on
// a file. The steps need a separate process: a page fault on the test's own mount would block the
// Go runtime that serves the mount.
const (
	mmapStep = "NFSRDMAD_MMAP_STEP"
	mmapFile = "NFSRDMAD_MMAP_FILE"
	mmapSize = 300_000
	mmapCut  = 123_457
)

func mapFile(t *testing.T, path string) (*os.File, []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	must(t, err)
	must(t, f.Truncate(mmapSize))
	p, err := unix.Mmap(int(f.Fd()), 0, mmapSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	return f, p
}

var mmapSteps = map[string]func(t *testing.T, path string){
	"sync": func(t *testing.T, path string) {
		f, p := mapFile(t, path)
		copy(p, randomBytes(1, mmapSize))
		must(t, unix.Msync(p, unix.MS_SYNC))
		must(t, unix.Munmap(p))
		must(t, f.Close())
	},
	"exit": func(t *testing.T, path string) { // the kernel unmaps the file
		_, p := mapFile(t, path)
		copy(p, randomBytes(1, mmapSize))
		unix.Exit(0)
	},
	"cut": func(t *testing.T, path string) {
		f, p := mapFile(t, path)
		copy(p, randomBytes(1, mmapSize))
		must(t, f.Truncate(mmapCut))
		must(t, f.Truncate(mmapSize)) // the truncated range reads as zeros
		if len(bytes.Trim(p[mmapCut:], "\x00")) != 0 {
			t.Error("the mapping shows truncated data, want zeros")
		}
		must(t, unix.Munmap(p))
		must(t, f.Close())
	},
	"cut by another client": mmapStepCut,
	"read": func(t *testing.T, path string) {
		f, p := mapFile(t, path)
		if !bytes.Equal(p, randomBytes(1, mmapSize)) {
			t.Error("the mapping differs from the file")
		}
		must(t, unix.Munmap(p))
		must(t, f.Close())
	},
}

// mmapStepCut maps a file, creates path.ready, and waits until another client has cut the file.
func mmapStepCut(t *testing.T, path string) {
	f, p := mapFile(t, path)
	copy(p, randomBytes(1, mmapSize))
	must(t, unix.Msync(p, unix.MS_SYNC))
	must(t, os.WriteFile(path+".ready", nil, 0o644))
	if !eventually(func() bool {
		st, err := f.Stat()
		return err == nil && st.Size() == mmapCut
	}) {
		t.Fatal("the new size does not arrive")
	}
	if !bytes.Equal(p[:mmapCut], randomBytes(1, mmapSize)[:mmapCut]) {
		t.Error("the mapping differs before the cut")
	}
	page := os.Getpagesize()
	end := (mmapCut + page - 1) / page * page
	if len(bytes.Trim(p[mmapCut:end], "\x00")) != 0 {
		t.Error("the last page shows truncated data, want zeros")
	}
	func() {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() {
			if recover() == nil {
				t.Error("read beyond the cut: got data, want SIGBUS")
			}
		}()
		_ = bytes.Clone(p[end : end+1])
	}()
	must(t, unix.Munmap(p))
	must(t, f.Close())
}

func TestMmapChildProcess(t *testing.T) {
	if step := mmapSteps[os.Getenv(mmapStep)]; step != nil {
		step(t, os.Getenv(mmapFile))
	}
}

// runMmapStep runs a step in a child process.
func runMmapStep(t *testing.T, step, path string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestMmapChildProcess$")
	cmd.Env = append(os.Environ(), mmapStep+"="+step, mmapFile+"="+path,
		"GORACE=atexit_sleep_ms=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", step, err, out)
	}
}

// TestMmapWriteBack writes files through shared mappings, with write-back by msync, munmap, exit
// and truncate. TestMmapWriteBack then reads them through mappings of a second mount.
func TestMmapWriteBack(t *testing.T) {
	e := startExport(t)
	m, cold := e.mount(t, mountConfig{}), e.mount(t, mountConfig{})
	for _, step := range []string{"sync", "exit", "cut"} {
		t.Run(step, func(t *testing.T) {
			want := randomBytes(1, mmapSize)
			if step == "cut" {
				clear(want[mmapCut:])
			}
			runMmapStep(t, step, m.path(step))
			eventually(func() bool { // the kernel does not wait for the release
				got, err := os.ReadFile(filepath.Join(e.dir, step))
				return err == nil && bytes.Equal(got, want)
			})
			wantContent(t, filepath.Join(e.dir, step), want)
			if step != "cut" {
				runMmapStep(t, "read", cold.path(step))
			}
			dropCaches(t, m.path(step))
			wantContent(t, m.path(step), want)
		})
	}
}

// TestMmapAfterTruncateByOtherClient truncates a file on a second mount while the first one has it
// mapped.
func TestMmapAfterTruncateByOtherClient(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	opts := Options{AcRegMin: shortAge, AcRegMax: shortAge, AcDirMax: time.Second}
	a, b := e.mount(t, mountConfig{opts: opts}), e.mount(t, mountConfig{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if !eventually(func() bool {
			_, err := os.Stat(filepath.Join(e.dir, "f.ready"))
			return err == nil
		}) {
			t.Error("the child process is not ready")
		}
		if err := os.Truncate(b.path("f"), mmapCut); err != nil {
			t.Error(err)
		}
	}()
	runMmapStep(t, "cut by another client", a.path("f"))
	<-done
}
