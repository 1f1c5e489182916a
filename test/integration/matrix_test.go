package integration

import (
	_ "embed"
	"path"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/nfstest"
	"github.com/nfsrdmad/nfsrdmad/test/differential"
)

// matrixText are results of the kernel's NFS client with the kernel's server. TestMatrix in
// test/lab/beside records them.
//
//go:embed testdata/matrix.txt
var matrixText string

// matrixKnownText are the intended differences from matrixText.
//
//go:embed testdata/matrix_differences.txt
var matrixKnownText string

// A matrixDifference is a line of testdata/matrix_differences.txt. The fields are patterns of
// path.Match.
type matrixDifference struct {
	server, cell, kernel, ours string
	seen                       atomic.Bool
}

func readMatrixDifferences(t *testing.T) (list []*matrixDifference) {
	t.Helper()
	for line := range strings.Lines(matrixKnownText) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		cells := strings.Split(line, " | ")
		if len(cells) != 4 {
			t.Fatalf("testdata/matrix_differences.txt: invalid line %q", line)
		}
		list = append(list, &matrixDifference{server: cells[0], cell: cells[1], kernel: cells[2], ours: cells[3]})
	}
	return list
}

func (d *matrixDifference) matches(server, cell, kernel, ours string) bool {
	for _, m := range [][2]string{{d.server, server}, {d.cell, cell}, {d.kernel, kernel}, {d.ours, ours}} {
		if ok, err := path.Match(m[0], m[1]); err != nil || !ok {
			return false
		}
	}
	return true
}

// matrixServers are the servers of TestMatrix, and how each starts with a kind of squashing. start
// returns the served directory and a mount.
var matrixServers = []struct {
	name   string
	squash []string
	start  func(t *testing.T, squash string) (served, mnt string)
}{
	{"embedded", []string{"none", "root"}, func(t *testing.T, squash string) (served, mnt string) {
		served = nfstest.OpenTempDir(t)
		var flags []string
		if squash == "none" {
			flags = append(flags, "--no-root-squash")
		}
		return served, nfstest.MountServed(t, nfstest.ServeDir(t, served, flags...))
	}},
	{"ganesha", []string{"none", "root", "all"}, func(t *testing.T, squash string) (served, mnt string) {
		served = nfstest.OpenTempDir(t)
		kind := map[string]string{"none": "No_Root_Squash", "root": "Root_Squash", "all": "All_Squash"}[squash]
		g := ganeshatest.Start(t, served, ganeshatest.Squash(kind))
		return served, nfstest.MountGanesha(t, g)
	}},
}

// TestMatrix tries every operation as several users in several kinds of directories, and compares
// the results with those of the kernel's client.
func TestMatrix(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	known := readMatrixDifferences(t)
	want := differential.ParseMatrix(matrixText)
	t.Cleanup(func() { checkMatrixKnown(t, known) }) // after the parallel subtests
	for _, s := range matrixServers {
		for _, squash := range s.squash {
			t.Run(s.name+" "+squash, func(t *testing.T) {
				served, mnt := s.start(t, squash)
				t.Parallel()
				lines, err := differential.Matrix(served, mnt)
				if err != nil {
					t.Fatal(err)
				}
				if len(lines) < 1000 {
					t.Fatalf("got %d results, want at least 1000", len(lines))
				}
				got := differential.ParseMatrix(differential.FormatMatrix(squash, lines))
				for _, d := range differential.CompareMatrix(want[squash], got[squash]) {
					checkMatrixDifference(t, known, s.name, squash+" "+d.Cell, d.Reference, d.Ours)
				}
			})
		}
	}
}

// checkMatrixKnown reports known differences that did not occur.
func checkMatrixKnown(t *testing.T, known []*matrixDifference) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, d := range known {
		if !d.seen.Load() {
			t.Errorf("known difference did not occur: %s; remove it from testdata/matrix_differences.txt", d.cell)
		}
	}
}

// checkMatrixDifference reports a difference that is not known.
func checkMatrixDifference(t *testing.T, known []*matrixDifference, server, cell, kernel, ours string) {
	t.Helper()
	for _, d := range known {
		if d.matches(server, cell, kernel, ours) {
			d.seen.Store(true)
			return
		}
	}
	t.Errorf("%s: got %q, want that of the kernel's client, %q", cell, ours, kernel)
}

// TestCreateOfNewName opens names with O_CREAT after another client has created the files. The
// mount remembers that the names did not exist. A user without permission must not get a file, and
// must not change it.
func TestCreateOfNewName(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := nfstest.OpenTempDir(t)
	mnt := nfstest.MountServed(t, nfstest.ServeDir(t, served, "--no-root-squash"))
	for _, more := range []string{"r", "w", "rw", "w,trunc", "r,trunc", "w,append"} {
		flags := more + ",creat"
		dir := strings.ReplaceAll(flags, ",", "-")
		makeOpenDir(t, path.Join(served, dir))
		outcome := runScript(t, path.Join(mnt, dir), "c stat f; r put "+path.Join(served, dir, "f")+" secret 0600;"+
			"c open f f "+flags+" 0644")
		if got := outcome[2]; !strings.HasSuffix(got, " => EACCES") {
			t.Errorf("got %q, want EACCES", got)
		}
		behind := runScript(t, path.Join(served, dir), "r cat f; r stat f")
		if behind[0] != `r cat f => "secret"` || behind[1] != "r stat f => reg 0600 0:0 nlink=1 size=6" {
			t.Errorf("%s changed the file: %q", flags, behind)
		}
	}
}
