package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	// differentialEnv is how long each mode of TestDifferential runs, for example 1h. `make soak`
	// sets it. Without it, each mode runs a few streams with fixed seeds.
	differentialEnv = "NFSRDMAD_DIFFERENTIAL"
	// differentialSeedEnv selects the seed of one stream.
	differentialSeedEnv = "NFSRDMAD_DIFFERENTIAL_SEED"
	// differentialFileEnv names a file with operations to run instead of random ones.
	differentialFileEnv = "NFSRDMAD_DIFFERENTIAL_FILE"
	// differentialChildEnv makes the test binary execute operations.
	differentialChildEnv = "NFSRDMAD_DIFFERENTIAL_CHILD"
)

func init() {
	if os.Getenv(differentialChildEnv) == "" {
		return
	}
	if err := differential.Serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// withoutCoherence are the verbs whose effects no NFSv3 client promises to show on another mount.
// mknod makes FIFOs, which do not connect the processes of two mounts. append uses RWF_APPEND,
// which a FUSE file system does not see (docs/semantics.md).
//
// A server has one kind of lock, so flock conflicts there with the other locks of the same process
// (flock(2)). No stream has both.
var (
	ranges           = []string{"lock", "plock", "getlk"}
	withoutCoherence = []string{"mmap", "mread", "mwrite", "munmap", "mknod", "append"}
	withoutFlock     = append(slices.Clone(withoutCoherence), "flock")
	withoutRanges    = append(slices.Clone(withoutCoherence), ranges...)
)

// A differentialMode is a way to mount an export, and the streams that it must execute like a local
// directory.
type differentialMode struct {
	name    string
	mounts  int
	options string // of the mounts
	stream  differential.Stream
	seeds   int // in a short run
	ops     int // in a stream
}

var differentialModes = []differentialMode{
	{"one mount", 1, "ac,dev", differential.Stream{Processes: 3, Users: 3, Expressible: true,
		Without: []string{"flock"}}, 2, 100},
	{"two mounts without caches", 2, "noac,lookupcache=none", differential.Stream{Processes: 4, Users: 3,
		Expressible: true, Without: withoutFlock}, 1, 150},
	{"two mounts with flock", 2, "noac,lookupcache=none", differential.Stream{Processes: 4, Users: 3,
		Expressible: true, Without: withoutRanges}, 1, 100},
	{"two mounts with caches", 2, "ac", differential.Stream{Processes: 4, Users: 1, Expressible: true, Sessions: true,
		Without: append([]string{"flock"}, ranges...)}, 1, 150},
}

// TestDifferentialKnown checks that the known differences still exist, and that their operations
// show no others.
func TestDifferentialKnown(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	m := differentialModes[0]
	m.mounts, m.stream.Processes = 2, 4
	d := newDifferentialRun(t, m)
	obsolete, err := differential.CheckKnown(&d.Pair, d.known)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range obsolete {
		t.Errorf("testdata/differential.md: difference no longer occurs: %s", o)
	}
	unknown, err := differential.CheckPermitted(&d.Pair, d.known)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range unknown {
		t.Errorf("testdata/differential.md: unknown difference: %s", u)
	}
}

// TestDifferential runs random operations of several processes and users on a local directory and
// on mounts of a directory of the same file system, and compares them.
func TestDifferential(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	for _, m := range differentialModes {
		t.Run(strings.ReplaceAll(m.name, " ", "_"), func(t *testing.T) {
			d := newDifferentialRun(t, m)
			switch seed, file := os.Getenv(differentialSeedEnv), os.Getenv(differentialFileEnv); {
			case file != "":
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				ops, err := differential.ParseOps(string(text))
				if err != nil {
					t.Fatal(err)
				}
				d.run(t, file, ops)
			case seed != "":
				n, err := strconv.ParseUint(seed, 0, 64)
				if err != nil {
					t.Fatalf("%s: %v", differentialSeedEnv, err)
				}
				d.runSeed(t, n)
			default:
				d.runSeeds(t)
			}
		})
	}
}

// A differentialRun is a reference directory, a server, its mounts, and the processes that use
// both.
type differentialRun struct {
	differential.Pair
	differentialMode
	known             []differential.Entry
	executed, planned int // operations
}

func newDifferentialRun(t *testing.T, m differentialMode) *differentialRun {
	t.Helper()
	reference, served := mounts.OpenTempDir(t), mounts.OpenTempDir(t)
	s := mounts.ServeDir(t, served, "--no-root-squash", "--allow-suid")
	d := &differentialRun{differentialMode: m}
	d.Reference = differential.Side{Dirs: []string{reference}, Server: reference}
	d.Ours.Server = served
	for range m.mounts {
		d.Ours.Dirs = append(d.Ours.Dirs, mounts.MountServed(t, s, m.options))
	}
	d.Ticks, d.LikeNFS, d.CloseToOpen = true, true, m.stream.Sessions
	for range m.stream.Processes {
		d.Processes = append(d.Processes, startDifferentialChild(t))
	}
	d.OnHang = func(o differential.Op) {
		panic(fmt.Sprintf("operation did not return within %v: %s", differential.HangTime, o))
	}
	var err error
	if d.known, err = differential.ReadKnown(filepath.Join("testdata", "differential.md")); err != nil {
		t.Fatal(err)
	}
	return d
}

// startDifferentialChild starts a process that executes operations until the test ends.
func startDifferentialChild(t *testing.T) *differential.Child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), differentialChildEnv+"=1")
	cmd.Stderr = os.Stderr
	c, err := differential.StartChild(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("end of a process that executed operations: %v", err)
		}
	})
	return c
}

// runSeeds runs streams with fixed seeds, or with new seeds for the time in differentialEnv.
func (d *differentialRun) runSeeds(t *testing.T) {
	t.Helper()
	defer func() { // a known difference may end a stream
		if d.executed < d.planned/2 && !t.Failed() {
			t.Errorf("operations: executed %d, want at least half of %d", d.executed, d.planned)
		}
	}()
	limit := os.Getenv(differentialEnv)
	if limit == "" {
		// Tests of other packages run at the same time and count the reads of cached files.
		d.stream.Without = append(slices.Clip(d.stream.Without), "dropcaches")
		for seed := range d.seeds {
			d.runSeed(t, uint64(seed))
		}
		return
	}
	length, err := time.ParseDuration(limit)
	if err != nil {
		t.Fatalf("%s: %v", differentialEnv, err)
	}
	seed, streams := uint64(time.Now().UnixNano()), 0
	for end := time.Now().Add(length); time.Now().Before(end) && !t.Failed(); seed++ {
		d.runSeed(t, seed)
		streams++
	}
	t.Logf("%d streams", streams)
}

func (d *differentialRun) runSeed(t *testing.T, seed uint64) {
	t.Helper()
	d.run(t, fmt.Sprintf("%s=%d", differentialSeedEnv, seed), d.stream.Generate(seed, d.ops))
}

// run runs a stream. It shrinks and prints a stream that differs.
func (d *differentialRun) run(t *testing.T, name string, ops []differential.Op) {
	t.Helper()
	tolerated := differential.Tolerate(d.known)
	found, known, err := d.Run(ops, tolerated)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if found == nil {
		d.executed, d.planned = d.executed+d.Done, d.planned+len(ops)
		t.Logf("%s: %d of %d operations, %d known differences", name, d.Done, len(ops), len(known))
		return
	}
	short, shortest := d.Shrink(ops, found, tolerated, time.Minute)
	t.Errorf("%v\nShrunk: %v\n%s\nRun the stream again with %s, or put the operations above into a file and set "+
		"%s to its path:\ngo test -run '%s' ./test/integration", found, shortest, differential.Trace(short), name,
		differentialFileEnv, t.Name())
}
