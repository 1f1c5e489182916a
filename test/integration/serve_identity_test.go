package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const squashedID = 65534

// identityDir is a directory with files that show which identity a call has.
func identityDir(t *testing.T) string {
	t.Helper()
	dir := mounts.OpenTempDir(t)
	runScript(t, dir, "r put root secret 0600; r put group secret 0640; r put ann secret 0600; r chown ann 1001 1001;"+
		"r put shared x 0666; r mkdir private 0755; r mkdir public 0777; r chmod public 0777; r put private/f x")
	return dir
}

// An attempt is what a credential tries on identityDir. Each fails for an identity that is neither
// root nor in group 0.
func (c *rawClient) attempts(cred []byte) map[string]error {
	read := func(name string) error {
		fh := c.mustLookup(name)
		_, err := c.read(cred, fh)
		return err
	}
	set := func(name string, attr nfs3.SetAttr) error {
		var wcc nfs3.WccData
		return c.SetAttr(c.ctx, cred, c.mustLookup(name), &attr, nil, &wcc)
	}
	private, public := c.mustLookup("private"), c.mustLookup("public")
	var wcc nfs3.WccData
	var w nfs3.WriteResult
	var made nfs3.CreateResult
	_, createErr := c.create(cred, private, "new", 0o644)
	return map[string]error{
		"read a file of root":           read("root"),
		"read a file of group 0":        read("group"),
		"create in a directory of root": createErr,
		"write to a file of root": c.Write(c.ctx, cred, c.mustLookup("root"), 0, []byte("x"), nfs3.FileSync,
			&w),
		"truncate a file of root":         set("root", nfs3.SetAttr{HasSize: true}),
		"change the mode of root's file":  set("root", nfs3.SetAttr{HasMode: true, Mode: 0o666}),
		"change the owner of root's file": set("shared", nfs3.SetAttr{HasUID: true, UID: 1001}),
		"remove a name of root":           c.Remove(c.ctx, cred, private, "f", &wcc),
		"make a device": c.Mknod(c.ctx, cred, public, "dev", nfs3.NF3CHR, &nfs3.SetAttr{HasMode: true, Mode: 0o666},
			nfs3.Device{Major: 1, Minor: 3}, &made),
	}
}

// checkPowerless checks that cred has no rights of root, or of group 0, and makes no file of root.
func (c *rawClient) checkPowerless(t *testing.T, served, what string, cred []byte) {
	t.Helper()
	for name, err := range c.attempts(cred) {
		if err == nil {
			t.Errorf("%s: could %s", what, name)
		}
	}
	c.checkNewFile(t, served, what, cred, false)
}

// checkNewFile makes a file where everybody may. Root may own it only if root is expected. The call
// may also be refused, if root is not expected.
func (c *rawClient) checkNewFile(t *testing.T, served, what string, cred []byte, root bool) {
	t.Helper()
	_, err := c.create(cred, c.mustLookup("public"), "new", 0o644)
	path := filepath.Join(served, "public", "new")
	var st unix.Stat_t
	switch statErr := unix.Lstat(path, &st); {
	case err != nil && statErr == nil:
		t.Errorf("%s: CREATE failed (%v) and made a file", what, err)
	case err != nil && root:
		t.Errorf("%s: CREATE: %v", what, err)
	case err == nil && statErr != nil:
		t.Errorf("%s: CREATE made no file: %v", what, statErr)
	case err == nil && (st.Uid == 0) != root:
		t.Errorf("%s: new file has owner %d:%d", what, st.Uid, st.Gid)
	}
	_ = os.Remove(path)
}

// TestServeIdentity sends credentials that must never have the rights of root.
func TestServeIdentity(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := identityDir(t)
	s := mounts.ServeDir(t, served)
	garbage := append(sunrpc.AppendUint32(nil, sunrpc.FlavorSys), 0, 0, 0, 4, 1, 2, 3, 4)
	for _, tr := range transports {
		c, err := tr.dial(t, s)
		if err != nil {
			t.Fatalf("%s: %v", tr.name, err)
		}
		for name, cred := range map[string][]byte{
			"uid 0":                     credential(0, 0),
			"uid 0 with groups":         credential(0, 0, 0, 1, 2, 3),
			"gid 0":                     credential(1003, 0),
			"group 0":                   credential(1003, 1003, 0),
			"uid 0xffffffff":            credential(0xffffffff, 0xffffffff),
			"uid 0xffffffff with gid 0": credential(0xffffffff, 0),
			"gid 0xffffffff":            credential(1003, 0xffffffff),
			"group 0xffffffff":          credential(1003, 1003, 0xffffffff),
			"uid 0xfffffffe":            credential(0xfffffffe, 0xfffffffe),
			"uid 0x80000000":            credential(1<<31, 1<<31),
			"AUTH_NONE":                 sunrpc.AppendAuthNone(nil),
			"malformed AUTH_SYS":        garbage,
			"RPCSEC_GSS":                sunrpc.AppendOpaque(sunrpc.AppendUint32(nil, 6), make([]byte, 20)),
		} {
			c.checkPowerless(t, served, tr.name+", "+name, cred)
		}
		if _, err := c.read(credential(1001, 1001), c.mustLookup("ann")); err != nil {
			t.Errorf("%s: the owner cannot read a file: %v", tr.name, err)
		}
	}
	c := mustDial(t, s)
	if _, err := c.create(credential(0, 0), c.mustLookup("public"), "squashed", 0o644); err != nil {
		t.Errorf("CREATE of a squashed root: %v", err)
	}
	var st unix.Stat_t
	err := unix.Lstat(filepath.Join(served, "public/squashed"), &st)
	if err != nil || st.Uid != squashedID || st.Gid != squashedID {
		t.Errorf("file of a squashed root has owner %d:%d, %v, want %d:%d", st.Uid, st.Gid, err, squashedID, squashedID)
	}
}

func TestServeNoRootSquash(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := identityDir(t)
	s := mounts.ServeDir(t, served, "--no-root-squash")
	for _, tr := range transports {
		c, err := tr.dial(t, s)
		if err != nil {
			t.Fatalf("%s: %v", tr.name, err)
		}
		if got, err := c.read(credential(0, 0), c.mustLookup("root")); err != nil || got != "secret" {
			t.Errorf("%s: read as root: got %q, %v", tr.name, got, err)
		}
		c.checkNewFile(t, served, tr.name, credential(0, 0), true)
		for name, cred := range map[string][]byte{"uid 0xffffffff": credential(0xffffffff, 0xffffffff),
			"gid 0xffffffff": credential(1003, 0xffffffff), "uid 1003": credential(1003, 1003),
			"AUTH_NONE": sunrpc.AppendAuthNone(nil)} {
			c.checkPowerless(t, served, tr.name+", "+name, cred)
		}
	}
}

// TestServeWithoutPrivilege runs the server where it cannot take the identity of a caller. The call
// must then be refused: it must not run as root.
func TestServeWithoutPrivilege(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	for name, wrap := range map[string][]string{
		"no CAP_SETUID":  {"setpriv", "--bounding-set=-setuid", "--inh-caps=-setuid"},
		"no CAP_SETGID":  {"setpriv", "--bounding-set=-setgid", "--inh-caps=-setgid"},
		"user namespace": {"unshare", "--user", "--map-root-user"},
	} {
		t.Run(name, func(t *testing.T) {
			served := identityDir(t)
			s := mounts.ServeDirWith(t, wrap, served, "--no-root-squash")
			c := mustDial(t, s)
			for _, uid := range []uint32{1001, 1003, squashedID, 0xffffffff} {
				what := fmt.Sprintf("uid %d", uid)
				c.checkPowerless(t, served, what, credential(uid, uid))
			}
		})
	}
}

// TestServeAllow checks the rules of --allow on both ports, for MOUNT and for NFS with a handle
// that the client already has.
func TestServeAllow(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := identityDir(t)
	open := mounts.ServeDir(t, served)
	handle := mustDial(t, open).root
	open.End(t, syscall.SIGTERM)
	for allow, allowed := range map[string]bool{"127.0.0.0/8": true, "192.0.2.0/24,127.0.0.1/32": true,
		"192.0.2.0/24": false, "127.0.0.2/32,2001:db8::/32": false} {
		s := mounts.ServeDir(t, served, "--allow", allow)
		for _, tr := range transports {
			c, err := tr.dial(t, s)
			if (err == nil) != allowed {
				t.Errorf("--allow %s, %s: MNT: got %v, want allowed %v", allow, tr.name, err, allowed)
			}
			if c == nil {
				continue // the connection was refused
			}
			var attr nfs3.Attr
			if err := c.GetAttr(c.ctx, credential(0, 0), handle, &attr); (err == nil) != allowed {
				t.Errorf("--allow %s, %s: GETATTR: got %v, want allowed %v", allow, tr.name, err, allowed)
			}
		}
	}
	for _, bad := range []string{"10.0.0.0/33", "localhost", "", "10.0.0.0/8,"} {
		p := mounts.StartProcess(t, nil, nil, "serve", served, "--rdma-listen", "127.0.0.1:0", "--tcp-listen",
			"127.0.0.1:0", "--allow", bad)
		select {
		case <-p.Ended:
			if p.Cmd.ProcessState.ExitCode() == 0 || !strings.Contains(p.Out.String(), "allow") {
				t.Errorf("--allow %q: exit status %d, output %q", bad, p.Cmd.ProcessState.ExitCode(), p.Out.String())
			}
		case <-time.After(10 * time.Second):
			t.Errorf("--allow %q: the server runs", bad)
		}
	}
}

// TestServeReadOnly sends every procedure that changes something.
func TestServeReadOnly(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	runScript(t, served, "r umask 0; r put f content 0666; r mkdir d 0777; r put d/f x 0666; r symlink f l")
	s := mounts.ServeDir(t, served, "--read-only", "--no-root-squash")
	before := runScript(t, served, "")
	for _, tr := range transports {
		c, err := tr.dial(t, s)
		if err != nil {
			t.Fatalf("%s: %v", tr.name, err)
		}
		f, d, cred := c.mustLookup("f"), c.mustLookup("d"), credential(0, 0)
		if got, err := c.read(cred, f); err != nil || got != "content" {
			t.Errorf("%s: READ: got %q, %v", tr.name, got, err)
		}
		for name, err := range c.changes(cred, f, d) {
			if !errors.Is(err, syscall.EROFS) {
				t.Errorf("%s: %s: got %v, want EROFS", tr.name, name, err)
			}
		}
		const changing = 0x4 | 0x8 | 0x10 // MODIFY, EXTEND, DELETE
		for _, fh := range []nfs3.FH{f, d} {
			var a nfs3.AccessResult
			if err := c.Access(c.ctx, cred, fh, 0x3f, &a); err != nil || a.Access&changing != 0 {
				t.Errorf("%s: ACCESS: got %#x, %v, want no right to change", tr.name, a.Access, err)
			}
		}
	}
	if after := runScript(t, served, ""); strings.Join(after, "\n") != strings.Join(before, "\n") {
		t.Errorf("directory changed: got\n%s\nwant\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

// changes tries every procedure that changes something, on file f and directory d.
func (c *rawClient) changes(cred []byte, f, d nfs3.FH) map[string]error {
	var wcc nfs3.WccData
	var w nfs3.WriteResult
	var made nfs3.CreateResult
	var renamed nfs3.RenameResult
	var linked nfs3.LinkResult
	set := &nfs3.SetAttr{HasMode: true, Mode: 0o600}
	create := func(mode nfs3.CreateMode, name string) error {
		return c.Create(c.ctx, cred, d, name, &nfs3.CreateHow{Mode: mode, Verf: nfs3.Verifier{1}}, &made)
	}
	return map[string]error{
		"SETATTR mode":     c.SetAttr(c.ctx, cred, f, set, nil, &wcc),
		"SETATTR size":     c.SetAttr(c.ctx, cred, f, &nfs3.SetAttr{HasSize: true}, nil, &wcc),
		"SETATTR times":    c.SetAttr(c.ctx, cred, f, &nfs3.SetAttr{MtimeHow: nfs3.SetToServerTime}, nil, &wcc),
		"WRITE":            c.Write(c.ctx, cred, f, 0, []byte("x"), nfs3.Unstable, &w),
		"CREATE unchecked": create(nfs3.Unchecked, "new"),
		"CREATE guarded":   create(nfs3.Guarded, "new"),
		"CREATE exclusive": create(nfs3.Exclusive, "new"),
		"MKDIR":            c.Mkdir(c.ctx, cred, d, "new", set, &made),
		"SYMLINK":          c.Symlink(c.ctx, cred, d, "new", "target", set, &made),
		"MKNOD":            c.Mknod(c.ctx, cred, d, "new", nfs3.NF3FIFO, set, nfs3.Device{}, &made),
		"REMOVE":           c.Remove(c.ctx, cred, d, "f", &wcc),
		"RMDIR":            c.Rmdir(c.ctx, cred, c.root, "d", &wcc),
		"RENAME":           c.Rename(c.ctx, cred, d, "f", d, "g", &renamed),
		"LINK":             c.Link(c.ctx, cred, f, d, "new", &linked),
	}
}

// TestServeSearchPermission lists a directory that the caller may read and not search. The listing
// must give no handle of a file in it, because a handle opens the file without a search.
func TestServeSearchPermission(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	runScript(t, served, "r mkdir d 0755; r put d/f secret 0644; r mkdir d/sub 0755; r chmod d 0744")
	s := mounts.ServeDir(t, served, "--no-root-squash")
	c := mustDial(t, s)
	cred, dir := credential(1001, 1001), c.mustLookup("d")
	if _, err := c.lookup(cred, dir, "f"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("LOOKUP without search permission: got %v, want EACCES", err)
	}
	var res nfs3.ReadDirResult
	err := c.ReadDirPlus(c.ctx, cred, dir, 0, nfs3.Verifier{}, 8192, 8192, &res, func(e *nfs3.DirEntry) bool {
		if name := string(e.Name); e.HasFH && name != "." && name != ".." {
			t.Errorf("READDIRPLUS without search permission returns a handle of %q", name)
		}
		return true
	})
	if err != nil {
		t.Errorf("READDIRPLUS with read permission: %v", err)
	}
}
