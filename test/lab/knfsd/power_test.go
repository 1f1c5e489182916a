package knfsd

import (
	"archive/tar"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit/power"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("power failures", "power failures while a program writes files, calls fsync and renames",
	testPowerFailures)

// powerEnv sets the number of power failures. `make soak` sets it.
const powerEnv = "NFSRDMAD_POWER"

// powerRounds is the number of power failures of a routine run.
const powerRounds = 1

// testPowerFailures cuts the power of a server while a program writes. After each boot and before
// the client reconnects, the disk must have what fsync, close or rename has confirmed. At the end
// it must have everything. The program must see no error.
func testPowerFailures(t *testing.T, b bench) {
	rounds := powerRounds
	if text := os.Getenv(powerEnv); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatalf("%s: %v", powerEnv, err)
		}
	}
	b = b.serverForCuts()
	m := b.mount(t, shortWaits)
	b.testPowerNames(t, m)
	if err := os.Mkdir(filepath.Join(m.dir, "power"), 0o755); err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	p := power.Start(t, power.Config{Dir: filepath.Join(m.dir, "power"), Seed: seed})
	for round := range rounds {
		p.Progress(t, 50+rng.Uint32N(300))
		b.cutPower(t, func() { p.Check(t, b.powerFiles(t)) })
		if t.Failed() {
			t.Fatalf("power failure %d, seed %d", round, seed)
		}
		t.Logf("%d power failures; %d bytes replayed", round+1, m.fs.Counters.ReplayedBytes.Load())
	}
	p.Progress(t, 100)
	if err := p.Finish(t); err != nil {
		t.Errorf("the process that writes: %v", err)
	}
	p.CheckAll(t, b.powerFiles(t))
	if n := m.fs.Counters.WriteErrors.Load(); n != 0 {
		t.Errorf("got %d lost extents, want none", n)
	}
}

// testPowerNames cuts the power after the replies to changes of names.
func (b bench) testPowerNames(t *testing.T, m *mount) {
	t.Helper()
	want := power.ChangeNames(t, filepath.Join(m.dir, "names"))
	b.cutPower(t, func() {
		if got := strings.Fields(b.MustRun("ls " + lab.ExportRW + "/names")); !slices.Equal(got, want) {
			t.Errorf("names after a power failure: got %q, want %q", got, want)
		}
	})
}

// cutPower cuts the power of the server, boots it, and calls check before any client can reach it.
func (b bench) cutPower(t *testing.T, check func()) {
	t.Helper()
	for _, step := range []func() error{b.Freeze, b.CutNetwork, b.Reset} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	check()
	if err := b.RestoreNetwork(); err != nil {
		t.Fatal(err)
	}
}

// powerFiles returns the files of the writer on the server's disk.
func (b bench) powerFiles(t *testing.T) power.Read {
	t.Helper()
	out := b.MustRun("cd " + lab.ExportRW + "/power && tar cf - . | gzip | base64")
	files, err := untar(out)
	if err != nil {
		t.Fatalf("read the files on the server's disk: %v", err)
	}
	return func(name string) ([]byte, error) {
		if content, found := files[name]; found {
			return content, nil
		}
		return nil, os.ErrNotExist
	}
}

// untar returns the files of an archive in base64 that is compressed by gzip.
func untar(text string) (map[string][]byte, error) {
	z, err := gzip.NewReader(base64.NewDecoder(base64.StdEncoding, strings.NewReader(text)))
	if err != nil {
		return nil, err
	}
	files := make(map[string][]byte)
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if files[filepath.Base(h.Name)], err = io.ReadAll(r); err != nil {
			return nil, err
		}
	}
}
