package integration

import (
	_ "embed"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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

// TestMatrix tries every operation as several users in several kinds of directories, and compares
// the results with those of the kernel's client. The server squashes root; TestDifferential runs
// operations of several users without that.
func TestMatrix(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	const squash = "root"
	known, err := differential.ReadMatrixDifferences(matrixKnownText)
	kit.Must(t, err)
	served := mounts.OpenTempDir(t)
	lines, err := differential.Matrix(served, mounts.MountServed(t, mounts.ServeDir(t, served, "--allow-suid")))
	kit.Must(t, err)
	if len(lines) < 1000 {
		t.Fatalf("got %d results, want at least 1000", len(lines))
	}
	want := differential.ParseMatrix(matrixText)
	got := differential.ParseMatrix(differential.FormatMatrix(squash, lines))
	for _, d := range differential.CompareMatrix(want[squash], got[squash]) {
		if !known.Contain("embedded", squash, d) {
			t.Errorf("%s: got %q, want that of the kernel's client, %q", d.Cell, d.Ours, d.Reference)
		}
	}
	for _, line := range known.NotSeen("knfsd") {
		ofOther := strings.HasPrefix(line, "ganesha ") || strings.Contains(line, " | all ")
		if !ofOther && !t.Failed() {
			t.Errorf("known difference did not occur: %s; remove it from testdata/matrix_differences.txt", line)
		}
	}
}
