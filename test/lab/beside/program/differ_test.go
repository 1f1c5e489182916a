package main

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// localPair is two directories of one local file system, which cannot differ.
func localPair(t *testing.T) *pair {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("streams change users: run the tests as root")
	}
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	kernel, ours := t.TempDir(), t.TempDir()
	return &pair{kernel: kernel, ours: ours, serverKernel: kernel, serverOurs: ours, ticks: true,
		hung: func(o op) { panic("hung: " + o.String()) }}
}

func nothing(*difference) bool { return false }

func TestOpText(t *testing.T) {
	for _, o := range generate(7, 2000) {
		back, err := parseOp(o.String())
		if err != nil || back != o {
			t.Fatalf("%q reads back as %q: %v", o, back, err)
		}
	}
	for _, bad := range []string{"", "fly path=a", "open wings=2", "open fd=x"} {
		if o, err := parseOp(bad); err == nil {
			t.Errorf("%q was read as %v", bad, o)
		}
	}
}

func TestEqualSidesDoNotDiffer(t *testing.T) {
	p := localPair(t)
	found, known, err := p.run(generate(1, 300), nothing)
	if err != nil || found != nil || known != nil {
		t.Fatalf("%v, %v, %v", found, known, err)
	}
}

// A stream is of use when much of it succeeds, and each verb does at times. Extended attributes may
// be what a file system does not have.
func TestStreamsReachTheFileSystem(t *testing.T) {
	p := localPair(t)
	good := make(map[string]int)
	total := 0
	w := newWorld(p.kernel)
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
		t.Errorf("%d of %d operations succeed", total, n)
	}
	for _, k := range kinds {
		if good[k.do] == 0 && !strings.HasSuffix(k.do, "xattr") {
			t.Errorf("no %s succeeds", k.do)
		}
	}
}

func TestDifferenceIsFoundAndShrunk(t *testing.T) {
	p := localPair(t)
	p.ticks = false
	// A client that loses the group of a directory which was made in another one.
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
		t.Fatalf("%v, %v", found, err)
	}
	short, d := p.shrink(ops, found, clockless, time.Minute)
	if len(short) > 3 || d.op.do != "mkdir" {
		t.Errorf("%v after %d operations:\n%s", d, len(short), trace(short))
	}
}

// What is on the server counts, whatever the clients' caches say.
func TestServerIsCompared(t *testing.T) {
	p := localPair(t)
	p.serverOurs = t.TempDir()
	ops, err := parseOps("open path=a flags=0x41 mode=0644\nwrite n=10 seed=1\n")
	if err != nil {
		t.Fatal(err)
	}
	if found, _, err := p.run(ops, nothing); err != nil || found == nil || found.op.path != "server" {
		t.Fatalf("%v, %v", found, err)
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

func TestKnownDifferences(t *testing.T) {
	p := localPair(t)
	list, err := parseKnown(knownText)
	if err != nil || len(list) != 1 || len(list[0].ops) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	gone, err := hold(p, list)
	if err != nil || len(gone) != 1 {
		t.Fatalf("what does not differ is said to be %q, %v", gone, err)
	}
	p.distort = func(o *op, fields []field) {
		for i := range fields {
			if o.do == "mkdir" && fields[i].name == "path.gid" {
				fields[i].value = "4711"
			}
		}
	}
	if gone, err = hold(p, list); err != nil || len(gone) != 0 {
		t.Fatalf("what differs is said to be %q, %v", gone, err)
	}
	if found, known, err := p.run(list[0].ops, tolerate(list)); err != nil || found != nil || len(known) != 2 {
		t.Fatalf("%v, %v, %v", found, known, err)
	}
	for _, bad := range []string{"## a\n", "## a\n| x | y |\n", "## a\n```\nfly\n```\n"} {
		if _, err := parseKnown(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

// Changes are seen where there is nothing between the two sides.
func TestVisible(t *testing.T) {
	dir := t.TempDir()
	if err := visible([]string{"-kernel", dir, "-ours", dir, "-rounds", "60"}); err != nil {
		t.Error(err)
	}
	if err := visible([]string{"-kernel", dir, "-ours", t.TempDir(), "-rounds", "60"}); err == nil {
		t.Error("changes are seen in another directory")
	}
}
