package differential

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// The kernel's caches belong to the whole host. Other tests count the calls of a mount, and a local
// file system has nothing to show without its caches.
func init() {
	verbs["dropcaches"].run = func(*side, *Op) ([]Field, error) { return nil, nil }
}

// localPair returns two directories of one local file system, which cannot differ.
func localPair(t *testing.T) *Pair {
	t.Helper()
	kit.NeedsRoot(t) // the streams change users
	reference, ours := t.TempDir(), t.TempDir()
	if err := os.Chmod(filepath.Dir(ours), 0o755); err != nil { // of both
		t.Fatal(err)
	}
	return &Pair{Reference: Side{[]string{reference}, reference}, Ours: Side{[]string{ours}, ours}, Ticks: true,
		OnHang: func(o Op) { panic("onHang: " + o.String()) }}
}

func nothing(*Difference) bool { return false }

func TestOpRoundTripsAsText(t *testing.T) {
	for _, o := range Generate(7, 2000) {
		back, err := parseOp(o.String())
		if err != nil || back != o {
			t.Fatalf("parse %q: got %q, error %v", o, back, err)
		}
	}
	for _, bad := range []string{"", "fly path=a", "open wings=2", "open fd=x"} {
		if o, err := parseOp(bad); err == nil {
			t.Errorf("parse %q: got %v, want an error", bad, o)
		}
	}
}

func TestEqualSidesDoNotDiffer(t *testing.T) {
	p := localPair(t)
	found, known, err := p.Run(Generate(1, 300), nothing)
	if err != nil || found != nil || known != nil {
		t.Fatalf("got difference %v, known differences %v, error %v, want none", found, known, err)
	}
}

// TestStreamsReachTheFileSystem checks that a useful share of the operations succeeds, and that
// every verb succeeds at least once. A file system may lack extended attributes.
func TestStreamsReachTheFileSystem(t *testing.T) {
	p := localPair(t)
	good := make(map[string]int)
	total := 0
	const streams, length = 12, 500
	for seed := range uint64(streams) {
		dir := filepath.Join(p.Reference.Dirs[0], fmt.Sprint(seed))
		if err := errors.Join(os.Mkdir(dir, 0o777), os.Chmod(dir, 0o777)); err != nil {
			t.Fatal(err)
		}
		w := newSide(dir)
		for _, o := range Generate(seed, length) {
			if w.do(&o)[0].Value == "ok" {
				good[o.do]++
				total++
			}
		}
		w.close()
	}
	if total < streams*length/5 {
		t.Errorf("got %d of %d successful operations, want at least a fifth", total, streams*length)
	}
	for _, k := range kinds {
		if good[k.do] == 0 && !strings.HasSuffix(k.do, "xattr") {
			t.Errorf("got no successful %s", k.do)
		}
	}
}

func TestDifferenceIsFoundAndShrunk(t *testing.T) {
	p := localPair(t)
	p.Ticks = false
	// This client loses the group of a subdirectory.
	p.distort = func(o *Op, fields []Field) {
		if o.do != "mkdir" || !strings.Contains(o.path, "/") {
			return
		}
		for i := range fields {
			if fields[i].Name == "path.gid" {
				fields[i].Value = "4711"
			}
		}
	}
	clockless := func(d *Difference) bool { return strings.HasSuffix(d.field, " moved") }
	ops := Generate(5, 500)
	found, _, err := p.Run(ops, clockless)
	if err != nil || found == nil || found.field != "path.gid" || found.ours != "4711" {
		t.Fatalf("got difference %v, error %v, want path.gid", found, err)
	}
	short, d := p.Shrink(ops, found, clockless, 20*time.Minute)
	if len(short) > 3 || d.op.do != "mkdir" {
		t.Errorf("got %v after %d operations:\n%s", d, len(short), Trace(short))
	}
}

// TestServerIsCompared checks that the server's files are compared, not only the clients' caches.
func TestServerIsCompared(t *testing.T) {
	p := localPair(t)
	p.Ours.Server = t.TempDir()
	ops, err := ParseOps("open path=a flags=0x41 mode=0644\nwrite n=10 seed=1\n")
	if err != nil {
		t.Fatal(err)
	}
	if found, _, err := p.Run(ops, nothing); err != nil || found == nil || found.op.path != "server" {
		t.Fatalf("got difference %v, error %v, want one on the server", found, err)
	}
}

const knownText = `# Known differences

Prose.

## groups

Why.

| operation | field | kernel's client | ours |
|---|---|---|---|
| mkdir | path.gid | 0 | 4711 |

` + "```\nmkdir path=d mode=0755\nmkdir path=d/a mode=0755\n```\n"

func TestKnownDifferencesAreToleratedAndChecked(t *testing.T) {
	p := localPair(t)
	list, err := parseKnown(knownText)
	if err != nil || len(list) != 1 || len(list[0].ops) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	obsolete, err := CheckKnown(p, list)
	if err != nil || len(obsolete) != 1 {
		t.Fatalf("equal sides: got obsolete entries %q, error %v, want one", obsolete, err)
	}
	p.distort = func(o *Op, fields []Field) {
		for i := range fields {
			if o.do == "mkdir" && fields[i].Name == "path.gid" {
				fields[i].Value = "4711"
			}
		}
	}
	if obsolete, err = CheckKnown(p, list); err != nil || len(obsolete) != 0 {
		t.Fatalf("different sides: got obsolete entries %q, error %v, want none", obsolete, err)
	}
	if found, known, err := p.Run(list[0].ops, Tolerate(list)); err != nil || found != nil || len(known) != 2 {
		t.Fatalf("got difference %v, known differences %v, error %v, want 2 known", found, known, err)
	}
	for _, bad := range []string{"## a\n", "## a\n| x | y |\n", "## a\n```\nfly\n```\n"} {
		if _, err := parseKnown(bad); err == nil {
			t.Errorf("parse %q: got no error", bad)
		}
	}
}

// TestVisibleFindsMissingChanges checks that changes are visible on two sides that are one
// directory, and not otherwise.
func TestVisibleFindsMissingChanges(t *testing.T) {
	dir := t.TempDir()
	if err := Visible([]string{dir, dir}, 1, 60); err != nil {
		t.Error(err)
	}
	if err := Visible([]string{dir, t.TempDir()}, 1, 60); err == nil {
		t.Error("visible in another directory: got no error")
	}
}

// TestProcessesAndMountsDoNotDiffer runs streams of several processes on two mounts, which are the
// same directory.
func TestProcessesAndMountsDoNotDiffer(t *testing.T) {
	for name, s := range map[string]Stream{"names": {Processes: 4, Users: 3, Expressible: true},
		"sessions": {Processes: 4, Users: 2, Expressible: true, Sessions: true}} {
		t.Run(name, func(t *testing.T) {
			p := localPair(t)
			p.Ours.Dirs = append(p.Ours.Dirs, p.Ours.Dirs[0])
			p.LikeNFS = true
			for range s.Processes {
				p.Processes = append(p.Processes, &local{})
			}
			ops := s.Generate(1, 300)
			found, known, err := p.Run(ops, nothing)
			if err != nil || found != nil || known != nil || p.Done != len(ops) {
				t.Fatalf("got difference %v, known differences %v, error %v after %d of %d operations", found, known,
					err, p.Done, len(ops))
			}
		})
	}
}

// TestChildProcess sends operations through the pipes of a child process.
func TestChildProcess(t *testing.T) {
	p := localPair(t)
	r, w := io.Pipe()
	back, out := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(r, out) }()
	p.Processes = []Process{&Child{enc: gob.NewEncoder(w), dec: gob.NewDecoder(back)}}
	found, _, err := p.Run(Generate(2, 100), nothing)
	if err != nil || found != nil {
		t.Errorf("got difference %v, error %v, want none", found, err)
	}
	w.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestExpressibleStreams(t *testing.T) {
	for _, o := range (Stream{Expressible: true}).Generate(1, 5000) {
		if slices.Contains(inexpressible, o.do) || timeOf(o.mtime).Sec < 0 || timeOf(o.atime).Sec >= 1<<32 ||
			o.do == "rename" && o.flags != 0 || strings.HasSuffix(o.do, "chown") && o.uid < 0 && o.gid < 0 {
			t.Errorf("NFSv3 cannot express %s", o)
		}
	}
}

func TestMatrixTextRoundTrips(t *testing.T) {
	lines := []string{"group link m n root => ok; m 1 nlink=2", "group link m n alice => EACCES",
		"group link m n alice warm => ok; m 1 nlink=2", "group link m n mallory => EACCES"}
	text := FormatMatrix("none", lines)
	const want = "none group link m n root => ok; m 1 nlink=2\nnone group link m n alice,mallory => EACCES\n" +
		"none group link m n alice warm => ok; m 1 nlink=2\n"
	if text != want {
		t.Errorf("got\n%swant\n%s", text, want)
	}
	got := ParseMatrix("# comment\n" + text)["none"]
	for _, line := range lines {
		cell, result, _ := strings.Cut(line, " => ")
		if got[cell] != result {
			t.Errorf("%s: got %q, want %q", cell, got[cell], result)
		}
	}
	if list := CompareMatrix(got, got); len(list) > 0 {
		t.Errorf("equal matrices: got %v, want no difference", list)
	}
	other := ParseMatrix(FormatMatrix("none", lines[:2]))["none"]
	list := CompareMatrix(got, other)
	if len(list) != 2 || list[0] != (MatrixDifference{"group link m n alice warm", "ok; m 1 nlink=2", "EACCES"}) {
		t.Errorf("different matrices: got %v", list)
	}
}

// TestMatrixOfOneDirectory checks that cells have results, and that they depend on the user.
func TestMatrixOfOneDirectory(t *testing.T) {
	kit.NeedsRoot(t)
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	lines, err := Matrix(dir, dir)
	if err != nil {
		t.Fatal(err)
	}
	got := ParseMatrix(FormatMatrix("local", lines))["local"]
	for cell, want := range map[string]string{
		"group create-exclusive n alice":        "ok; new n 100640 1000:1000 size=4 nlink=1",
		"group create-exclusive n mallory":      "EACCES",
		"setgid mkdir n alice":                  "ok; new n 42755 1000:2000",
		"sticky unlink f alice":                 "EPERM",
		"acl-denies-alice open-write w alice":   "EACCES",
		"acl-denies-alice open-write w mallory": "ok",
		"acl-permits-alice mkdir n alice":       "ok; new n 40755 1000:1000",
		"own exec x mallory":                    "EACCES",
		"own exec x alice":                      "ok",
	} {
		if got[cell] != want {
			t.Errorf("%s: got %q, want %q", cell, got[cell], want)
		}
	}
}
