package nfsd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

func TestRootIsSquashed(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, func(cfg *Config) { cfg.NoRootSquash = false })
	for _, tt := range []struct {
		name     string
		cred     []byte
		uid, gid uint32
	}{
		{"root", mounts.Credential(0, 0), anonymous, anonymous},
		{"root of another group", mounts.Credential(0, 7), anonymous, 7},
		{"user of group 0", mounts.Credential(1000, 0), 1000, anonymous},
		{"user", mounts.Credential(1000, 1001), 1000, 1001},
		{"no credential", sunrpc.AppendAuthNone(nil), anonymous, anonymous},
	} {
		c.MustCreate(tt.cred, c.Root, tt.name, 0o644)
		if st := c.stat(tt.name); st.Uid != tt.uid || st.Gid != tt.gid {
			t.Errorf("%s: got file of %d:%d, want %d:%d", tt.name, st.Uid, st.Gid, tt.uid, tt.gid)
		}
	}
	c.OK(os.WriteFile(c.path("secret"), []byte("x"), 0o640)) // of root:root
	fh := c.MustLookup(c.Root, "secret").FH
	for _, cred := range [][]byte{mounts.Credential(0, 0), mounts.Credential(1000, 0),
		mounts.Credential(1000, 1000, 5, 0)} {
		c.Want(c.Read(c.Ctx, cred, fh, 0, make([]byte, 1), new(nfs3.ReadResult)), unix.EACCES)
	}
}

// A caller whose identity the kernel does not take gets an error, and nothing runs as root.
func TestIdentityThatCannotBeTaken(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	c.OK(os.WriteFile(c.path("f"), []byte("x"), 0o600))
	open := c.MustCreate(root, c.Root, "open", 0o666)
	fh := c.MustLookup(c.Root, "f").FH
	for name, cred := range map[string][]byte{
		"uid":   mounts.Credential(badID, 1000),
		"gid":   mounts.Credential(1000, badID),
		"group": mounts.Credential(1000, 1000, badID),
	} {
		how := nfs3.CreateHow{Mode: nfs3.Guarded}
		c.Want(c.Create(c.Ctx, cred, c.Root, name, &how, new(nfs3.CreateResult)), unix.EACCES)
		c.Want(c.Read(c.Ctx, cred, fh, 0, make([]byte, 1), new(nfs3.ReadResult)), unix.EACCES)
		c.Want(c.Write(c.Ctx, cred, open, 0, []byte("y"), nfs3.Unstable, new(nfs3.WriteResult)), unix.EACCES)
		c.Want(c.Remove(c.Ctx, cred, c.Root, "f", new(nfs3.WccData)), unix.EACCES)
		if _, err := os.Lstat(c.path(name)); err == nil {
			t.Errorf("%s: the file was created", name)
		}
	}
}

func TestCredentialsThatDoNotDecode(t *testing.T) {
	c := start(t, nil)
	gss := sunrpc.AppendUint32(sunrpc.AppendUint32(nil, sunrpc.FlavorGSS), 0)
	short := sunrpc.AppendOpaque(sunrpc.AppendUint32(nil, sunrpc.FlavorSys), make([]byte, 8))
	long := sunrpc.AppendOpaque(sunrpc.AppendUint32(nil, sunrpc.FlavorSys), make([]byte, 24))
	for name, cred := range map[string][]byte{"RPCSEC_GSS": gss, "short AUTH_SYS": short, "long AUTH_SYS": long} {
		err := c.GetAttr(c.Ctx, cred, c.Root, new(nfs3.Attr))
		var denied *sunrpc.DeniedError
		if !errors.As(err, &denied) || denied.Auth != sunrpc.AuthBadCred {
			t.Errorf("%s: got %v, want AUTH_BADCRED", name, err)
		}
	}
}

// Only the owner of a file may read and write it whatever the mode says.
func TestOwnerOverride(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	fh := c.MustCreate(user, c.Root, "f", 0)
	c.write(user, fh, "data")
	if got := c.read(user, fh); got != "data" {
		t.Errorf("got %q, want what was written", got)
	}
	var wcc nfs3.WccData
	c.OK(c.SetAttr(c.Ctx, user, fh, &nfs3.SetAttr{HasSize: true, Size: 2}, nil, &wcc))
	c.OK(c.Commit(c.Ctx, user, fh, 0, 0, new(nfs3.CommitResult)))
	other := mounts.Credential(1001, 1000)
	c.Want(c.Read(c.Ctx, other, fh, 0, make([]byte, 1), new(nfs3.ReadResult)), unix.EACCES)
	c.Want(c.Write(c.Ctx, other, fh, 0, []byte("x"), nfs3.Unstable, new(nfs3.WriteResult)), unix.EACCES)
	c.Want(c.SetAttr(c.Ctx, other, fh, &nfs3.SetAttr{HasSize: true}, nil, &wcc), unix.EACCES)
	// ACCESS tells what the mode says: open(2) of a client goes by it.
	var acc nfs3.AccessResult
	c.OK(c.Access(c.Ctx, user, fh, nfs3.AccessRead|nfs3.AccessModify, &acc))
	if acc.Access != 0 {
		t.Errorf("ACCESS: got %#x, want 0", acc.Access)
	}
}

func TestExecutableIsReadable(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	fh := c.MustCreate(root, c.Root, "program", 0o711)
	c.write(root, fh, "code")
	if got := c.read(user, fh); got != "code" {
		t.Errorf("got %q, want the program", got)
	}
	c.Want(c.Write(c.Ctx, user, fh, 0, []byte("x"), nfs3.Unstable, new(nfs3.WriteResult)), unix.EACCES)
}

// Clients can set the set-id bits of files only if the server allows it. The set-group-ID bit of a
// directory gives no rights.
func TestSetIDBits(t *testing.T) {
	for _, allow := range []bool{false, true} {
		c := start(t, func(cfg *Config) { cfg.AllowSUID = allow })
		set := nfs3.SetAttr{HasMode: true, Mode: 0o6755}
		c.MustCreate(user, c.Root, "CREATE", 0o6755)
		c.OK(c.Mknod(c.Ctx, user, c.Root, "MKNOD", nfs3.NF3FIFO, &set, nfs3.Device{}, new(nfs3.CreateResult)))
		file := c.MustCreate(user, c.Root, "SETATTR", 0o644)
		c.OK(c.SetAttr(c.Ctx, user, file, &set, nil, new(nfs3.WccData)))
		dir := c.mkdir(user, c.Root, "directory", 0o755)
		c.OK(c.SetAttr(c.Ctx, user, dir, &set, nil, new(nfs3.WccData)))
		for name, want := range map[string]uint32{"CREATE": 0o755, "MKNOD": 0o755, "SETATTR": 0o755,
			"directory": 0o6755} {
			if allow {
				want = 0o6755
			}
			if got := c.stat(name).Mode & nfs3.ModeMask; got != want {
				t.Errorf("%s, allowed %v: got mode %o, want %o", name, allow, got, want)
			}
		}
	}
}

// WRITE and SETATTR of the size run as the caller, so that the kernel clears set-id bits.
func TestWriteClearsSetID(t *testing.T) {
	c := start(t, func(cfg *Config) { cfg.AllowSUID = true })
	size := nfs3.SetAttr{HasSize: true, Size: 1}
	write := func(fh nfs3.FH) error {
		return c.Write(c.Ctx, user, fh, 0, []byte("x"), nfs3.Unstable, new(nfs3.WriteResult))
	}
	create := func(nfs3.FH) error {
		return c.Create(c.Ctx, user, c.Root, "CREATE", &nfs3.CreateHow{Attr: size}, new(nfs3.CreateResult))
	}
	for _, tt := range []struct {
		name string
		do   func(fh nfs3.FH) error
	}{
		{"WRITE", write},
		{"SETATTR", func(fh nfs3.FH) error { return c.SetAttr(c.Ctx, user, fh, &size, nil, new(nfs3.WccData)) }},
		{"CREATE", create},
	} {
		fh := c.MustCreate(root, c.Root, tt.name, 0o666)
		c.OK(c.SetAttr(c.Ctx, root, fh, &nfs3.SetAttr{HasMode: true, Mode: 0o6777}, nil, new(nfs3.WccData)))
		c.OK(tt.do(fh))
		if st := c.stat(tt.name); st.Mode&0o7777 != 0o777 {
			t.Errorf("%s: got mode %o, want 777", tt.name, st.Mode&0o7777)
		}
	}
}

// A change of mode, owner or groups has an effect at once on permissions that are cached.
func TestPermissionsAreCurrent(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	fh := c.MustCreate(root, c.Root, "f", 0o640)
	member := mounts.Credential(1000, 1000, 4242)
	read := func(cred []byte) error {
		return c.Read(c.Ctx, cred, fh, 0, make([]byte, 1), new(nfs3.ReadResult))
	}
	for range 2 {
		c.Want(read(member), unix.EACCES)
		c.OK(os.Chown(c.path("f"), 0, 4242))
		c.OK(read(member))
		c.Want(read(user), unix.EACCES)
		c.OK(os.Chmod(c.path("f"), 0o600))
		c.Want(read(member), unix.EACCES)
		c.OK(os.Chmod(c.path("f"), 0o644))
		c.OK(read(user))
		c.OK(os.Chmod(c.path("f"), 0o640))
		c.OK(os.Chown(c.path("f"), 0, 0))
	}
}

// While it acts for a caller, a thread lacks the capabilities that bypass quotas and reserved
// blocks; afterwards every thread has the server's identity.
func TestThreadIdentity(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	who := cred{uid: 1000, gid: 1001, n: 2}
	who.gids[0], who.gids[1] = 7, 8
	before := threadStatus(t, "/proc/thread-self/status")
	err := c.s.id.as(&who, func() error {
		got := threadStatus(t, "/proc/thread-self/status")
		if got.uid != "1000" || got.gid != "1001" || got.groups != "7 8" {
			t.Errorf("got %+v, want 1000:1001 with groups 7 and 8", got)
		}
		for _, c := range callerCaps {
			if got.caps&(1<<c) != 0 {
				t.Errorf("capability %d is effective", c)
			}
		}
		return nil
	})
	c.OK(err)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 50 {
				name := fmt.Sprintf("%d-%d", i, j)
				var res nfs3.CreateResult
				how := nfs3.CreateHow{Mode: nfs3.Guarded}
				cred := mounts.Credential(uint32(1000+i), 1000, 9)
				if err := c.Create(c.Ctx, cred, c.Root, name, &how, &res); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for i := range 8 {
		if st := c.stat(fmt.Sprintf("%d-0", i)); st.Uid != uint32(1000+i) {
			t.Errorf("got owner %d, want %d", st.Uid, 1000+i)
		}
	}
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(tasks) == 0 {
		t.Fatalf("got tasks %v, error %v", tasks, err)
	}
	for _, task := range tasks {
		if got := threadStatus(t, task); got != before && got != (taskStatus{}) {
			t.Errorf("%s: got %+v, want %+v", task, got, before)
		}
	}
}

type taskStatus struct {
	uid, gid, groups string // of the file system
	caps             uint64
}

func threadStatus(t *testing.T, name string) (s taskStatus) {
	b, err := os.ReadFile(name)
	if err != nil {
		return s // the thread has ended
	}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch fields := strings.Fields(value); key {
		case "Uid":
			s.uid = fields[3]
		case "Gid":
			s.gid = fields[3]
		case "Groups":
			s.groups = strings.Join(fields, " ")
		case "CapEff":
			if _, err := fmt.Sscanf(fields[0], "%x", &s.caps); err != nil {
				t.Error(err)
			}
		}
	}
	return s
}

// In a user namespace that maps root alone, calls of root run and calls of others are refused. The
// kernel does not open files by handle there. A server that is not root does everything as its own
// user.
func TestUserNamespace(t *testing.T) {
	kit.NeedsRoot(t)
	for uid, want := range map[int][]string{0: {"mine"}, 1000: {"mine", "theirs"}} {
		dir := t.TempDir()
		runInNamespace(t, dir, uid)
		for _, name := range want {
			if _, err := os.Lstat(filepath.Join(dir, "export", name)); err != nil {
				t.Errorf("server of uid %d: %v", uid, err)
			}
		}
	}
}

// runInNamespace runs inNamespace in a user namespace in which the user of this process is uid.
func runInNamespace(t *testing.T, dir string, uid int) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), namespaceEnv+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: uid, Size: 1}}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// inNamespace is what runInNamespace runs.
func inNamespace(dir string) error {
	cfg := Config{Dir: filepath.Join(dir, "export"), StateDir: filepath.Join(dir, "state"), NoRootSquash: true}
	if err := os.Mkdir(cfg.Dir, 0o777); err != nil {
		return err
	}
	if err := os.Chmod(cfg.Dir, 0o777); err != nil {
		return err
	}
	s, err := New(cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	c := nfs3.NewClient(&caller{s: s, peer: peer})
	var res nfs3.CreateResult
	how := nfs3.CreateHow{Mode: nfs3.Guarded}
	ctx := context.Background()
	if err := c.Create(ctx, root, s.rootFH, "mine", &how, &res); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return c.Create(ctx, mounts.Credential(1234, 1234), s.rootFH, "theirs", &how, &res)
	}
	for _, id := range []uint32{1000, anonymous} {
		err := c.Create(ctx, mounts.Credential(id, id), s.rootFH, "theirs", &how, &res)
		if nfs3.Errno(err) != unix.EACCES {
			return fmt.Errorf("CREATE of uid %d: got %v, want EACCES", id, err)
		}
	}
	return nil
}

// A default ACL restricts the mode of new objects, also when it grants what the umask would.
func TestDefaultACLRestrictsMode(t *testing.T) {
	defer unix.Umask(unix.Umask(0o022))
	c := start(t, nil)
	acl := nfsacl.FromMode(0o755).AppendXattr(nil)
	if err := unix.Setxattr(c.dir, "system.posix_acl_default", acl, 0); err != nil {
		t.Fatalf("set default ACL: %v", err)
	}
	c.MustCreate(root, c.Root, "f", 0o666)
	c.mkdir(root, c.Root, "d", 0o777)
	for name, want := range map[string]uint32{"f": 0o644, "d": 0o755} {
		if got := c.stat(name).Mode & 0o777; got != want {
			t.Errorf("mode of %s: got %o, want %o", name, got, want)
		}
	}
}

// open(O_TRUNC) of a Linux client sets the size and the server's time in one SETATTR. Write
// permission suffices for both.
func TestTruncateByAnotherUser(t *testing.T) {
	c := start(t, nil)
	fh := c.MustCreate(user, c.Root, "f", 0o666)
	c.write(user, fh, "data")
	set := nfs3.SetAttr{HasSize: true, MtimeHow: nfs3.SetToServerTime}
	if err := c.SetAttr(c.Ctx, mounts.Credential(2000, 2000), fh, &set, nil, new(nfs3.WccData)); err != nil {
		t.Errorf("SETATTR size and time: got %v, want success", err)
	}
}

// Some file systems keep times in seconds. Two changes within one second then have one ctime, and
// permissions must not be cached until the next one.
func TestPermissionsWithCoarseTimes(t *testing.T) {
	for _, tt := range []struct {
		nsec int64
		age  time.Duration
		want bool
	}{
		{0, 999 * time.Millisecond, false}, {0, 2 * time.Second, false}, {0, 3 * time.Second, true},
		{1, 10 * time.Millisecond, false}, {1, 200 * time.Millisecond, true},
	} {
		ctime := unix.Timespec{Sec: 1000, Nsec: tt.nsec}
		if got := permSettled(ctime, time.Unix(ctime.Unix()).Add(tt.age)); got != tt.want {
			t.Errorf("ctime with %d ns, after %v: got settled %v, want %v", tt.nsec, tt.age, got, tt.want)
		}
	}
}
