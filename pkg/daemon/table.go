package daemon

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
)

// A live is a mount that stands: everything from the RDMA connection to /dev/fuse. All methods may be called concurrently,
// and none but Wait, and a normal Unmount, waits for the server.
type live interface {
	// Wait returns when the file system is no longer mounted, whoever unmounted it.
	Wait()
	// Unmount takes the file system off its directory. A normal one may wait for the server to take what is still to be written,
	// until ctx ends; lazy and force do not wait.
	Unmount(ctx context.Context, mode UmountMode) error
	// Close releases what is behind the file system. Called once, after Wait.
	Close()
	Status() MountStatus
	Snapshot() metrics.Snapshot
}

// A plan is a MountRequest that was understood.
type plan struct {
	spec Spec
	dir  string // resolved
	opts Options
}

// A builder makes the layers of one mount and mounts it. It ends when ctx does, and leaves nothing behind when it fails.
type builder func(ctx context.Context, p plan) (live, error)

// A Table holds the mounts of a daemon. Each is on its own: it is built, watched and torn down by goroutines that hold no lock of
// the table, so that one dead server delays no other mount. Safe for concurrent use.
type Table struct {
	log     hclog.Logger
	build   builder
	base    Options // under the options of each mount
	timeout time.Duration

	mu struct {
		sync.Mutex
		entries map[string]*entry // by mount point
		closed  bool
	}
	watchers sync.WaitGroup
}

// An entry is one mount. Its fields but the state are set before it is shown as mounted, and do not change.
type entry struct {
	plan
	since  time.Time
	cancel context.CancelFunc // of the building; set from the start
	gone   chan struct{}      // closed when the entry has left the table

	// Guarded by the table's lock.
	state MountState
	live  live // nil while mounting
}

func newTable(log hclog.Logger, base Options, timeout time.Duration, build builder) *Table {
	t := &Table{log: log, build: build, base: base, timeout: timeout}
	t.mu.entries = make(map[string]*entry)
	return t
}

// Mount mounts what r asks for, and returns when the file system is there or cannot be. It ends when ctx does, at the latest
// after the table's timeout.
func (t *Table) Mount(ctx context.Context, r MountRequest) (MountInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	p, err := t.plan(ctx, r)
	if err != nil {
		return MountInfo{}, err
	}
	e, err := t.reserve(p, cancel)
	if err != nil {
		return MountInfo{}, err
	}
	l, err := t.build(ctx, p)
	if err != nil {
		t.remove(e)
		t.log.Error("mount failed", "spec", p.spec.String(), "dir", p.dir, "error", err)
		return MountInfo{}, t.classify(ctx, p, err)
	}
	t.mu.Lock()
	e.live, e.state = l, StateMounted
	closed := t.mu.closed
	info := e.info()
	t.watchers.Add(1)
	t.mu.Unlock()
	go t.watch(e)
	if closed { // the daemon ended while this was under way
		_ = l.Unmount(ctx, UmountForce)
		return MountInfo{}, errorf(CodeMount, "mounting %s on %s: the daemon is stopping", p.spec, p.dir)
	}
	t.log.Info("mounted", "spec", p.spec.String(), "dir", p.dir, "options", p.opts.String())
	return info, nil
}

// plan checks all of r that can be checked without the server.
func (t *Table) plan(ctx context.Context, r MountRequest) (plan, error) {
	spec, err := ParseSpec(r.Spec)
	if err != nil {
		return plan{}, err
	}
	opts, err := ParseOptions(t.base, r.Options)
	if err != nil {
		return plan{}, err
	}
	if err := CheckPrivilege(); err != nil {
		return plan{}, err
	}
	dir, err := CheckMountPoint(ctx, r.Dir)
	if err != nil {
		return plan{}, err
	}
	return plan{spec: spec, dir: dir, opts: opts}, nil
}

func (t *Table) reserve(p plan, cancel context.CancelFunc) (*entry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, errorf(CodeMount, "mounting %s on %s: the daemon is stopping", p.spec, p.dir)
	}
	if other := t.mu.entries[p.dir]; other != nil {
		return nil, errorf(CodeMount, "mount point %s: %s is %s there; unmount it first", p.dir, other.spec, other.state)
	}
	e := &entry{plan: p, since: time.Now(), cancel: cancel, gone: make(chan struct{}), state: StateMounting}
	t.mu.entries[p.dir] = e
	return e, nil
}

func (t *Table) remove(e *entry) {
	t.mu.Lock()
	delete(t.mu.entries, e.dir)
	t.mu.Unlock()
	close(e.gone)
}

// watch waits for the end of a mount and cleans up after it.
func (t *Table) watch(e *entry) {
	defer t.watchers.Done()
	e.live.Wait()
	e.live.Close()
	t.remove(e)
	t.log.Info("unmounted", "spec", e.spec.String(), "dir", e.dir)
}

// classify gives a builder's error a code, where it has none, and names the mount.
func (t *Table) classify(ctx context.Context, p plan, err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return &Error{Code: CodeCanceled, Text: "mounting " + p.spec.String() + " on " + p.dir + ": interrupted", Err: err}
	}
	return &Error{Code: CodeMount, Text: "mounting " + p.spec.String() + " on " + p.dir + ": " + oneLine(err.Error()), Err: err}
}

// Umount ends the mount at r.Dir. A normal unmount of a busy mount, or of one whose server does not answer in time, fails and says what else
// to try; the mount goes on.
func (t *Table) Umount(ctx context.Context, r UmountRequest) error {
	switch r.Mode {
	case UmountNormal, UmountLazy, UmountForce:
	default:
		return errorf(CodeUsage, "unmounting %s: unknown mode %q; use force or lazy", r.Dir, string(r.Mode))
	}
	dir, err := ResolveMountPoint(ctx, r.Dir)
	if err != nil {
		return err
	}
	t.mu.Lock()
	e := t.mu.entries[dir]
	if e == nil {
		t.mu.Unlock()
		return errorf(CodeNotMounted, "unmounting %s: no mount of this daemon is there; see nfsrdmad list", dir)
	}
	if e.live == nil {
		t.mu.Unlock()
		e.cancel()
		return t.waitGone(ctx, e)
	}
	l := e.live
	e.state = StateUnmounting
	t.mu.Unlock()

	if err := l.Unmount(ctx, r.Mode); err != nil {
		t.mu.Lock()
		e.state = StateMounted
		t.mu.Unlock()
		return err
	}
	if r.Mode == UmountLazy {
		return nil
	}
	return t.waitGone(ctx, e)
}

func (t *Table) waitGone(ctx context.Context, e *entry) error {
	select {
	case <-e.gone:
		return nil
	case <-ctx.Done():
		return errorf(CodeMount, "unmounting %s: it is not done yet; try --force", e.dir)
	}
}

// List returns all mounts, sorted by mount point. It never waits for a server.
func (t *Table) List() []MountInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	infos := make([]MountInfo, 0, len(t.mu.entries))
	for _, e := range t.mu.entries {
		infos = append(infos, e.info())
	}
	slices.SortFunc(infos, func(a, b MountInfo) int { return cmp.Compare(a.Dir, b.Dir) })
	return infos
}

// info needs the table's lock.
func (e *entry) info() MountInfo {
	i := MountInfo{Dir: e.dir, Spec: e.spec.String(), State: e.state, Since: e.since, Options: e.opts.String()}
	if e.live != nil {
		s := e.live.Status()
		i.Server, i.Provider = s.Server, s.Provider
	}
	return i
}

// Status returns what is known about the mount at dir, or about all of them if dir is empty. It never waits for a server.
func (t *Table) Status(ctx context.Context, dir string) ([]MountStatus, error) {
	if dir != "" {
		resolved, err := ResolveMountPoint(ctx, dir)
		if err != nil {
			return nil, err
		}
		dir = resolved
	}
	all := []MountStatus{}
	for _, info := range t.List() {
		if dir != "" && info.Dir != dir {
			continue
		}
		t.mu.Lock()
		e := t.mu.entries[info.Dir]
		var l live
		if e != nil {
			l = e.live
		}
		t.mu.Unlock()
		s := MountStatus{}
		if l != nil {
			s = l.Status()
		}
		s.MountInfo = info
		all = append(all, s)
	}
	if dir != "" && len(all) == 0 {
		return nil, errorf(CodeNotMounted, "status of %s: no mount of this daemon is there; see nfsrdmad list", dir)
	}
	return all, nil
}

// Snapshots returns the counters of all mounts that stand.
func (t *Table) Snapshots() []metrics.Snapshot {
	t.mu.Lock()
	lives := make([]live, 0, len(t.mu.entries))
	for _, e := range t.mu.entries {
		if e.live != nil {
			lives = append(lives, e.live)
		}
	}
	t.mu.Unlock()
	snaps := make([]metrics.Snapshot, 0, len(lives))
	for _, l := range lives {
		snaps = append(snaps, l.Snapshot())
	}
	return snaps
}

// Close refuses new mounts and ends all that there are: normally until ctx ends, with force after it. It returns when nothing is left.
func (t *Table) Close(ctx context.Context) {
	t.mu.Lock()
	t.mu.closed = true
	entries := make([]*entry, 0, len(t.mu.entries))
	for _, e := range t.mu.entries {
		entries = append(entries, e)
	}
	t.mu.Unlock()
	var wg sync.WaitGroup
	for _, e := range entries {
		wg.Go(func() { t.end(ctx, e) })
	}
	wg.Wait()
	t.watchers.Wait()
}

// end unmounts e, by force where it must. Lazy comes last: it takes a busy mount off the tree, and the aborted connection ends its users.
func (t *Table) end(ctx context.Context, e *entry) {
	err := t.Umount(ctx, UmountRequest{Dir: e.dir})
	if err == nil {
		return
	}
	t.log.Warn("unmounting by force", "dir", e.dir, "reason", err)
	forced, cancel := context.WithTimeout(context.WithoutCancel(ctx), pathTimeout)
	defer cancel()
	if err := t.Umount(forced, UmountRequest{Dir: e.dir, Mode: UmountForce}); err != nil {
		t.log.Error("unmounting by force failed", "dir", e.dir, "error", err)
	}
}
