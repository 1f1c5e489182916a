package differential

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	kit.Must(t, os.Chmod(filepath.Dir(ours), 0o755)) // of both
	return &Pair{Reference: Side{[]string{reference}, reference}, Ours: Side{[]string{ours}, ours}, Ticks: true,
		OnHang: func(o Op) { panic("onHang: " + o.String()) }}
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
	short, d := p.Shrink(ops, found, clockless, kit.Timeout)
	if len(short) > 3 || d.op.do != "mkdir" {
		t.Errorf("got %v after %d operations:\n%s", d, len(short), Trace(short))
	}
}

// TestServerIsCompared checks that the server's files are compared, not only the clients' caches.
func TestServerIsCompared(t *testing.T) {
	p := localPair(t)
	p.Ours.Server = t.TempDir()
	ops, err := ParseOps("open path=a flags=0x41 mode=0644\nwrite n=10 seed=1\n")
	kit.Must(t, err)
	found, _, err := p.Run(ops, func(*Difference) bool { return false })
	if err != nil || found == nil || found.op.path != "server" {
		t.Fatalf("got difference %v, error %v, want one on the server", found, err)
	}
}
