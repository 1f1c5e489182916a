package main

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

// localPair returns two directories of one local file system, which cannot differ.
func localPair(t *testing.T) *pair {
	t.Helper()
	testutil.NeedsRoot(t) // the streams change users
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	kernel, ours := t.TempDir(), t.TempDir()
	return &pair{kernel: kernel, ours: ours, serverKernel: kernel, serverOurs: ours, ticks: true,
		onHang: func(o op) { panic("onHang: " + o.String()) }}
}

func nothing(*difference) bool { return false }

func TestOpRoundTripsAsText(t *testing.T) {
	for _, o := range generate(7, 2000) {
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
	found, known, err := p.run(generate(1, 300), nothing)
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
	w := newSide(p.kernel)
	defer w.close()
	if err := os.Chmod(p.kernel, 0o777); err != nil {
		t.Fatal(err)
	}
	const n = 4000
	for _, o := range generate(3, n) {
		if w.do(&o)[0].value == "ok" {
			good[o.do]++
			total++
		}
	}
	if total < n/5 {
		t.Errorf("got %d of %d successful operations, want at least a fifth", total, n)
	}
	for _, k := range kinds {
		if good[k.do] == 0 && !strings.HasSuffix(k.do, "xattr") {
			t.Errorf("got no successful %s", k.do)
		}
	}
}

func TestDifferenceIsFoundAndShrunk(t *testing.T) {
	p := localPair(t)
	p.ticks = false
	// This client loses the group of a subdirectory.
	p.distort = func(o *op, fields []field) {
		if o.do != "mkdir" || !strings.Contains(o.path, "/") {
			return
		}
		for i := range fields {
			if fields[i].name == "path.gid" {
				fields[i].value = "4711"
			}
		}
	}
	clockless := func(d *difference) bool { return strings.HasSuffix(d.field, " moved") }
	ops := generate(5, 500)
	found, _, err := p.run(ops, clockless)
	if err != nil || found == nil || found.field != "path.gid" || found.ours != "4711" {
		t.Fatalf("got difference %v, error %v, want path.gid", found, err)
	}
	short, d := p.shrink(ops, found, clockless, time.Minute)
	if len(short) > 3 || d.op.do != "mkdir" {
		t.Errorf("got %v after %d operations:\n%s", d, len(short), trace(short))
	}
}

// TestServerIsCompared checks that the server's files are compared, not only the clients' caches.
func TestServerIsCompared(t *testing.T) {
	p := localPair(t)
	p.serverOurs = t.TempDir()
	ops, err := parseOps("open path=a flags=0x41 mode=0644\nwrite n=10 seed=1\n")
	if err != nil {
		t.Fatal(err)
	}
	if found, _, err := p.run(ops, nothing); err != nil || found == nil || found.op.path != "server" {
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
	obsolete, err := checkKnown(p, list)
	if err != nil || len(obsolete) != 1 {
		t.Fatalf("equal sides: got obsolete entries %q, error %v, want one", obsolete, err)
	}
	p.distort = func(o *op, fields []field) {
		for i := range fields {
			if o.do == "mkdir" && fields[i].name == "path.gid" {
				fields[i].value = "4711"
			}
		}
	}
	if obsolete, err = checkKnown(p, list); err != nil || len(obsolete) != 0 {
		t.Fatalf("different sides: got obsolete entries %q, error %v, want none", obsolete, err)
	}
	if found, known, err := p.run(list[0].ops, tolerate(list)); err != nil || found != nil || len(known) != 2 {
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
	if err := visible([]string{"-kernel", dir, "-ours", dir, "-rounds", "60"}); err != nil {
		t.Error(err)
	}
	if err := visible([]string{"-kernel", dir, "-ours", t.TempDir(), "-rounds", "60"}); err == nil {
		t.Error("visible in another directory: got no error")
	}
}
