package integration

import (
	_ "embed"
	"path"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
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

// matrixServers are the servers of TestMatrix, and how each starts with a kind of squashing. start
// returns the served directory and a mount.
var matrixServers = []struct {
	name   string
	squash []string
	start  func(t *testing.T, squash string) (served, mnt string)
}{
	{"embedded", []string{"none", "root"}, func(t *testing.T, squash string) (served, mnt string) {
		served = mounts.OpenTempDir(t)
		var flags []string
		if squash == "none" {
			flags = append(flags, "--no-root-squash")
		}
		return served, mounts.MountServed(t, mounts.ServeDir(t, served, flags...))
	}},
	{"ganesha", []string{"none", "root", "all"}, func(t *testing.T, squash string) (served, mnt string) {
		served = mounts.OpenTempDir(t)
		kind := map[string]string{"none": "No_Root_Squash", "root": "Root_Squash", "all": "All_Squash"}[squash]
		g := ganesha.Start(t, served, ganesha.Squash(kind))
		return served, mounts.MountGanesha(t, g)
	}},
}

// TestMatrix tries every operation as several users in several kinds of directories, and compares
// the results with those of the kernel's client.
func TestMatrix(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	known, err := differential.ReadMatrixDifferences(matrixKnownText)
	if err != nil {
		t.Fatal(err)
	}
	want := differential.ParseMatrix(matrixText)
	t.Cleanup(func() { // after the parallel subtests
		if t.Failed() {
			return
		}
		for _, line := range known.NotSeen("knfsd") {
			t.Errorf("known difference did not occur: %s; remove it from testdata/matrix_differences.txt", line)
		}
	})
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
					if !known.Contain(s.name, squash, d) {
						t.Errorf("%s %s: got %q, want that of the kernel's client, %q", squash, d.Cell, d.Ours,
							d.Reference)
					}
				}
			})
		}
	}
}

// TestCreateOfNewName opens names with O_CREAT after another client has created the files. The
// mount remembers that the names did not exist. A user without permission must not get a file, and
// must not change it.
func TestCreateOfNewName(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	mnt := mounts.MountServed(t, mounts.ServeDir(t, served, "--no-root-squash"))
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
