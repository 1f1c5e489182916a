package mount

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A fakeMount is a mountInstance whose events the test controls. The tests of cmd/nfsrdmad use real
// mounts.
type fakeMount struct {
	once     sync.Once
	ended    chan struct{}
	unmount  func(control.UmountMode) (ends bool, err error)
	isClosed chan struct{}
	rings    []*trace.Ring
	flush    func(ctx context.Context, stall time.Duration)
	failure  string
	stalled  func() stall
	close    func() // what Close waits for
}

func newFakeMount() *fakeMount {
	return &fakeMount{ended: make(chan struct{}), isClosed: make(chan struct{}),
		unmount: func(m control.UmountMode) (bool, error) { return m != control.UmountLazy, nil },
		flush:   func(context.Context, time.Duration) {},
		stalled: func() stall { return stall{} },
		close:   func() {}}
}

func (s *fakeMount) Wait()  { <-s.ended }
func (s *fakeMount) Close() { s.close(); close(s.isClosed) }

func (s *fakeMount) Describe(i *control.MountInfo) { i.Failure = s.failure }

func (s *fakeMount) Flush(ctx context.Context, stall time.Duration) { s.flush(ctx, stall) }

func (s *fakeMount) Stalled() stall                               { return s.stalled() }
func (s *fakeMount) KeepError() error                             { return errNoStore }
func (s *fakeMount) Status(*metrics.Snapshot) control.MountStatus { return control.MountStatus{} }
func (s *fakeMount) Stats(*metrics.Snapshot) control.MountStats   { return control.MountStats{} }
func (s *fakeMount) Slow() control.SlowCalls                      { return control.SlowCalls{} }
func (s *fakeMount) Snapshot() metrics.Snapshot                   { return metrics.Snapshot{} }
func (s *fakeMount) Rings() []*trace.Ring                         { return s.rings }
func (s *fakeMount) end()                                         { s.once.Do(func() { close(s.ended) }) }

func (s *fakeMount) Unmount(_ context.Context, mode control.UmountMode) error {
	ends, err := s.unmount(mode)
	if ends {
		s.end()
	}
	return err
}

func testTable(t *testing.T, build builder) (*Table, control.MountRequest) {
	t.Helper()
	kit.NeedsRoot(t)
	tab := newTable(&shared{log: hclog.NewNullLogger()}, DefaultOptions(), time.Minute, build)
	t.Cleanup(func() {
		if err := tab.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if l := tab.List(); len(l) != 0 {
			t.Errorf("mounts after Close: got %+v, want none", l)
		}
	})
	return tab, control.MountRequest{Spec: "server:/export", Dir: t.TempDir()}
}

func isError(t *testing.T, err error, code control.Code, text string) {
	t.Helper()
	var e *control.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Text, text) {
		t.Errorf("got error %v, want code %s and %q", err, code, text)
	}
}

// A fakeBuilder is a builder that waits for a result from the test, or for the end of its context.
type fakeBuilder struct {
	begun  chan struct{} // receives a value when a build begins
	result chan mountInstance
}

func newFakeBuilder() *fakeBuilder {
	return &fakeBuilder{begun: make(chan struct{}, 16), result: make(chan mountInstance)}
}

func (b *fakeBuilder) build(ctx context.Context, _ plan) (mountInstance, error) {
	b.begun <- struct{}{}
	select {
	case l := <-b.result:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestUmountCancelsBuild(t *testing.T) {
	b := newFakeBuilder()
	tab, r := testTable(t, b.build)
	mounted := make(chan error, 1)
	go func() { _, err := tab.Mount(context.Background(), r); mounted <- err }()
	<-b.begun
	if l := tab.List(); len(l) != 1 || l[0].State != control.StateMounting {
		t.Errorf("list: got %+v, want one mount in state mounting", l)
	}
	st, err := tab.Status(context.Background(), r.Dir)
	// Programs that read the JSON expect lists, not null.
	if text, _ := json.Marshal(st); err != nil || !strings.Contains(string(text), `"calls":[],"history":[]`) {
		t.Errorf("status: got %s and error %v, want empty lists of calls and history", text, err)
	}
	if err := tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir}); err != nil {
		t.Error(err)
	}
	isError(t, <-mounted, control.CodeCanceled, "interrupted")
}

// The parent directory of a mount may be removed, or be in a file system that hangs.
func TestTableFindsMountByNameOnly(t *testing.T) {
	s := newFakeMount()
	s.rings = []*trace.Ring{testRing(8)}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	parent := filepath.Join(r.Dir, "parent")
	r.Dir = filepath.Join(parent, "mnt")
	kit.Must(t, os.MkdirAll(r.Dir, 0o755))
	_, err := tab.Mount(context.Background(), r)
	kit.Must(t, err)
	kit.Must(t, os.RemoveAll(parent))
	if st, err := tab.Status(context.Background(), r.Dir+"/"); err != nil || len(st) != 1 {
		t.Errorf("status: got %v and error %v, want one mount", st, err)
	}
	if _, _, err := tab.findRings(context.Background(), r.Dir); err != nil {
		t.Errorf("trace: %v", err)
	}
	if err := tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir}); err != nil {
		t.Errorf("umount: %v", err)
	}
}

func TestMountRefusesDirectoryInUse(t *testing.T) {
	b := newFakeBuilder()
	tab, r := testTable(t, b.build)
	const n = 8
	results := make(chan error, n)
	for range n {
		go func() { _, err := tab.Mount(context.Background(), r); results <- err }()
	}
	<-b.begun
	for range n - 1 {
		isError(t, <-results, control.CodeMount, "in use by server:/export (mounting)")
	}
	b.result <- newFakeMount()
	if err := <-results; err != nil {
		t.Error(err)
	}
}

// TestVirtiofsRefusesWriteback checks that a share for a virtual machine cannot have the option
// writeback.
func TestVirtiofsRefusesWriteback(t *testing.T) {
	tab, r := testTable(t, newFakeBuilder().build)
	r.Virtiofs, r.Options = true, "writeback"
	_, err := tab.Mount(t.Context(), r)
	if option := (*OptionError)(nil); !errors.As(err, &option) || option.Option != "writeback" {
		t.Errorf("got %v, want an error of the option writeback", err)
	}
}

func TestCloseDuringBuild(t *testing.T) {
	for name, completes := range map[string]bool{"build is canceled": false, "build completes": true} {
		t.Run(name, func(t *testing.T) {
			s, begun := newFakeMount(), make(chan struct{})
			tab, r := testTable(t, func(ctx context.Context, _ plan) (mountInstance, error) {
				close(begun)
				<-ctx.Done()
				if completes {
					return s, nil
				}
				return nil, ctx.Err()
			})
			mounted := make(chan error, 1)
			go func() { _, err := tab.Mount(context.Background(), r); mounted <- err }()
			<-begun
			if err := tab.Close(context.Background()); err != nil {
				t.Error(err)
			}
			if completes {
				<-s.isClosed
			}
			isError(t, <-mounted, control.CodeMount, "the daemon is stopping")
			_, err := tab.Mount(context.Background(), r)
			isError(t, err, control.CodeMount, "the daemon is stopping")
		})
	}
}

// A detached mount stays in the list until it ends. Force and Close reach it.
func TestLazyUmountFreesMountPoint(t *testing.T) {
	var made []*fakeMount
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) {
		made = append(made, newFakeMount())
		return made[len(made)-1], nil
	})
	ctx := context.Background()
	for range 3 {
		if _, err := tab.Mount(ctx, r); err != nil {
			t.Fatal(err)
		}
		kit.Must(t, tab.Umount(ctx, control.UmountRequest{Dir: r.Dir, Mode: control.UmountLazy}))
	}
	if l := tab.List(); len(l) != 3 || l[0].State != control.StateUnmounting {
		t.Errorf("list: got %+v, want 3 mounts, the first in state unmounting", l)
	}
	keys := make(map[control.MountKey]bool)
	all, err := tab.Stats(ctx, "")
	slow, slowErr := tab.Slow(ctx, "")
	for i := range all {
		keys[all[i].Key()] = true
	}
	if err != nil || slowErr != nil || len(keys) != 3 || len(slow) != 3 || slow[1].Key() != all[1].Key() {
		t.Errorf("stats: got keys %v, errors %v and %v, want 3 keys", keys, err, slowErr)
	}
	if n := len(tab.Snapshots()); n != 0 {
		t.Errorf("snapshots: got %d, want 0; Prometheus refuses two mounts with one mount point", n)
	}
	isError(t, tab.Umount(ctx, control.UmountRequest{Dir: r.Dir}), control.CodeNotMounted, r.Dir)
	if err := tab.Umount(ctx, control.UmountRequest{Dir: r.Dir, Mode: control.UmountForce}); err != nil {
		t.Error(err)
	}
	if l := tab.List(); len(l) != 2 {
		t.Errorf("list after a forced unmount: got %+v, want 2 mounts", l)
	}
	for _, s := range made { // one mount ends because its last file is closed
		select {
		case <-s.ended:
			continue
		default:
		}
		s.end()
		<-s.isClosed
		break
	}
}

// TestCloseForcesBusyMount checks that Close writes the data of a busy mount until its deadline
// before the normal and the forced unmount.
func TestCloseForcesBusyMount(t *testing.T) {
	s := newFakeMount()
	steps := make(chan string, 3)
	s.flush = func(ctx context.Context, stall time.Duration) {
		if _, ok := ctx.Deadline(); !ok || stall != 0 {
			t.Errorf("flush: got a deadline %v and stall %v, want the deadline of Close and 0", ok, stall)
		}
		steps <- "flush"
	}
	s.unmount = func(m control.UmountMode) (bool, error) {
		steps <- "unmount " + string(m)
		if m == control.UmountForce {
			return true, nil
		}
		return false, control.Errorf(control.CodeMount, "busy")
	}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	_, err := tab.Mount(context.Background(), r)
	kit.Must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := tab.Close(ctx); err != nil {
		t.Error(err)
	}
	if a, b, c := <-steps, <-steps, <-steps; a != "flush" || b != "unmount " || c != "unmount force" {
		t.Errorf("steps: got %q, %q, %q; want flush, unmount, unmount force", a, b, c)
	}
}

// TestCloseReportsLostData checks that the error of Close has the bytes that were lost since its
// start.
func TestCloseReportsLostData(t *testing.T) {
	s := newFakeMount()
	common := &shared{log: hclog.NewNullLogger()}
	lose := func(bytes uint64, err error) {
		(&mountStack{shared: common}).lost(data.Loss{FileID: 1, Bytes: bytes, Err: err})
	}
	s.unmount = func(m control.UmountMode) (bool, error) {
		if m == control.UmountForce {
			lose(100, nil)
			lose(1000, errors.New("no space"))
			return true, nil
		}
		return false, control.Errorf(control.CodeMount, "busy")
	}
	kit.NeedsRoot(t)
	tab := newTable(common, DefaultOptions(), time.Minute,
		func(context.Context, plan) (mountInstance, error) { return s, nil })
	lose(7, nil)
	isError(t, tab.LossError(0), control.CodeMount, "7 bytes")
	if _, err := tab.Mount(t.Context(), control.MountRequest{Spec: "server:/export", Dir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	isError(t, tab.Close(t.Context()), control.CodeMount, "100 bytes")
	if unmount, rejected := common.unmount.Load(), common.rejected.Load(); unmount != 107 || rejected != 1000 {
		t.Errorf("lost bytes: got %d at unmounts and %d rejected, want 107 and 1000", unmount, rejected)
	}
}

// TestEndAwaitsConnects ends tables while this process connects to a server that does not answer.
// On a fake clock, which stands still while code runs, the end must take as long as it may wait.
func TestEndAwaitsConnects(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	defer l.Close()
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{ReplyTimeout: time.Hour}),
		Addr: l.Addr().(*net.TCPAddr).AddrPort(), ConnectTimeout: time.Hour})
	kit.Must(t, err)
	defer tr.Close()
	var connecting sync.WaitGroup
	defer connecting.Wait()
	connecting.Go(func() { _ = tr.Connect(context.Background()) })
	conn, err := l.Accept()
	kit.Must(t, err)
	defer conn.Close()
	for name, end := range map[string]func(*Table){
		"Close": func(tab *Table) { _ = tab.Close(context.Background()) },
		"Leave": func(tab *Table) { tab.Leave(context.Background()) },
	} {
		synctest.Test(t, func(t *testing.T) {
			begin := time.Now()
			end(newTable(&shared{log: hclog.NewNullLogger()}, DefaultOptions(), time.Minute, nil))
			if d := time.Since(begin); d < settleTimeout {
				t.Errorf("%s returned after %v during a connect, want %v", name, d, settleTimeout)
			}
		})
	}
}

// TestForcedUmountFlushesFirst checks that a forced unmount writes the data of the mount while the
// server accepts it.
func TestForcedUmountFlushesFirst(t *testing.T) {
	s := newFakeMount()
	var flushed bool
	s.flush = func(ctx context.Context, stall time.Duration) {
		_, bounded := ctx.Deadline()
		flushed = bounded && stall == forceStall
	}
	s.unmount = func(control.UmountMode) (bool, error) {
		if !flushed {
			t.Error("unmount began before a flush with a deadline and a stall limit")
		}
		return true, nil
	}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	_, err := tab.Mount(t.Context(), r)
	kit.Must(t, err)
	if err := tab.Umount(t.Context(), control.UmountRequest{Dir: r.Dir, Mode: control.UmountForce}); err != nil {
		t.Error(err)
	}
}

// TestMountAwaitsRelease checks that a mount at the directory of a mount that was unmounted by
// another program waits for its release.
func TestMountAwaitsRelease(t *testing.T) {
	kit.NeedsRoot(t)
	synctest.Test(t, func(t *testing.T) {
		first, release := newFakeMount(), make(chan struct{})
		first.close = func() { <-release }
		next := []*fakeMount{first, newFakeMount()}
		tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) {
			s := next[0]
			next = next[1:]
			return s, nil
		})
		_, err := tab.Mount(t.Context(), r)
		kit.Must(t, err)
		_, err = tab.Mount(t.Context(), r)
		isError(t, err, control.CodeMount, "in use by server:/export (mounted)")
		first.end()
		mounted := make(chan error, 1)
		go func() { _, err := tab.Mount(t.Context(), r); mounted <- err }()
		synctest.Wait()
		select {
		case err := <-mounted:
			t.Errorf("mount before the release: got error %v, want a wait", err)
		default:
		}
		close(release)
		if err := <-mounted; err != nil {
			t.Errorf("mount after the release: %v", err)
		}
	})
}

// TestRestoredMountHasNoDeadline checks that a mount of an earlier process connects without a
// deadline: many mounts that are continued at once wait for the limits of connects. The other steps
// of its build have one.
func TestRestoredMountHasNoDeadline(t *testing.T) {
	s := newFakeMount()
	tab := newTable(&shared{log: hclog.NewNullLogger()}, DefaultOptions(), time.Minute,
		func(ctx context.Context, p plan) (mountInstance, error) {
			step, cancel := (&mountStack{plan: p}).step(ctx)
			defer cancel()
			_, bounded := ctx.Deadline()
			if _, ok := step.Deadline(); bounded || !ok {
				t.Errorf("got a deadline of connects: %v, of steps: %v; want false and true", bounded, ok)
			}
			s.end()
			return s, nil
		})
	left := &leftMount{keeper: &keeper{state: new(vfs.State)}}
	e := &entry{plan: plan{dir: "/mnt", left: left, timeout: time.Minute},
		built: make(chan struct{}), ended: make(chan struct{}), removed: make(chan struct{}), restored: func() {}}
	tab.mu.entries[e.dir] = e
	tab.work.Add(1)
	tab.continueMount(t.Context(), e)
	<-s.isClosed
}

func TestStatusShowsFailure(t *testing.T) {
	s := newFakeMount()
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	_, err := tab.Mount(t.Context(), r)
	kit.Must(t, err)
	s.failure = "panic: test"
	st, err := tab.Status(t.Context(), r.Dir)
	if err != nil || len(st) != 1 || st[0].State != control.StateFailed || st[0].Failure != s.failure {
		t.Errorf("status: got %+v and error %v, want state failed and the failure", st, err)
	}
}

func TestFailedUmountKeepsMount(t *testing.T) {
	s := newFakeMount()
	s.unmount = func(m control.UmountMode) (bool, error) {
		return m == control.UmountForce, control.Errorf(control.CodeMount, "busy")
	}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	_, err := tab.Mount(t.Context(), r)
	kit.Must(t, err)
	isError(t, tab.Umount(t.Context(), control.UmountRequest{Dir: r.Dir}), control.CodeMount, "busy")
	if l := tab.List(); len(l) != 1 || l[0].State != control.StateMounted {
		t.Errorf("list: got %+v, want one mount in state mounted", l)
	}
	isError(t, tab.Umount(t.Context(), control.UmountRequest{Dir: r.Dir, Mode: "hard"}), control.CodeUsage, `"hard"`)
	_, err = tab.Status(t.Context(), filepath.Join(r.Dir, "x"))
	isError(t, err, control.CodeNotMounted, "nfsrdmad list")
	s.unmount = func(control.UmountMode) (bool, error) { return true, nil }
}
