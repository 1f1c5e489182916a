package knfsd

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("acl", "POSIX ACLs set and read with setfacl and getfacl, inherited and enforced by the server",
	testACL)

// testACL compares ACLs on the mount with those of the same commands in a local directory, and
// reads them again through a second mount.
func testACL(t *testing.T, b bench) {
	kit.NeedsPrograms(t, "getfacl", "setfacl")
	m, other := b.mount(t, nil), b.mount(t, nil)
	if err := os.Chmod(filepath.Dir(m.dir), 0o755); err != nil { // other users use the mount too
		t.Fatal(err)
	}
	if !m.fs.SupportsACLs() {
		t.Fatal("NFSACL: the server does not support it")
	}
	const name = "acl"
	dir, local := filepath.Join(m.dir, name), filepath.Join(t.TempDir(), name)
	for _, d := range []string{dir, local} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, "f"), []byte("data"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const show = "; find . | LC_ALL=C sort | xargs getfacl -cn"
	for _, script := range []string{
		"setfacl -m u:1234:rw,g:77:r f",
		"setfacl -d -m u:1234:rx,g:9:- .",
		"umask 077; touch g; mkdir d; set -C; : > excl",
		"setfacl -b d; chmod 604 f",
		"setfacl -k .; umask 027; touch h",
	} {
		got, want := run(t, dir, "sh", "-c", script+show), run(t, local, "sh", "-c", script+show)
		if got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", script, got, want)
		}
		// The other mount may use its cached attributes for 3 seconds.
		seen := ""
		for end := time.Now().Add(opTimeout); seen != want && time.Now().Before(end); {
			seen = run(t, filepath.Join(other.dir, name), "sh", "-c", show[2:])
		}
		if seen != want {
			t.Errorf("%s: got on another mount\n%s\nwant\n%s", script, seen, want)
		}
	}
	run(t, dir, "sh", "-c", "setfacl -b f; chmod 600 f; setfacl -m u:1234:r f")
	for uid, ok := range map[uint32]bool{1234: true, 1235: false} {
		cmd := exec.Command("cat", filepath.Join(dir, "f"))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		if out, err := cmd.CombinedOutput(); (err == nil) != ok {
			t.Errorf("cat as uid %d: got %v (%s), want success %v", uid, err, out, ok)
		}
	}
	out, err := b.Run("stat -c %a " + lab.ExportRW + "/" + name + "/f")
	if mode := strings.TrimSpace(string(out)); err != nil || mode != "640" {
		t.Errorf("mode on the server: got %q, %v, want 640, which includes the mask", mode, err)
	}
	run(t, dir, "setfacl", "-b", "f")
	if n, err := syscall.Getxattr(filepath.Join(dir, "f"), nfsacl.XattrAccess, make([]byte, 100)); n > 0 {
		t.Errorf("ACL after its removal: got %d bytes, %v, want none", n, err)
	}
}
