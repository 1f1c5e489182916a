package fusefs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// mmapStep and mmapFile, in the environment, make TestMmapInChild take one of mmapSteps with a
// file. It is a process of its own, because one that waits for a page of its own mount keeps its
// runtime from serving it.
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
		copy(p, noise(1, mmapSize))
		must(t, unix.Msync(p, unix.MS_SYNC))
		must(t, unix.Munmap(p))
		must(t, f.Close())
	},
	"close before": func(t *testing.T, path string) {
		f, p := mapFile(t, path)
		must(t, f.Close())
		copy(p, noise(1, mmapSize))
		must(t, unix.Munmap(p))
	},
	"exit": func(t *testing.T, path string) { // the kernel ends the mapping
		_, p := mapFile(t, path)
		copy(p, noise(1, mmapSize))
		unix.Exit(0)
	},
	"cut": func(t *testing.T, path string) {
		f, p := mapFile(t, path)
		copy(p, noise(1, mmapSize))
		must(t, f.Truncate(mmapCut))
		must(t, f.Truncate(mmapSize)) // what was cut reads as zeros
		if len(bytes.Trim(p[mmapCut:], "\x00")) != 0 {
			t.Error("the mapping shows what was cut")
		}
		must(t, unix.Munmap(p))
		must(t, f.Close())
	},
	"read": func(t *testing.T, path string) {
		f, p := mapFile(t, path)
		if !bytes.Equal(p, noise(1, mmapSize)) {
			t.Error("the mapping does not show the file")
		}
		must(t, unix.Munmap(p))
		must(t, f.Close())
	},
}

func TestMmapInChild(t *testing.T) {
	if step := mmapSteps[os.Getenv(mmapStep)]; step != nil {
		step(t, os.Getenv(mmapFile))
	}
}

// inChild takes a step.
func inChild(t *testing.T, step, path string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestMmapInChild$")
	cmd.Env = append(os.Environ(), mmapStep+"="+step, mmapFile+"="+path)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", step, err, out)
	}
}

// TestMmap writes files through shared mappings, and leaves the writing back to each of those who
// do it; then it reads them through mappings that know nothing of them.
func TestMmap(t *testing.T) {
	e := startExport(t)
	m, cold := e.mount(t, mountConfig{}), e.mount(t, mountConfig{})
	for _, step := range []string{"sync", "close before", "exit", "cut"} {
		t.Run(step, func(t *testing.T) {
			want := noise(1, mmapSize)
			if step == "cut" {
				clear(want[mmapCut:])
			}
			inChild(t, step, m.path(step))
			for range 100 { // nobody waits for the release
				if got, err := os.ReadFile(filepath.Join(e.dir, step)); err == nil && bytes.Equal(got, want) {
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
			wantContent(t, filepath.Join(e.dir, step), want)
			if step != "cut" {
				inChild(t, "read", cold.path(step))
			}
			dropCaches(t, m.path(step))
			wantContent(t, m.path(step), want)
		})
	}
}
