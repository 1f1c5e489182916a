package differential

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// permitted returns the known differences of the mounts of a server.
func permitted(t *testing.T) func(*Difference) bool {
	t.Helper()
	list, err := ReadKnown("../integration/testdata/differential.md")
	if err != nil {
		t.Fatal(err)
	}
	return Tolerate(list)
}

// runText runs operations and returns the first difference that is not permitted.
func runText(t *testing.T, p *Pair, text string) *Difference {
	t.Helper()
	ops, err := ParseOps(text)
	if err != nil {
		t.Fatal(err)
	}
	found, _, err := p.Run(ops, permitted(t))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestHiddenNameMayStayOnlyWithoutRight checks in which context a hidden name may stay.
func TestHiddenNameMayStayOnlyWithoutRight(t *testing.T) {
	const begin = "mkdir path=d quiet=1\nchmod path=d mode=0777 quiet=1\nmkdir path=e quiet=1\n" +
		"open path=d/a flags=0x42 mode=0666 quiet=1\n"
	const unlink = "unlink path=d/a as=1 quiet=1\n"
	for name, c := range map[string]struct {
		ops  string
		want string // field of the difference
	}{
		"removed by a user":           {unlink, "d/.nfs"},
		"then closed to the user":     {unlink + "chmod path=d mode=0755 quiet=1", ""},
		"then closed and open again":  {unlink + "chmod path=d quiet=1\nchmod path=d mode=0777 quiet=1", ""},
		"then sticky":                 {unlink + "chmod path=d mode=01777 quiet=1", ""},
		"then of the user":            {unlink + "chown path=d uid=1000 quiet=1", "d/.nfs"},
		"another directory is closed": {unlink + "chmod path=e quiet=1", "d/.nfs"},
		"closed to others before": {"chown path=d uid=1000 quiet=1\nchmod path=d mode=0700 quiet=1\n" + unlink,
			"d/.nfs"},
		"removed by root": {"unlink path=d/a quiet=1\nchmod path=d mode=0700 quiet=1", "d/.nfs"},
	} {
		t.Run(name, func(t *testing.T) {
			p := localPair(t)
			p.LikeNFS, p.removal = true, 20*time.Millisecond
			p.distort = func(o *Op, _ []Field) {
				if o.do != "unlink" {
					return
				}
				name := filepath.Join(p.Ours.Server, p.dir, filepath.Dir(o.path), hidden+"1")
				if err := os.WriteFile(name, nil, 0o666); err != nil {
					t.Fatal(err)
				}
			}
			got := ""
			if found := runText(t, p, begin+c.ops); found != nil {
				got = found.field
			}
			if got != c.want {
				t.Errorf("got difference %q, want %q", got, c.want)
			}
		})
	}
}

func TestMayRemove(t *testing.T) {
	alice := &identity{id: 1000, groups: []uint32{1000, 7}}
	for name, c := range map[string]struct {
		u                *identity
		mode             uint32
		uid, gid, fileID uint32
		want             bool
	}{
		"root":               {root, 0, 5, 5, 5, true},
		"owner":              {alice, 0o300, 1000, 5, 5, true},
		"owner cannot write": {alice, 0o577, 1000, 5, 5, false},
		"group":              {alice, 0o030, 5, 1000, 5, true},
		"second group":       {alice, 0o030, 5, 7, 5, true},
		"group cannot write": {alice, 0o717, 5, 7, 5, false},
		"others":             {alice, 0o003, 5, 5, 5, true},
		"others only write":  {alice, 0o772, 5, 5, 5, false},
		"others only search": {alice, 0o771, 5, 5, 5, false},
		"sticky":             {alice, 0o1777, 5, 5, 5, false},
		"sticky, own file":   {alice, 0o1777, 5, 5, 1000, true},
		"sticky, owner":      {alice, 0o1777, 1000, 5, 5, true},
	} {
		dir, file := &syscall.Stat_t{Mode: c.mode, Uid: c.uid, Gid: c.gid}, &syscall.Stat_t{Uid: c.fileID}
		if got := mayRemove(c.u, dir, file); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}
