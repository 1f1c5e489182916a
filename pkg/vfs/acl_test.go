package vfs

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// shellAs runs a shell script in dir as a user without groups.
func shellAs(uid uint32, dir, script string) (string, error) {
	cmd := exec.Command("sh", "-c", `cd -- "$0" && `+script, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestACLsEqualServer runs setfacl(1) on the mount and on a local directory, and compares the ACLs
// on the mount, in the exported directory and in the local directory.
func TestACLsEqualServer(t *testing.T) {
	kit.NeedsPrograms(t, "getfacl", "setfacl")
	t.Parallel()
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{})
	local := t.TempDir()
	for _, dir := range []string{m.dir, local} {
		must(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o640))
		must(t, os.Mkdir(filepath.Join(dir, "d"), 0o750))
	}
	for _, script := range []string{
		"setfacl -m u:1234:rw f",
		"setfacl -m g:77:r,m::rwx f",
		"chmod 604 f",
		"setfacl -x u:1234 f",
		"setfacl -b f",
		"setfacl -m u:1234:rwx d",
		"setfacl -d -m u:1234:rx,g:9:- d",
		"setfacl -m g:5:x d",
		"touch d/f; mkdir d/d",
		"umask 0; touch d/f2; mkdir d/d2",
		"umask 077; touch d/f3; mkdir d/d3; touch g; mkdir e",
		"umask 077; set -C; : > d/excl; : > excl", // O_EXCL
		"umask 077; mkfifo d/p p",
		"setfacl -k d",
		"setfacl -b d",
		"umask 027; touch d/f4; mkdir d/d4",
	} {
		files := "; find . | LC_ALL=C sort | xargs getfacl -cn"
		on := run(t, m.dir, "sh", "-ec", script+files)
		exported := run(t, e.dir, "sh", "-c", files[2:])
		want := run(t, local, "sh", "-ec", script+files)
		if on != want || exported != want {
			t.Errorf("%s: got on the mount\n%s\nin the exported directory\n%s\nwant\n%s", script, on, exported, want)
		}
	}
}

// TestACLGrantsAndDenies checks the permissions of users that an ACL names.
func TestACLGrantsAndDenies(t *testing.T) {
	kit.NeedsPrograms(t, "setfacl")
	t.Parallel()
	m := startOwnExport(t).mount(t, mountConfig{}).severalUsers()
	must(t, os.Chmod(m.dir, 0o755))
	must(t, os.WriteFile(m.path("f"), []byte("data"), 0o600))
	must(t, os.Mkdir(m.path("d"), 0o755))
	must(t, os.WriteFile(m.path("d/f"), []byte("data"), 0o644))
	run(t, m.dir, "setfacl", "-m", "u:1234:r,g:9:w", "f")
	run(t, m.dir, "setfacl", "-m", "u:1234:-", "d")
	for _, tt := range []struct {
		uid    uint32
		script string
		ok     bool
	}{
		{1234, "cat f", true},
		{1234, "test -r f", true},
		{1234, "echo x > f", false},
		{1235, "cat f", false},
		{1235, "cat d/f", true},
		{1234, "cat d/f", false},
		{1234, "ls d", false},
	} {
		if out, err := shellAs(tt.uid, m.dir, tt.script); (err == nil) != tt.ok {
			t.Errorf("%s as uid %d: got %v (%s), want success %v", tt.script, tt.uid, err, out, tt.ok)
		}
	}
	if out, err := shellAs(1234, m.dir, "setfacl -m u:1234:rw f"); err == nil {
		t.Errorf("setfacl by another user: got success (%s), want failure", out)
	}
}

// TestWithoutACLs checks a mount with noacl, a server without NFSACL, which is asked once, and
// NFS-Ganesha, which supports GETACL but not SETACL.
func TestWithoutACLs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name      string
		start     func(*testing.T) *export
		noACL     bool
		refuse    bool // the server does not have the program
		supported bool
		calls     int32 // of NFSACL; -1 for any number
	}{
		{"noacl", startOwnExport, true, false, false, 0},
		{"server without NFSACL", startOwnExport, false, true, false, 1},
		{"NFS-Ganesha", startExport, false, false, true, -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var calls atomic.Int32
			m := tt.start(t).mount(t, mountConfig{noACL: tt.noACL, wrap: func(c nfs3.Caller) nfs3.Caller {
				return callerFunc(func(ctx context.Context, m *sunrpc.Message) error {
					if m.Prog == nfsacl.Program {
						if calls.Add(1); tt.refuse {
							return &sunrpc.AcceptError{Stat: sunrpc.ProgUnavail}
						}
					}
					return c.Call(ctx, m)
				})
			}})
			must(t, os.WriteFile(m.path("f"), nil, 0o644))
			acl := nfsacl.FromMode(0o600).AppendXattr(nil)
			for range 2 {
				// The kernel reports that the file has no ACL when it knows that there are none.
				_, err := unix.Getxattr(m.path("f"), nfsacl.XattrAccess, make([]byte, 100))
				if !errors.Is(err, syscall.ENODATA) && !errors.Is(err, syscall.EOPNOTSUPP) {
					t.Errorf("getxattr: got %v, want ENODATA or EOPNOTSUPP", err)
				}
				wantErrno(t, "setxattr", unix.Setxattr(m.path("f"), nfsacl.XattrAccess, acl, 0), syscall.EOPNOTSUPP)
			}
			if n := calls.Load(); m.fs.SupportsACLs() != tt.supported || tt.calls >= 0 && n != tt.calls {
				t.Errorf("got %d calls of NFSACL, supported %v; want %d, %v", n, m.fs.SupportsACLs(), tt.calls,
					tt.supported)
			}
		})
	}
}

// A callerFunc is an nfs3.Caller.
type callerFunc func(ctx context.Context, m *sunrpc.Message) error

func (f callerFunc) Call(ctx context.Context, m *sunrpc.Message) error { return f(ctx, m) }

// TestOtherAttributesAreNotSupported checks extended attributes that are not ACLs.
func TestOtherAttributesAreNotSupported(t *testing.T) {
	t.Parallel()
	m, s := startOwnExport(t).mountScripted(t, mountConfig{})
	must(t, os.WriteFile(m.path("f"), nil, 0o644))
	before := s.aclCount()
	for _, name := range []string{"user.x", "trusted.y"} {
		_, err := unix.Getxattr(m.path("f"), name, nil)
		wantErrno(t, "getxattr "+name, err, syscall.EOPNOTSUPP)
		wantErrno(t, "removexattr "+name, unix.Removexattr(m.path("f"), name), syscall.EOPNOTSUPP)
		wantErrno(t, "setxattr "+name, unix.Setxattr(m.path("f"), name, []byte("x"), 0), syscall.EOPNOTSUPP)
	}
	if n := s.aclCount() - before; n != 0 {
		t.Errorf("NFSACL calls for other attributes: got %d, want 0", n)
	}
	list := make([]byte, 1000)
	if n, err := unix.Listxattr(m.path("f"), list); err != nil || n != 0 {
		t.Errorf("listxattr without ACL: got %q, %v, want none", list[:max(n, 0)], err)
	}
	acl := append(nfsacl.FromMode(0o600), nfsacl.Entry{Tag: nfsacl.TagUser, Perm: 4, ID: 7},
		nfsacl.Entry{Tag: nfsacl.TagMask, Perm: 4, ID: nfsacl.UndefinedID})
	acl, err := nfsacl.ParseXattr(acl.AppendXattr(nil)) // sorts
	must(t, err)
	must(t, unix.Setxattr(m.path("f"), nfsacl.XattrAccess, acl.AppendXattr(nil), 0))
	n, err := unix.Listxattr(m.path("f"), list)
	if got := strings.TrimRight(string(list[:max(n, 0)]), "\x00"); err != nil || got != nfsacl.XattrAccess {
		t.Errorf("listxattr: got %q, %v, want %q", got, err, nfsacl.XattrAccess)
	}
}

func wantErrno(t *testing.T, what string, err error, want syscall.Errno) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}
