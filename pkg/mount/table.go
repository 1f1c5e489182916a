package mount

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// A mountInstance is a mount that stands: everything from the RDMA connection to /dev/fuse. All methods may
// be called concurrently, and none but Wait, and a normal Unmount, waits for the server.
type mountInstance interface {
	// Wait returns when the file system is no longer mounted, whoever unmounted it.
	Wait()
	// Unmount takes the file system off its directory. A normal one may wait for the server to take
	// what is still to be written, until ctx ends; lazy and force do not wait.
	Unmount(ctx context.Context, mode control.UmountMode) error
	// Close releases what is behind the file system. Called once, after Wait.
	Close()
	Status() control.MountStatus
	Snapshot() metrics.Snapshot
	// Describe fills in what a mount never changes: Server, Provider and FaultInjection.
	Describe(*control.MountInfo)
	// Rings are the trace events of each connection; nil for one whose trace is off.
	Rings() []*trace.Ring
}

// A plan is a control.MountRequest that was understood.
type plan struct {
	spec Spec
	dir  string // resolved
	opts Options
}

// A builder makes the layers of one mount and mounts it. It ends when ctx does, and leaves nothing
// behind when it fails.
type builder func(ctx context.Context, p plan) (mountInstance, error)

// A Table holds the mounts of a daemon. Each is on its own: it is built, watched and torn down by
// goroutines that hold no lock of the table, so that one dead server delays no other mount. Safe
// for concurrent use.
type Table struct {
	log     hclog.Logger
	build   builder
	base    Options // under the options of each mount
	timeout time.Duration
	quiet   bool // who asks for a mount reports its failure on the log's own terminal

	mu struct {
		sync.Mutex
		entries  map[string]*entry   // by mount point
		detached map[*entry]struct{} // off the tree by a lazy unmount, files still open
		closed   bool                // no entry is added any more
	}
	work sync.WaitGroup // one for each entry, from reserve to remove; added to under mu
}

// An entry is one mount. Its fields but the state are set before it is shown as mounted, and do not
// change.
type entry struct {
	plan
	since  time.Time
	cancel context.CancelFunc // of the building; set from the start
	built  chan struct{}      // closed when the building has ended, either way
	gone   chan struct{}      // closed when the entry has left the table

	// Guarded by the table's lock.
	state    control.MountState
	instance mountInstance // nil while mounting
}

// A TableConfig configures a [Table].
type TableConfig struct {
	Log     hclog.Logger
	Base    Options       // under the options of each mount
	Timeout time.Duration // of one mount
	Faults  *faults.Plan  // injected into each mount; nil for none
	// Quiet leaves failures of mounts out of the log, for a caller who reports them itself.
	Quiet bool
}

// NewTable makes an empty table.
func NewTable(c TableConfig) *Table {
	t := newTable(c.Log.Named("mount"), c.Base, c.Timeout, newBuilder(c.Log, c.Faults))
	t.quiet = c.Quiet
	return t
}

func newTable(log hclog.Logger, base Options, timeout time.Duration, build builder) *Table {
	t := &Table{log: log, build: build, base: base, timeout: timeout}
	t.mu.entries, t.mu.detached = make(map[string]*entry), make(map[*entry]struct{})
	return t
}

// Mount mounts what r asks for, and returns when the file system is there or cannot be. It ends
// when ctx does, at the latest after the table's timeout.
func (t *Table) Mount(ctx context.Context, r control.MountRequest) (control.MountInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	p, err := t.plan(ctx, r)
	if err != nil {
		return control.MountInfo{}, err
	}
	e, err := t.reserve(p, cancel)
	if err != nil {
		return control.MountInfo{}, err
	}
	l, err := t.build(ctx, p)
	if err != nil {
		err = t.classify(ctx, p, err)
		if !t.quiet {
			t.log.Error("mount failed", "spec", p.spec.String(), "dir", p.dir, "error", err)
		}
		t.remove(e)
		return control.MountInfo{}, err
	}
	t.mu.Lock()
	e.instance, e.state = l, control.StateMounted
	closed := t.mu.closed
	info := e.info()
	t.mu.Unlock()
	close(e.built)
	go t.watch(e)
	if closed { // the daemon ended while this was under way
		_ = l.Unmount(ctx, control.UmountForce)
		return control.MountInfo{}, t.stopping(p)
	}
	t.log.Info("mounted", "spec", p.spec.String(), "dir", p.dir, "options", p.opts.String())
	return info, nil
}

func (t *Table) stopping(p plan) error {
	return control.Errorf(control.CodeMount, "mounting %s on %s: the daemon is stopping; start it again first", p.spec, p.dir)
}

// plan checks all of r that can be checked without the server.
func (t *Table) plan(ctx context.Context, r control.MountRequest) (plan, error) {
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
		return nil, t.stopping(p)
	}
	if other := t.mu.entries[p.dir]; other != nil {
		return nil, control.Errorf(control.CodeMount, "mount point %s: taken by %s (%s); unmount it first", p.dir, other.spec,
			other.state)
	}
	e := &entry{plan: p, since: time.Now(), cancel: cancel, built: make(chan struct{}), gone: make(chan struct{}),
		state: control.StateMounting}
	t.mu.entries[p.dir] = e
	t.work.Add(1)
	return e, nil
}

// remove takes an entry off the table, in the end.
func (t *Table) remove(e *entry) {
	t.mu.Lock()
	if t.mu.entries[e.dir] == e {
		delete(t.mu.entries, e.dir)
	}
	delete(t.mu.detached, e)
	t.mu.Unlock()
	close(e.gone)
	t.work.Done()
}

// watch waits for the end of a mount and cleans up after it.
func (t *Table) watch(e *entry) {
	e.instance.Wait()
	e.instance.Close()
	t.log.Info("unmounted", "spec", e.spec.String(), "dir", e.dir)
	t.remove(e)
}

// classify gives a builder's error a code, where it has none, and names the mount.
func (t *Table) classify(ctx context.Context, p plan, err error) error {
	var e *control.Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		t.mu.Lock()
		closed := t.mu.closed
		t.mu.Unlock()
		if closed {
			return t.stopping(p)
		}
		return &control.Error{Code: control.CodeCanceled, Text: "mounting " + p.spec.String() + " on " + p.dir + ": interrupted",
			Err: err}
	}
	return &control.Error{Code: control.CodeMount, Text: "mounting " + p.spec.String() + " on " + p.dir + ": " + control.OneLine(err.Error()),
		Err: err}
}

// Umount ends the mount at r.Dir. A normal unmount of a busy mount, or of one whose server does not
// answer in time, fails and says what else to try; the mount goes on.
func (t *Table) Umount(ctx context.Context, r control.UmountRequest) error {
	switch r.Mode {
	case control.UmountNormal, control.UmountLazy, control.UmountForce:
	default:
		return control.Errorf(control.CodeUsage, "unmounting %s: unknown mode %q; use force or lazy", r.Dir, string(r.Mode))
	}
	dir, err := t.resolve(ctx, r.Dir)
	if err != nil {
		return err
	}
	e := t.find(dir, r.Mode)
	if e == nil {
		return notOurs("unmounting", dir)
	}
	return t.unmount(ctx, e, r.Mode)
}

// notOurs says that a mount point is not in the table. What is there may have been left by a daemon
// that was killed.
func notOurs(what, dir string) error {
	if mounted, err := isMountPoint(dir); err == nil && mounted {
		return control.Errorf(control.CodeNotMounted, "%s %s: what is mounted there is not this daemon's; use umount(8) to end it",
			what, dir)
	}
	return control.Errorf(control.CodeNotMounted, "%s %s: no mount of this daemon is there; see nfsrdmad list", what, dir)
}

// resolve returns the mount point that a request names. One that the table has by that very name is
// not looked at: what it lies in may be another mount, whose server is dead.
func (t *Table) resolve(ctx context.Context, dir string) (string, error) {
	if clean := filepath.Clean(dir); t.find(clean, control.UmountForce) != nil {
		return clean, nil
	}
	return ResolveMountPoint(ctx, dir)
}

// find returns the mount at dir, or nil. Force reaches one that was detached lazily, too.
func (t *Table) find(dir string, mode control.UmountMode) *entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.mu.entries[dir]; e != nil || mode != control.UmountForce {
		return e
	}
	for e := range t.mu.detached {
		if e.dir == dir {
			return e
		}
	}
	return nil
}

func (t *Table) unmount(ctx context.Context, e *entry, mode control.UmountMode) error {
	l := t.setState(e, control.StateUnmounting)
	// the building is under way; what it made before it heard of this is unmounted as any other
	if l == nil {
		e.cancel()
		select {
		case <-e.gone:
			return nil
		case <-e.built:
			l = t.setState(e, control.StateUnmounting)
		case <-ctx.Done():
			return t.notDone(e)
		}
	}
	if err := l.Unmount(ctx, mode); err != nil {
		t.setState(e, control.StateMounted)
		return err
	}
	if mode == control.UmountLazy {
		t.detach(e)
		return nil
	}
	select {
	case <-e.gone:
		return nil
	case <-ctx.Done():
		return t.notDone(e)
	}
}

func (t *Table) notDone(e *entry) error {
	return control.Errorf(control.CodeMount, "unmounting %s: it is not done yet; try --force", e.dir)
}

// setState marks a mount that was built and is on the tree, and returns its instance; nil while it is
// built.
func (t *Table) setState(e *entry, state control.MountState) mountInstance {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.instance != nil && t.mu.entries[e.dir] == e {
		e.state = state
	}
	return e.instance
}

// detach frees the mount point of a mount that was taken off it lazily, for another one.
func (t *Table) detach(e *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.entries[e.dir] == e {
		delete(t.mu.entries, e.dir)
		t.mu.detached[e] = struct{}{}
	}
}

// List returns all mounts, sorted by mount point. It never waits for a server.
func (t *Table) List() []control.MountInfo {
	all := t.all()
	infos := make([]control.MountInfo, len(all))
	for i := range all {
		infos[i] = all[i].MountInfo
	}
	return infos
}

// A view is a mount as it was at one moment; instance is nil while it is built.
type view struct {
	control.MountInfo
	instance mountInstance
}

func (t *Table) all() []view {
	t.mu.Lock()
	views := make([]view, 0, len(t.mu.entries)+len(t.mu.detached))
	for _, e := range t.mu.entries {
		views = append(views, view{e.info(), e.instance})
	}
	for e := range t.mu.detached {
		views = append(views, view{e.info(), e.instance})
	}
	t.mu.Unlock()
	slices.SortFunc(views, func(a, b view) int { return cmp.Or(cmp.Compare(a.Dir, b.Dir), a.Since.Compare(b.Since)) })
	return views
}

// info needs the table's lock.
func (e *entry) info() control.MountInfo {
	i := control.MountInfo{Dir: e.dir, Spec: e.spec.String(), State: e.state, Since: e.since, Options: e.opts.String()}
	if e.instance != nil {
		e.instance.Describe(&i)
	}
	return i
}

// Status returns what is known about the mount at dir, or about all of them if dir is empty. It
// never waits for a server.
func (t *Table) Status(ctx context.Context, dir string) ([]control.MountStatus, error) {
	if dir != "" {
		resolved, err := t.resolve(ctx, dir)
		if err != nil {
			return nil, err
		}
		dir = resolved
	}
	all := []control.MountStatus{}
	for _, v := range t.all() {
		if dir != "" && v.Dir != dir {
			continue
		}
		// what is still mounting has none
		s := control.MountStatus{Calls: []control.PendingCall{}, History: []control.ConnEvent{}}
		if v.instance != nil {
			s = v.instance.Status()
		}
		s.MountInfo = v.MountInfo
		all = append(all, s)
	}
	if dir != "" && len(all) == 0 {
		return nil, notOurs("status of", dir)
	}
	return all, nil
}

// Snapshots returns the counters of all mounts that stand. One that was detached lazily is left
// out: its mount point may be another's by now.
func (t *Table) Snapshots() []metrics.Snapshot {
	t.mu.Lock()
	lives := make([]mountInstance, 0, len(t.mu.entries))
	for _, e := range t.mu.entries {
		if e.instance != nil {
			lives = append(lives, e.instance)
		}
	}
	t.mu.Unlock()
	snaps := make([]metrics.Snapshot, 0, len(lives))
	for _, l := range lives {
		snaps = append(snaps, l.Snapshot())
	}
	return snaps
}

// Close refuses new mounts and ends all that there are: normally until ctx ends, with force after
// it. It returns when nothing is left, or says in the log what the kernel does not let go of. After
// ctx has ended it takes [CloseGrace] at most.
func (t *Table) Close(ctx context.Context) {
	defer settleConnects()
	t.mu.Lock()
	t.mu.closed = true
	var ending sync.WaitGroup
	for _, e := range t.mu.entries {
		ending.Go(func() { t.end(ctx, e) })
	}
	for e := range t.mu.detached {
		ending.Go(func() { t.force(ctx, e) })
	}
	t.mu.Unlock()
	ending.Wait()
	released := make(chan struct{})
	go func() {
		defer close(released)
		t.work.Wait()
	}()
	select {
	case <-released:
	case <-time.After(releaseTimeout):
		for _, v := range t.all() {
			t.log.Error("mount does not end", "spec", v.Spec, "dir", v.Dir)
		}
	}
}

// releaseTimeout bounds the wait for what is behind mounts that are gone: longer than the bounds of
// its parts together.
const releaseTimeout = writeBackTimeout + umntTimeout + 3*time.Second

// CloseGrace is the most that [Table.Close] takes after its context has ended.
const CloseGrace = pathTimeout + releaseTimeout + settleTimeout

// end unmounts e, by force where it must.
func (t *Table) end(ctx context.Context, e *entry) {
	if err := t.unmount(ctx, e, control.UmountNormal); err != nil {
		t.log.Warn("unmounting by force", "dir", e.dir, "reason", err)
		t.force(ctx, e)
	}
}

// force takes a mount off the tree whatever is going on there, and ends its users.
func (t *Table) force(ctx context.Context, e *entry) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pathTimeout)
	defer cancel()
	if err := t.unmount(ctx, e, control.UmountForce); err != nil {
		t.log.Error("unmounting by force failed", "dir", e.dir, "error", err)
	}
}

// Wait returns when the mount at dir is gone, or ctx ends.
func (t *Table) Wait(ctx context.Context, dir string) {
	t.mu.Lock()
	e := t.mu.entries[dir]
	t.mu.Unlock()
	if e == nil {
		return
	}
	select {
	case <-e.gone:
	case <-ctx.Done():
	}
}
