package control

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func (fixedMounts) Mount(context.Context, MountRequest) (MountInfo, error) {
	return MountInfo{Dir: "/mnt"}, nil
}

func (fixedMounts) Status(ctx context.Context, _ string) ([]MountStatus, error) {
	return []MountStatus{{MountInfo: MountInfo{Dir: "/mnt", Reason: fmt.Sprint("group: ", FromGroup(ctx))}}}, nil
}

func (fixedMounts) Stats(context.Context, string) ([]MountStats, error) {
	return []MountStats{{Dir: "/mnt"}}, nil
}
func (fixedMounts) Slow(context.Context, string) ([]SlowCalls, error) {
	return []SlowCalls{{Dir: "/mnt"}}, nil
}

func (fixedMounts) Trace(context.Context, TraceRequest) (TraceStream, error) { return noEvents{}, nil }

// noEvents is the trace of a mount without events.
type noEvents struct{}

func (noEvents) Ended() <-chan struct{} { return nil }

func (noEvents) Run(context.Context, func([]byte) error) {}

// dialAs connects with the credentials of another user. The thread with these credentials ends with
// its goroutine, because the goroutine does not unlock it.
func dialAs(socket string, uid, gid int, groups []int) (conn net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		list := make([]uint32, len(groups)+1)
		for i, g := range groups {
			list[i] = uint32(g)
		}
		for _, c := range [][4]uintptr{{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&list[0]))},
			{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)}} {
			if _, _, errno := unix.RawSyscall(c[0], c[1], c[2], c[3]); errno != 0 {
				err = errno
				return
			}
		}
		conn, err = net.Dial("unix", socket)
	}()
	<-done
	return conn, err
}

// groupListener listens for a group at the returned path.
func groupListener(t *testing.T, group string) (l *Listener, g Group, path string) {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != filepath.Clean(os.TempDir()) && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	g, err := LookupGroup(group)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "s")
	l, err = Listen(path, g)
	if err != nil {
		t.Fatal(err)
	}
	return l, g, path
}

// serveGroup serves the control API for a group.
func serveGroup(t *testing.T, l *Listener, g Group) {
	srv := NewServer(fixedMounts{}, Version, func(StopRequest) (StopInfo, error) { return StopInfo{}, nil }, g)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-served; l.Close(); l.Release() })
}

// groupServer serves the control API for a group, and returns the path of the socket.
func groupServer(t *testing.T, group string) string {
	t.Helper()
	l, g, path := groupListener(t, group)
	serveGroup(t, l, g)
	return path
}

// verbs call each verb of the control API. The stop waits for a process, so it is called as a plain
// request.
var verbs = []struct {
	name  string
	reads bool
	call  func(c *Client) error
}{
	{"mount", false, func(c *Client) error { _, err := c.Mount(context.Background(), MountRequest{}); return err }},
	{"umount", false, func(c *Client) error { return c.Umount(context.Background(), UmountRequest{}) }},
	{"stop", false, func(c *Client) error {
		return c.do(context.Background(), requestTimeout, "POST", pathStop, StopRequest{}, nil)
	}},
	{"trace", false, func(c *Client) error {
		return c.Trace(context.Background(), TraceRequest{Dir: "/mnt"}, io.Discard)
	}},
	{"list", true, func(c *Client) error { _, err := c.List(context.Background()); return err }},
	{"status", true, func(c *Client) error { _, err := c.Status(context.Background(), ""); return err }},
	{"stats", true, func(c *Client) error { _, err := c.Stats(context.Background(), ""); return err }},
	{"status", true, func(c *Client) error { _, err := c.Slow(context.Background(), ""); return err }},
	{"version", true, func(c *Client) error { _, err := c.Version(context.Background()); return err }},
}

// clientAs returns a client whose connections have the credentials of another user.
func clientAs(socket string, uid, gid int, groups []int) *Client {
	c := NewClient(socket)
	c.http.Transport = &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return dialAs(socket, uid, gid, groups)
		}}
	return c
}

func TestGroupMayOnlyRead(t *testing.T) {
	kit.NeedsRoot(t)
	const gid = 5000
	many := make([]int, 300) // more than the first buffer of SO_PEERGROUPS has room for
	for i := range many {
		many[i] = 6000 + i
	}
	for _, tt := range []struct {
		name     string
		uid, gid int
		groups   []int
		all      bool   // all verbs
		read     bool   // the verbs that read
		refused  string // in the error; the error of connect(2) if the server is not reached
	}{
		{"root", 0, 0, nil, true, true, ""},
		{"root of other groups", 0, 7, []int{8}, true, true, ""},
		{"primary group", 1000, gid, nil, false, true, "permission denied to uid 1000; run as root"},
		{"supplementary group", 1000, 1000, []int{9, gid}, false, true, "permission denied to uid 1000; run as root"},
		{"one of many groups", 1000, 1000, append(slices.Clone(many), gid), false, true, "denied to uid 1000"},
		{"other groups", 1000, 1000, many, false, false, "permission denied; run as root"},
		{"group of root", 1000, 0, []int{0}, false, false, "permission denied; run as root"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := clientAs(groupServer(t, "5000"), tt.uid, tt.gid, tt.groups)
			if l, err := c.Status(context.Background(), ""); tt.read && (err != nil ||
				l[0].Reason != fmt.Sprint("group: ", !tt.all)) {
				t.Errorf("status: got %+v, %v, want that the request is from the group: %v", l, err, !tt.all)
			}
			for _, v := range verbs {
				err := v.call(c)
				if tt.all || tt.read && v.reads {
					if err != nil {
						t.Errorf("%s: got error %v, want none", v.name, err)
					}
					continue
				}
				isError(t, err, CodePermission, tt.refused)
				if tt.read && !strings.HasPrefix(err.Error(), "control: "+v.name+": ") {
					t.Errorf("got error %q, want it to begin with the verb %s", err, v.name)
				}
			}
		})
	}
}

// TestServerChecksEachVerb opens the socket to everybody, so that only the server refuses.
func TestServerChecksEachVerb(t *testing.T) {
	kit.NeedsRoot(t)
	for _, group := range []string{"", "5000"} {
		socket := groupServer(t, group)
		if err := os.Chmod(socket, 0o666); err != nil {
			t.Fatal(err)
		}
		gid := 1000
		if group == "" {
			gid = 0 // the zero Group is not the group of root
		}
		c := clientAs(socket, 1000, gid, []int{4999, 5001})
		for _, v := range verbs {
			err := v.call(c)
			isError(t, err, CodePermission, "control: "+v.name+": permission denied to uid 1000; run as root")
			if err == nil {
				continue
			}
			if got := strings.Contains(err.Error(), "group 5000"); got != (v.reads && group != "") {
				t.Errorf("%s: got error %q; only an error of a verb for the group may name it", v.name, err)
			}
		}
	}
}

// TestSocketIsNeverOpenToOthers connects between bind(2) and the rename, with an empty umask.
func TestSocketIsNeverOpenToOthers(t *testing.T) {
	kit.NeedsRoot(t)
	defer unix.Umask(unix.Umask(0))
	for _, group := range []string{"", "5000"} {
		fi, err := os.Lstat(groupServer(t, group))
		if err != nil {
			t.Fatal(err)
		}
		want := os.FileMode(0o600)
		if group != "" {
			want = 0o660 // the mask of the ACL
		}
		if fi.Mode().Perm() != want {
			t.Errorf("mode of the socket for group %q: got %v, want %v", group, fi.Mode().Perm(), want)
		}
	}
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenPrivate(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fi, err := os.Lstat(path); err != nil || fi.Mode().Perm() != socketMode {
		t.Errorf("mode of the socket after bind(2): got %v, %v; want %v", fi, err, os.FileMode(socketMode))
	}
}

func TestSocketOnFileSystemWithoutACLs(t *testing.T) {
	kit.NeedsRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "ramfs", 0, "mode=0755"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, 0)
	g, err := LookupGroup("5000")
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen(filepath.Join(dir, "s"), g)
	if err == nil {
		l.Close()
		l.Release()
	}
	isError(t, err, CodeSystem, "set ACL for group 5000: operation not supported; choose")
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("files after the error: got %v, want none", left)
	}
}

func TestLookupGroup(t *testing.T) {
	if g, err := LookupGroup(""); err != nil || g != (Group{}) {
		t.Errorf("no group: got %+v, %v", g, err)
	}
	if g, err := LookupGroup("daemon"); err != nil || g != (Group{"daemon", 1}) { // group 1 of Debian
		t.Errorf("daemon: got %+v, %v", g, err)
	}
	_, err := LookupGroup("no-such-group")
	isError(t, err, CodeUsage, `unknown group "no-such-group"; create it`)
	_, err = LookupGroup("4294967295")
	isError(t, err, CodeUsage, "unknown group")
}
