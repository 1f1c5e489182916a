package beside

import (
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

const matrixTime = 15 * time.Minute

var squashFlag = flag.String("squash", "",
	"`kinds` of squashing for TestMatrix, separated by commas; none, or all kinds in a full run")

// matrixFile has the recorded results, and differencesFile the intended differences.
var (
	matrixFile      = filepath.Join("..", "..", "integration", "testdata", "matrix.txt")
	differencesFile = filepath.Join("..", "..", "integration", "testdata", "matrix_differences.txt")
)

// TestMatrix tries operations of several users on the mounts of both clients. With -update it
// records the results of the kernel's client, with which test/integration compares other servers.
func TestMatrix(t *testing.T) {
	text, err := os.ReadFile(differencesFile)
	if err != nil {
		t.Fatal(err)
	}
	known, err := differential.ReadMatrixDifferences(string(text))
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, lab.ExportRW)
	s.must("mkdir -p /disk/all && exportfs -o rw,sync,insecure,all_squash,no_subtree_check '*:/disk/all'")
	header := fmt.Sprintf("# Results of the NFS client of kernel %s, recorded by TestMatrix of test/lab/beside.\n",
		s.Release)
	recorded := ""
	if *squashFlag == "" {
		*squashFlag = "none"
		if lab.FullRun() {
			*squashFlag = "none,root,all"
		}
	}
	for squash := range strings.SplitSeq(*squashFlag, ",") {
		export := map[string]string{"none": lab.ExportRW, "root": lab.ExportSquash, "all": "/disk/all"}[squash]
		server := "/disk/" + path.Base(export)
		s.must("umount " + oursDir + " && umount " + kernelDir)
		s.export = export
		s.mountKernels()
		s.mountOurs("nfsrdmad mount --foreground")
		kernel := s.matrix("kernel", server, kernelDir)
		recorded += differential.FormatMatrix(squash, kernel)
		if *updateFlag {
			continue
		}
		ours := s.matrix("ours", server, oursDir)
		for _, d := range differential.CompareMatrix(
			differential.ParseMatrix(differential.FormatMatrix(squash, kernel))[squash],
			differential.ParseMatrix(differential.FormatMatrix(squash, ours))[squash]) {
			if !known.Contain("knfsd", squash, d) {
				t.Errorf("%s %s: kernel's client %q, ours %q", squash, d.Cell, d.Reference, d.Ours)
			}
		}
	}
	if *updateFlag {
		recorded = header + otherSquash(t, header) + recorded
		if err := os.WriteFile(matrixFile, []byte(recorded), 0o644); err != nil {
			t.Error(err)
		}
	}
}

// otherSquash returns the recorded results of the same kernel with the kinds of squashing that did
// not run.
func otherSquash(t *testing.T, header string) string {
	t.Helper()
	text, err := os.ReadFile(matrixFile)
	if err != nil {
		t.Fatal(err)
	}
	rest, same := strings.CutPrefix(string(text), header)
	if !same {
		return ""
	}
	var b strings.Builder
	for line := range strings.Lines(rest) {
		if kind, _, _ := strings.Cut(line, " "); !slices.Contains(strings.Split(*squashFlag, ","), kind) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// matrix runs the matrix on a client's mount of a directory of the server.
func (s *sides) matrix(client, server, mount string) []string {
	s.t.Helper()
	name := "/matrix-" + client
	s.must("mkdir -m 755 " + server + name)
	if out, err := s.RunFor(fmt.Sprintf("program matrix -server %s -mount %s -out /share/%s.txt", server+name,
		mount+name, client), matrixTime); err != nil {
		s.t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(s.share, client+".txt"))
	if err != nil {
		s.t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) < 1000 {
		s.t.Fatalf("got %d results of %s, want at least 1000", len(lines), client)
	}
	return lines
}
