package vfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestParseGroups(t *testing.T) {
	const ids = "Name:\tx\nUid:\t1\t2\t3\t1000\nGid:\t4\t5\t6\t2000\n"
	many, first := "Groups:\t", []uint32(nil)
	for i := range uint32(20) {
		many += fmt.Sprint(10+i%10, " ")
		if i < 16 {
			first = append(first, 10+i%10)
		}
	}
	for _, c := range []struct {
		name, status string
		want         []uint32
		more         int
		err          error
	}{
		{"none", ids + "Groups:\t \n", nil, 0, nil},
		{"some", ids + "Groups:\t7 8 4294967294 \n", []uint32{7, 8, 4294967294}, 0, nil},
		{"more than 16", ids + many + "\n", first, 4, nil},
		{"other uid", "\nUid:\t1000\t1000\t1000\t1\nGid:\t1\t1\t1\t2000\nGroups:\t7\n", nil, 0, errOtherIdentity},
		{"other gid", "\nUid:\t1000\t1000\t1000\t1000\nGid:\t1\t1\t1\t1\nGroups:\t7\n", nil, 0, errOtherIdentity},
		{"no line of groups", ids, nil, 0, errBadStatus},
		{"no uid", "\nGid:\t1\t1\t1\t2000\nGroups:\t7\n", nil, 0, errBadStatus},
		{"no number", ids + "Groups:\t7 x 8\n", nil, 0, errBadStatus},
		{"too large a number", ids + "Groups:\t4294967296\n", nil, 0, errBadStatus},
		{"empty", "", nil, 0, errBadStatus},
	} {
		got, more, err := parseGroups([]byte(c.status), 1000, 2000, nil)
		if !slices.Equal(got, c.want) || more != c.more || !errors.Is(err, c.err) {
			t.Errorf("%s: got %v, %d more, %v, want %v, %d more, %v", c.name, got, more, err, c.want, c.more, c.err)
		}
	}
}

// TestUnknownGroupsAreCounted makes credentials for callers whose groups cannot be read. They have
// no group, and one warning is logged.
func TestUnknownGroupsAreCounted(t *testing.T) {
	var counters Counters
	warnings := 0
	c := newCredentials(&counters, func(string, ...any) { warnings++ })
	uid, gid := uint32(os.Getuid()), uint32(os.Getgid())
	const ended = 1 << 30 // no process has this number
	for name, pid := range map[string]uint32{"other PID namespace": 0, "ended": ended} {
		if got, want := c.of(uid, gid, pid), c.encode(uid, gid, nil); string(got) != string(want) {
			t.Errorf("%s: got credential %x, want %x", name, got, want)
		}
	}
	if got, want := c.of(uid+1, gid, uint32(os.Getpid())), c.encode(uid+1, gid, nil); string(got) != string(want) {
		t.Errorf("process of another user: got credential %x, want %x", got, want)
	}
	if n := counters.GroupsUnknown.Load(); n != 3 || warnings != 1 {
		t.Errorf("got %d counted and %d warnings, want 3 and 1", n, warnings)
	}
	known := exec.Command("cat") // in this process, a thread of a server may act as another user
	input, err := known.StdinPipe()
	must(t, err)
	must(t, known.Start())
	c.of(uid, gid, uint32(known.Process.Pid))
	must(t, input.Close())
	must(t, known.Wait())
	if n := counters.GroupsUnknown.Load(); n != 3 {
		t.Errorf("after a known process: got %d counted, want 3", n)
	}
}

// TestFirst16GroupsAreSent uses directories of the 16th and the 17th group of a process.
func TestFirst16GroupsAreSent(t *testing.T) {
	kit.NeedsRoot(t)
	e := startOwnExport(t)
	openExport(t, e)
	u := alice
	for g := range uint32(16) { // with its own group, 17
		u.groups = append(u.groups, 9000+g)
	}
	for name, gid := range map[string]int{"16th": 9014, "17th": 9015} {
		putDir(t, filepath.Join(e.dir, name), user{}, 0o770)
		must(t, os.Chown(filepath.Join(e.dir, name), 0, gid))
	}
	m := e.mount(t, mountConfig{})
	want(t, "16th group", u.open(t, m.path("16th/file"), unix.O_CREAT|unix.O_WRONLY, 0o600), nil)
	want(t, "17th group", u.open(t, m.path("17th/file"), unix.O_CREAT|unix.O_WRONLY, 0o600), unix.EACCES)
	if m.fs.Counters.GroupsCut.Load() == 0 {
		t.Error("credentials with left out groups: got 0, want at least 1")
	}
	if n := m.fs.Counters.GroupsUnknown.Load(); n != 0 {
		t.Errorf("credentials with unknown groups: got %d, want 0", n)
	}
}
