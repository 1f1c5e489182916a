package mount

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
)

// A standIn is a mountInstance whose end the test decides, so that every order of events can be played. Real
// mounts are tested with the command.
type standIn struct {
	once     sync.Once
	gone     chan struct{}
	unmount  func(control.UmountMode) (ends bool, err error)
	isClosed chan struct{}
	rings    []*trace.Ring
}

func newStandIn() *standIn {
	return &standIn{gone: make(chan struct{}), isClosed: make(chan struct{}),
		unmount: func(m control.UmountMode) (bool, error) { return m != control.UmountLazy, nil }}
}

func (s *standIn) Wait()                       { <-s.gone }
func (s *standIn) Close()                      { close(s.isClosed) }
func (s *standIn) Status() control.MountStatus { return control.MountStatus{} }
func (s *standIn) Snapshot() metrics.Snapshot  { return metrics.Snapshot{} }
func (s *standIn) Describe(*control.MountInfo) {}
func (s *standIn) Rings() []*trace.Ring        { return s.rings }
func (s *standIn) end()                        { s.once.Do(func() { close(s.gone) }) }

func (s *standIn) Unmount(_ context.Context, mode control.UmountMode) error {
	ends, err := s.unmount(mode)
	if ends {
		s.end()
	}
	return err
}

func testTable(t *testing.T, build builder) (*Table, control.MountRequest) {
	t.Helper()
	tab := newTable(hclog.NewNullLogger(), DefaultOptions(), time.Minute, build)
	t.Cleanup(func() {
		tab.Close(context.Background())
		if l := tab.List(); len(l) != 0 {
			t.Errorf("left: %+v", l)
		}
	})
	return tab, control.MountRequest{Spec: "server:/export", Dir: t.TempDir()}
}

func isError(t *testing.T, err error, code control.Code, says string) {
	t.Helper()
	var e *control.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Text, says) {
		t.Errorf("got %v, want code %s and %q", err, code, says)
	}
}

// building is a builder that tells when it is called and then waits for what the test sends; with
// nothing sent it ends with its context.
type building struct {
	begun  chan struct{}
	result chan mountInstance
}

func newBuilding() *building {
	return &building{begun: make(chan struct{}, 16), result: make(chan mountInstance)}
}

func (b *building) build(ctx context.Context, _ plan) (mountInstance, error) {
	b.begun <- struct{}{}
	select {
	case l := <-b.result:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestUmountWhileMounting(t *testing.T) {
	b := newBuilding()
	tab, r := testTable(t, b.build)
	mounted := make(chan error, 1)
	go func() { _, err := tab.Mount(context.Background(), r); mounted <- err }()
	<-b.begun
	if l := tab.List(); len(l) != 1 || l[0].State != control.StateMounting {
		t.Errorf("list %+v", l)
	}
	st, err := tab.Status(context.Background(), r.Dir)
	// lists, for who goes through them
	if text, _ := json.Marshal(st); err != nil || !strings.Contains(string(text), `"calls":[],"history":[]`) {
		t.Errorf("status %s, %v", text, err)
	}
	if err := tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir}); err != nil {
		t.Error(err)
	}
	isError(t, <-mounted, control.CodeCanceled, "interrupted")
}

// A mount that stands before it hears of the unmount is unmounted all the same.
func TestUmountMeetsTheEndOfMounting(t *testing.T) {
	s := newStandIn()
	begun, canceled := make(chan struct{}), make(chan struct{})
	tab, r := testTable(t, func(ctx context.Context, _ plan) (mountInstance, error) {
		close(begun)
		<-ctx.Done()
		close(canceled)
		return s, nil
	})
	go tab.Mount(context.Background(), r)
	<-begun
	if err := tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir}); err != nil {
		t.Error(err)
	}
	<-canceled
	<-s.isClosed
}

// A mount within a tree that is gone, or hangs, is asked for and ended by its name alone.
func TestMountPointIsNotLookedAt(t *testing.T) {
	s := newStandIn()
	s.rings = []*trace.Ring{testRing(8)}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	around := filepath.Join(r.Dir, "around")
	r.Dir = filepath.Join(around, "mnt")
	if err := os.MkdirAll(r.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := tab.Mount(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(around); err != nil {
		t.Fatal(err)
	}
	if st, err := tab.Status(context.Background(), r.Dir+"/"); err != nil || len(st) != 1 {
		t.Errorf("status: %v, %v", st, err)
	}
	if _, _, err := tab.traced(context.Background(), r.Dir); err != nil {
		t.Errorf("trace: %v", err)
	}
	if err := tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir}); err != nil {
		t.Errorf("umount: %v", err)
	}
}

func TestTwoMountsOfOneDirectory(t *testing.T) {
	b := newBuilding()
	tab, r := testTable(t, b.build)
	const n = 8
	results := make(chan error, n)
	for range n {
		go func() { _, err := tab.Mount(context.Background(), r); results <- err }()
	}
	<-b.begun
	for range n - 1 {
		isError(t, <-results, control.CodeMount, "taken by server:/export (mounting)")
	}
	b.result <- newStandIn()
	if err := <-results; err != nil {
		t.Error(err)
	}
}

func TestCloseWhileMounting(t *testing.T) {
	for name, late := range map[string]bool{"and it hears of it": false, "and it does not": true} {
		t.Run(name, func(t *testing.T) {
			s, begun := newStandIn(), make(chan struct{})
			tab, r := testTable(t, func(ctx context.Context, _ plan) (mountInstance, error) {
				close(begun)
				<-ctx.Done()
				if late {
					return s, nil
				}
				return nil, ctx.Err()
			})
			mounted := make(chan error, 1)
			go func() { _, err := tab.Mount(context.Background(), r); mounted <- err }()
			<-begun
			tab.Close(context.Background())
			if late {
				<-s.isClosed
			}
			isError(t, <-mounted, control.CodeMount, "the daemon is stopping")
			_, err := tab.Mount(context.Background(), r)
			isError(t, err, control.CodeMount, "the daemon is stopping")
		})
	}
}

// A mount that was detached lazily leaves its mount point to another; it is listed until it ends,
// and force and Close reach it.
func TestLazyFreesTheMountPoint(t *testing.T) {
	var made []*standIn
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) {
		made = append(made, newStandIn())
		return made[len(made)-1], nil
	})
	ctx := context.Background()
	for range 3 {
		if _, err := tab.Mount(ctx, r); err != nil {
			t.Fatal(err)
		}
		if err := tab.Umount(ctx, control.UmountRequest{Dir: r.Dir, Mode: control.UmountLazy}); err != nil {
			t.Fatal(err)
		}
	}
	if l := tab.List(); len(l) != 3 || l[0].State != control.StateUnmounting {
		t.Errorf("list %+v", l)
	}
	if n := len(tab.Snapshots()); n != 0 {
		t.Errorf("%d snapshots: two of one mount point would be refused by a collector", n)
	}
	isError(t, tab.Umount(ctx, control.UmountRequest{Dir: r.Dir}), control.CodeNotMounted, r.Dir)
	if err := tab.Umount(ctx, control.UmountRequest{Dir: r.Dir, Mode: control.UmountForce}); err != nil {
		t.Error(err)
	}
	if l := tab.List(); len(l) != 2 {
		t.Errorf("after force: %+v", l)
	}
	for _, s := range made { // the last file of one is closed
		select {
		case <-s.gone:
			continue
		default:
		}
		s.end()
		<-s.isClosed
		break
	}
}

// A mount that a normal unmount cannot end is ended by force, within the time of Close.
func TestCloseForces(t *testing.T) {
	s := newStandIn()
	modes := make(chan control.UmountMode, 2)
	s.unmount = func(m control.UmountMode) (bool, error) {
		modes <- m
		if m == control.UmountForce {
			return true, nil
		}
		return false, control.Errorf(control.CodeMount, "busy")
	}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	if _, err := tab.Mount(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	tab.Close(context.Background())
	if a, b := <-modes, <-modes; a != control.UmountNormal || b != control.UmountForce {
		t.Errorf("tried %q, then %q", a, b)
	}
}

// A busy mount goes on after a failed unmount.
func TestBusyStaysMounted(t *testing.T) {
	s := newStandIn()
	s.unmount = func(m control.UmountMode) (bool, error) {
		if m == control.UmountForce {
			return true, nil
		}
		return false, control.Errorf(control.CodeMount, "busy")
	}
	tab, r := testTable(t, func(context.Context, plan) (mountInstance, error) { return s, nil })
	if _, err := tab.Mount(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	isError(t, tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir}), control.CodeMount, "busy")
	if l := tab.List(); len(l) != 1 || l[0].State != control.StateMounted {
		t.Errorf("list %+v", l)
	}
	isError(t, tab.Umount(context.Background(), control.UmountRequest{Dir: r.Dir, Mode: "hard"}), control.CodeUsage, `"hard"`)
	_, err := tab.Status(context.Background(), filepath.Join(r.Dir, "x"))
	isError(t, err, control.CodeNotMounted, "nfsrdmad list")
}
