package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const manyEntries = 5000

// makeEntries makes empty files keep0000 and on in dir, every tenth a directory.
func makeEntries(t *testing.T, dir string, n int) {
	t.Helper()
	for i := range n {
		name := filepath.Join(dir, fmt.Sprintf("keep%04d", i))
		var err error
		if i%10 == 0 {
			err = os.Mkdir(name, 0o755)
		} else {
			err = os.WriteFile(name, nil, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// churn creates and removes files in dir, with names that begin with "temp", until stop is called.
// stop returns the first error.
func churn(dir string) (stop func() error) {
	done := make(chan struct{})
	var workers sync.WaitGroup
	var once sync.Once
	var first error
	for w := range 2 {
		workers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				default:
				}
				name := filepath.Join(dir, fmt.Sprintf("temp%d.%d", w, i%300))
				err := os.WriteFile(name, nil, 0o644)
				if i%3 != 0 {
					err = errors.Join(err, os.Rename(name, name+"r"), os.Remove(name+"r"))
				}
				if err != nil {
					once.Do(func() { first = err })
					return
				}
			}
		})
	}
	return func() error {
		close(done)
		workers.Wait()
		return first
	}
}

// checkListing checks that names holds ".", ".." and the n names of makeEntries exactly once, and
// otherwise only names of churn.
func checkListing(names []string, n int) error {
	seen := map[string]int{}
	for _, name := range names {
		seen[name]++
	}
	for i := range n + 2 {
		name := fmt.Sprintf("keep%04d", i)
		switch i {
		case n:
			name = "."
		case n + 1:
			name = ".."
		}
		if seen[name] != 1 {
			return fmt.Errorf("listing has %q %d times, want once (%d entries)", name, seen[name], len(names))
		}
		delete(seen, name)
	}
	for name := range seen {
		if !strings.HasPrefix(name, "temp") {
			return fmt.Errorf("listing has an unknown name %q", name)
		}
	}
	return nil
}

func openDir(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open %s: %v", dir, err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func namesOf(entries []dirent) []string {
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.name)
	}
	return names
}

// TestServeListing reads directories through a mount, with small and large buffers.
func TestServeListing(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	s := mounts.ServeDir(t, served, "--no-root-squash")
	mnt := mounts.MountServed(t, s)

	t.Run("dot entries", func(t *testing.T) {
		writeFiles(t, served, map[string]string{"sub/file": "x"})
		for _, dir := range []string{mnt, mnt + "/sub"} {
			entries, err := getdents(openDir(t, dir), 4096, -1)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{".", ".."} {
				i := slices.IndexFunc(entries, func(e dirent) bool { return e.name == name })
				if i < 0 {
					t.Errorf("%s: no entry %q", dir, name)
					continue
				}
				var st unix.Stat_t
				if err := unix.Stat(dir+"/"+name, &st); err != nil {
					t.Fatal(err)
				}
				// The ".." of the root of a mount is outside of the mount.
				if (dir != mnt || name == ".") && entries[i].ino != st.Ino {
					t.Errorf("%s: entry %q has inode %d, want %d", dir, name, entries[i].ino, st.Ino)
				}
			}
		}
	})
	t.Run("5000 entries", func(t *testing.T) {
		dir := filepath.Join(served, "many")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		makeEntries(t, dir, manyEntries)
		for _, size := range []int{500, 32 << 10} {
			entries, err := getdents(openDir(t, mnt+"/many"), size, -1)
			if err == nil {
				err = checkListing(namesOf(entries), manyEntries)
			}
			if err != nil {
				t.Errorf("buffer of %d bytes: %v", size, err)
			}
		}
	})
	for dir, where := range map[string]string{"changes by the client": mnt, "changes by the server": served} {
		t.Run(dir, func(t *testing.T) {
			if err := os.Mkdir(filepath.Join(served, dir), 0o777); err != nil {
				t.Fatal(err)
			}
			makeEntries(t, filepath.Join(served, dir), 1000)
			stop := churn(filepath.Join(where, dir))
			for round := range 10 {
				entries, err := getdents(openDir(t, filepath.Join(mnt, dir)), 2000, -1)
				if err == nil {
					err = checkListing(namesOf(entries), 1000)
				}
				if err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			}
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("seekdir", func(t *testing.T) { testSeekdir(t, served, mnt) })
}

// testSeekdir returns to each position of a listing after other entries came and went.
func testSeekdir(t *testing.T, served, mnt string) {
	dir := filepath.Join(served, "seek")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	makeEntries(t, dir, 1000)
	for i := range 300 {
		writeFiles(t, dir, map[string]string{fmt.Sprintf("temp%d", i): ""})
	}
	fd := openDir(t, mnt+"/seek")
	before, err := getdents(fd, 3000, -1)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		if err := os.Remove(filepath.Join(dir, fmt.Sprintf("temp%d", i))); err != nil {
			t.Fatal(err)
		}
		writeFiles(t, dir, map[string]string{fmt.Sprintf("tempnew%d", i): ""})
	}
	var order []string // of the entries that stay
	for _, e := range before {
		if !strings.HasPrefix(e.name, "temp") {
			order = append(order, e.name)
		}
	}
	at := 0
	for i, e := range before {
		if strings.HasPrefix(e.name, "temp") {
			continue
		}
		at++
		if i%37 != 0 {
			continue
		}
		if _, err := unix.Seek(fd, e.next, unix.SEEK_SET); err != nil {
			t.Fatalf("seek to the position behind %q: %v", e.name, err)
		}
		rest, err := getdents(fd, 3000, -1)
		if err != nil {
			t.Fatalf("read behind %q: %v", e.name, err)
		}
		names := slices.DeleteFunc(namesOf(rest), func(s string) bool { return strings.HasPrefix(s, "temp") })
		if !slices.Equal(names, order[at:]) {
			t.Fatalf("listing behind %q: got %d entries, want %d", e.name, len(names), len(order)-at)
		}
	}
}

// readDir lists a directory with READDIR or READDIRPLUS in pieces of count bytes. It calls between
// after each piece.
func (c *rawClient) readDir(dir nfs3.FH, plus bool, count uint32, between func()) (names []string, err error) {
	var cookie uint64
	var res nfs3.ReadDirResult
	each := func(e *nfs3.DirEntry) bool {
		names = append(names, string(e.Name))
		cookie = e.Cookie
		return true
	}
	for !res.EOF {
		verf := res.Verf
		if plus {
			err = c.ReadDirPlus(c.ctx, credential(0, 0), dir, cookie, verf, count, count, &res, each)
		} else {
			err = c.ReadDir(c.ctx, credential(0, 0), dir, cookie, verf, count, &res, each)
		}
		if err != nil {
			return names, err
		}
		between()
	}
	return names, nil
}

// TestServeCookies lists a directory with raw clients while entries come and go, and while the
// server restarts.
func TestServeCookies(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	if err := os.Mkdir(filepath.Join(served, "d"), 0o777); err != nil {
		t.Fatal(err)
	}
	makeEntries(t, filepath.Join(served, "d"), 1000)
	s := mounts.ServeDir(t, served, "--no-root-squash")
	for _, plus := range []bool{false, true} {
		c := mustDial(t, s)
		fh := c.mustLookup("d")
		stop := churn(filepath.Join(served, "d"))
		names, err := c.readDir(fh, plus, 2000, func() {})
		if err == nil {
			err = checkListing(names, 1000)
		}
		if err = errors.Join(err, stop()); err != nil {
			t.Errorf("changes, plus=%v: %v", plus, err)
		}
		n := 0
		names, err = c.readDir(fh, plus, 8000, func() {
			if n++; n == 2 || n == 4 {
				s.Restart(t, syscall.SIGKILL, nil)
				old := c
				fresh := mustDial(t, s)
				*old = *fresh
			}
		})
		if err == nil {
			err = checkListing(names, 1000)
		}
		if err != nil {
			t.Errorf("restart, plus=%v: %v", plus, err)
		}
		if n < 5 {
			t.Errorf("listing took %d calls, too few for a restart between them", n)
		}
	}
}

// TestServeAttributes compares GETATTR with the file system, for every type of object.
func TestServeAttributes(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	runScript(t, served, "r put f {x70000}; r chmod f 06751; r chown f 1001 1002; r link f g; r mkdir d 01777;"+
		"r symlink t l;"+
		"r mknod p fifo 0644; r mknod s sock 0600; r mknod c chr 0666 1 3; r mknod b blk 0660 4095 1048575;"+
		"r lutimes f 1000000000.123456789 1100000000.987654321; r lutimes l 12.000000001 4294967295; r lutimes d 1 2")
	writeFiles(t, served, map[string]string{"hole": "x"})
	if err := os.Truncate(filepath.Join(served, "hole"), 10_000_000_001); err != nil {
		t.Fatal(err)
	}
	s := mounts.ServeDir(t, served, "--no-root-squash")
	types := map[uint32]nfs3.FileType{unix.S_IFREG: nfs3.NF3REG, unix.S_IFDIR: nfs3.NF3DIR, unix.S_IFLNK: nfs3.NF3LNK,
		unix.S_IFIFO: nfs3.NF3FIFO, unix.S_IFSOCK: nfs3.NF3SOCK, unix.S_IFCHR: nfs3.NF3CHR, unix.S_IFBLK: nfs3.NF3BLK}
	for _, tr := range transports {
		c, err := tr.dial(t, s)
		if err != nil {
			t.Fatalf("%s: %v", tr.name, err)
		}
		for _, name := range []string{".", "f", "g", "d", "l", "p", "s", "c", "b", "hole"} {
			fh := c.root
			if name != "." {
				fh = c.mustLookup(name)
			}
			var got nfs3.Attr
			if err := c.GetAttr(c.ctx, credential(0, 0), fh, &got); err != nil {
				t.Errorf("%s: GETATTR %s: %v", tr.name, name, err)
				continue
			}
			var st unix.Stat_t
			if err := unix.Lstat(filepath.Join(served, name), &st); err != nil {
				t.Fatal(err)
			}
			time3 := func(ts unix.Timespec) nfs3.Time3 { return nfs3.Time3{Sec: uint32(ts.Sec), Nsec: uint32(ts.Nsec)} }
			want := nfs3.Attr{Type: types[st.Mode&unix.S_IFMT], Mode: st.Mode & 0o7777, Nlink: uint32(st.Nlink),
				UID: st.Uid, GID: st.Gid, Size: uint64(st.Size), Used: uint64(st.Blocks) * 512, FSID: got.FSID,
				FileID: st.Ino, Atime: time3(st.Atim), Mtime: time3(st.Mtim), Ctime: time3(st.Ctim)}
			if name == "c" || name == "b" {
				want.Rdev = nfs3.Device{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
			}
			if got != want {
				t.Errorf("%s: attributes of %s: got %+v, want %+v", tr.name, name, got, want)
			}
		}
	}
}
