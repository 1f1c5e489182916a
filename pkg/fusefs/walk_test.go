package fusefs

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// walkAge is how long the mounts of these tests cache attributes.
const walkAge = time.Second

// walkMount mounts an export with files in the directory d, and returns their names in the order of
// the listing. The attributes of all files have expired.
func walkMount(t *testing.T, files int, opts Options) (e *export, m *testMount, s *scripted, names []string) {
	t.Helper()
	e = startOwnExport(t)
	createNames(t, filepath.Join(e.dir, "d"), files)
	opts.AcRegMin, opts.AcRegMax, opts.AcDirMin, opts.AcDirMax = walkAge, walkAge, time.Minute, time.Minute
	m, s = e.mountScripted(t, mountConfig{opts: opts})
	f, err := os.Open(m.path("d"))
	must(t, err)
	defer f.Close()
	for err == nil { // as ls -l
		var more []string
		more, err = f.Readdirnames(100)
		walk(t, m, more)
		names = append(names, more...)
	}
	if err != io.EOF || len(names) != files {
		t.Fatalf("list d: got %d names, %v, want %d", len(names), err, files)
	}
	time.Sleep(walkAge + walkAge/10)
	return e, m, s, names
}

// walk gets the attributes of files in d.
func walk(t *testing.T, m *testMount, names []string) {
	t.Helper()
	var st unix.Stat_t
	for _, name := range names {
		must(t, unix.Lstat(m.path("d/"+name), &st))
	}
}

// walkCalls returns the number of calls that walks cause.
func (s *scripted) walkCalls() int {
	return s.count(nfs3.ProcGetAttr) + s.count(nfs3.ProcLookup) + s.count(nfs3.ProcReadDirPlus)
}

// TestWalkRenewsAttributes checks that a walk of a directory whose attributes have expired needs
// few calls, in the order of the listing and in another order.
func TestWalkRenewsAttributes(t *testing.T) {
	const files = 4000
	for _, c := range []struct {
		name    string
		shuffle bool
		opts    Options
		calls   int // maximum
	}{
		{"order of the listing", false, Options{}, files / 50},
		// The kernel lists some entries without attributes. Their places are unknown.
		{"order of the listing, shared names", false, Options{SharedNames: true}, files / 2},
		{"any order", true, Options{}, files / 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, m, s, names := walkMount(t, files, c.opts)
			if c.shuffle {
				rand.New(rand.NewPCG(1, 2)).Shuffle(files, func(i, j int) { names[i], names[j] = names[j], names[i] })
			}
			before := s.walkCalls()
			walk(t, m, names)
			if n := s.walkCalls() - before; n == 0 || n > c.calls {
				t.Errorf("calls for %d files: got %d, want 1 to %d", files, n, c.calls)
			}
		})
	}
}

// TestWalkSeesChanges checks that a walk sees what another client has changed since the attributes
// expired, in the middle of the directory and in front of the program.
func TestWalkSeesChanges(t *testing.T) {
	e, m, s, names := walkMount(t, 2000, Options{})
	dir := filepath.Join(e.dir, "d")
	walk(t, m, names[:100])
	if m.fs.Counters.Renewals.Load() == 0 {
		t.Fatal("no renewal at the start of the walk")
	}
	must(t, os.WriteFile(filepath.Join(dir, names[1000]), []byte("changed"), 0o644))
	must(t, os.Remove(filepath.Join(dir, names[1200])))
	must(t, os.WriteFile(filepath.Join(dir, "new"), []byte("replaced"), 0o600))
	must(t, os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, names[1400])))
	before := s.walkCalls()
	for i, name := range names[100:] {
		st, err := os.Lstat(m.path("d/" + name))
		switch i + 100 {
		case 1200:
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("lstat of a removed file: got %v, want ENOENT", err)
			}
			continue
		case 1000:
			wantSize(t, st, err, len("changed"))
		case 1400:
			wantSize(t, st, err, len("replaced"))
		default:
			wantSize(t, st, err, 0)
		}
	}
	if n := s.walkCalls() - before; n > 2000/10 {
		t.Errorf("calls: got %d, want at most %d", n, 2000/10)
	}
}

func wantSize(t *testing.T, st os.FileInfo, err error, want int) {
	t.Helper()
	if must(t, err); st.Size() != int64(want) {
		t.Errorf("size of %s: got %d bytes, want %d", st.Name(), st.Size(), want)
	}
}

// TestWalkKeepsOwnChange checks that the attributes of a renewal do not replace those of a change
// that this mount makes while the renewal is in flight.
func TestWalkKeepsOwnChange(t *testing.T) {
	_, m, s, names := walkMount(t, 500, Options{})
	over := make(chan struct{})
	replied := make(chan struct{}, 1)
	s.on(func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
		err := pass()
		replied <- struct{}{} // the server has the attributes from before the change
		<-over
		return err
	}, nfs3.ProcReadDirPlus)
	walked := make(chan struct{})
	go func() {
		defer close(walked)
		walk(t, m, names[:50])
	}()
	<-replied
	must(t, os.Chmod(m.path("d/"+names[60]), 0o600))
	close(over)
	<-walked
	if n := m.fs.countMode(0o600); n != 1 { // the kernel does not ask for them now
		t.Errorf("nodes with the new mode: got %d, want 1", n)
	}
}

// countMode returns the number of nodes whose cached attributes have a mode.
func (fs *FS) countMode(mode uint32) (n int) {
	fs.inodes.mu.Lock()
	defer fs.inodes.mu.Unlock()
	for _, ino := range fs.inodes.byID {
		ino.mu.Lock()
		if ino.attr.Mode == mode {
			n++
		}
		ino.mu.Unlock()
	}
	return n
}

// TestWalkNeedsCachedAttributes checks that a mount without attribute caching renews nothing, and
// that each lstat(2) asks the server.
func TestWalkNeedsCachedAttributes(t *testing.T) {
	for name, opts := range map[string]Options{
		"noac":      {NoAC: true, AcRegMin: walkAge, AcRegMax: walkAge, AcDirMax: walkAge},
		"actimeo=0": {AcDirMax: 1},
	} {
		t.Run(name, func(t *testing.T) {
			e := startOwnExport(t)
			names := createNames(t, filepath.Join(e.dir, "d"), 200)
			m, s := e.mountScripted(t, mountConfig{opts: opts})
			_, err := os.ReadDir(m.path("d"))
			must(t, err)
			before := s.count(nfs3.ProcGetAttr) + s.count(nfs3.ProcLookup)
			walk(t, m, names)
			if n := s.count(nfs3.ProcGetAttr) + s.count(nfs3.ProcLookup) - before; n < 200 {
				t.Errorf("calls for 200 files: got %d, want 200 or more", n)
			}
			if n := m.fs.Counters.Renewals.Load(); n != 0 {
				t.Errorf("renewals: got %d, want 0", n)
			}
		})
	}
}

// TestWalkOpenAsksServer checks that an open during a walk gets the attributes from the server.
func TestWalkOpenAsksServer(t *testing.T) {
	e, m, _, names := walkMount(t, 500, Options{})
	walk(t, m, names[:50])
	want := []byte("changed after the renewal")
	must(t, os.WriteFile(filepath.Join(e.dir, "d", names[60]), want, 0o644))
	wantContent(t, m.path("d/"+names[60]), want)
}

// TestWalkRefusedRenewal checks that a walk gets the attributes of all files when the server
// refuses the renewals.
func TestWalkRefusedRenewal(t *testing.T) {
	_, m, s, names := walkMount(t, 500, Options{})
	s.on(status(nfs3.ErrAcces), nfs3.ProcReadDirPlus)
	walk(t, m, names)
	s.on(status(nfs3.ErrBadCookie), nfs3.ProcReadDirPlus)
	walk(t, m, names)
	if n := m.fs.Counters.Renewals.Load(); n != 0 {
		t.Errorf("renewals: got %d, want 0", n)
	}
}

// TestWalkShortReplies walks a directory of a server whose replies have fewer entries than a chunk.
// The renewals then do not return the needed files, and end.
func TestWalkShortReplies(t *testing.T) {
	_, m, s, names := walkMount(t, 1000, Options{})
	s.on(func(_ context.Context, call *sunrpc.Message, pass func() error) error {
		binary.BigEndian.PutUint32(call.Args[len(call.Args)-4:], 4096) // maxcount
		return pass()
	}, nfs3.ProcReadDirPlus)
	before := s.count(nfs3.ProcReadDirPlus)
	walk(t, m, names)
	if n := s.count(nfs3.ProcReadDirPlus) - before; n == 0 || n > 10 {
		t.Errorf("READDIRPLUS calls: got %d, want 1 to 10", n)
	}
}

// TestWalkStartsWithoutVerifier checks the verifier of a renewal from the start of the directory.
func TestWalkStartsWithoutVerifier(t *testing.T) {
	dir := &inode{walk: &dirWalk{cookies: []uint64{0, 9}, verf: nfs3.Verifier{1}, credit: walkMax, at: time.Now()}}
	for index, want := range map[uint32]nfs3.Verifier{0: {}, walkChunk: {1}} {
		if _, verf, ok := dir.beginRenewal(index); !ok || verf != want {
			t.Errorf("renewal of entry %d: got verifier %v, %v, want %v", index, verf, ok, want)
		}
		dir.walk.busy = false
	}
}

// TestWalkCredit checks when a renewal may begin.
func TestWalkCredit(t *testing.T) {
	now := time.Now()
	next := func(i int) (uint32, time.Duration) { return uint32(i), 0 }
	for _, c := range []struct {
		name     string
		request  func(i int) (index uint32, pause time.Duration)
		requests int
		want     int // renewals
	}{
		{"few files in order", next, 3, 0},
		{"files in order", next, 4, 1},
		{"files in order with gaps", func(i int) (uint32, time.Duration) { return uint32(i * walkGap), 0 }, 4, 1},
		{"files in order, slowly", func(i int) (uint32, time.Duration) { return uint32(i), 2 * walkPause }, 100, 0},
		{"one file", func(int) (uint32, time.Duration) { return 7, 0 }, 23, 0},
		// Renewals do not help these requests.
		{"random files", func(i int) (uint32, time.Duration) { return uint32(i * 7919 % 100000 * 100), 0 }, 800, 98},
	} {
		var w dirWalk
		at, renewals := now, 0
		for i := range c.requests {
			index, pause := c.request(i)
			if at = at.Add(pause); w.earn(index, at) {
				w.credit -= walkCost
				renewals++
			}
		}
		if renewals != c.want {
			t.Errorf("%s: got %d renewals, want %d", c.name, renewals, c.want)
		}
	}
}
