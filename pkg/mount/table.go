package mount

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/fdstore"
	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// A mountInstance is one completed mount, from the RDMA connection to /dev/fuse. All methods may be
// called concurrently. Only Wait, Flush, Close and a normal Unmount wait for the server.
type mountInstance interface {
	// Wait returns when the file system is unmounted, however it was unmounted.
	Wait()
	// Unmount unmounts the file system. A normal unmount may wait until ctx ends for the server to
	// accept dirty data. A lazy or forced unmount does not wait.
	Unmount(ctx context.Context, mode control.UmountMode) error
	// Flush makes later writes synchronous and writes the dirty data to the server. It returns when
	// ctx ends, and when the server accepts nothing during the time stall. 0 is no limit.
	Flush(ctx context.Context, stall time.Duration)
	// Close releases the layers below the file system. The table calls it once, after Wait.
	Close()
	// Kept reports whether the mount continues when the process ends without unmounting.
	Kept() bool
	// Park stops the handling of requests of a kept mount: they are for the next process. This
	// process must exit then.
	Park()
	Status() control.MountStatus
	Snapshot() metrics.Snapshot
	// Describe sets Server, Provider, ProviderReason, FaultInjection and Failure.
	Describe(*control.MountInfo)
	// Rings returns the trace events of each connection, nil for a connection without trace.
	Rings() []*trace.Ring
}

// A plan is a parsed and checked control.MountRequest.
type plan struct {
	spec Spec
	dir  string             // without symbolic links
	at   *fusefs.MountPoint // dir, open until the mount is built; nil with virtiofs
	opts Options
	// virtiofs: dir is the path of a socket for a virtual machine
	virtiofs bool
	left     *leftMount // the mount of an earlier process; nil for a new one
}

// A builder makes the layers of one mount and mounts it. It returns when ctx ends. If it fails, it
// removes all that it made.
type builder func(ctx context.Context, p plan) (mountInstance, error)

// A Table is the table of the mounts of one process. It builds, watches and unmounts each mount
// without a lock, so that a server that does not reply delays no other mount. All methods may be
// called concurrently. Table implements control.Mounts.
type Table struct {
	log     hclog.Logger
	build   builder
	base    Options // defaults of the options of each mount
	timeout time.Duration
	quiet   bool
	shared  *shared

	mu struct {
		sync.Mutex
		entries  map[string]*entry   // by mount point
		detached map[*entry]struct{} // lazily unmounted, with open files
		closed   bool                // no new entry may be added
	}
	work sync.WaitGroup // one per entry, from reserve to remove; Add is called with mu held
}

// An entry is one mount of a table.
type entry struct {
	plan
	since   time.Time
	cancel  context.CancelFunc // cancels the build
	built   chan struct{}      // closed after a successful build
	removed chan struct{}      // closed when the entry has left the table

	// The lock of the table guards the following fields.
	state    control.MountState
	instance mountInstance // nil during the build
	reason   string        // of StateRestoring and StateKept
}

// A TableConfig configures a [Table].
type TableConfig struct {
	Log     hclog.Logger
	Base    Options       // defaults of the options of each mount
	Timeout time.Duration // of one mount request
	Faults  *faults.Plan  // injected into each mount; nil for none
	// DirtyBytes bounds the data of all mounts together that is not on stable storage.
	DirtyBytes int64
	// LockListen is ADDRESS:PORT for the calls of lock servers; "" for none.
	LockListen string
	// StateDir keeps the journal of locks; "" for none.
	StateDir string
	// Store keeps the mounts while no daemon runs. nil: the mounts end with this process.
	Store fdstore.Store
	// NotifyHelper is the command of the process that sends notifications to the kernel.
	NotifyHelper []string
	// Quiet does not log mount errors, for a caller that reports the error of Mount on the same
	// terminal.
	Quiet bool
}

// NewTable returns an empty table.
func NewTable(c TableConfig) *Table {
	common := &shared{log: c.Log.Named("mount"), dirty: fusefs.NewDirtyTotal(c.DirtyBytes),
		store: c.Store, helper: c.NotifyHelper}
	common.locks = nlm.NewService(nlm.ServiceConfig{Listen: c.LockListen, StateDir: c.StateDir,
		Restore: c.Store != nil,
		Logger:  c.Log.Named("locks")})
	t := newTable(common, c.Base, c.Timeout, newBuilder(c.Log, c.Faults, common))
	t.quiet = c.Quiet
	return t
}

func newTable(common *shared, base Options, timeout time.Duration, build builder) *Table {
	t := &Table{log: common.log, build: build, base: base, timeout: timeout, shared: common}
	t.mu.entries, t.mu.detached = make(map[string]*entry), make(map[*entry]struct{})
	return t
}

// Mount executes r, and returns when the file system is mounted. It fails when ctx ends, and after
// the timeout of the table.
func (t *Table) Mount(ctx context.Context, r control.MountRequest) (control.MountInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	p, err := t.plan(ctx, r)
	if err != nil {
		return control.MountInfo{}, err
	}
	if p.at != nil {
		defer p.at.Close()
	}
	e, err := t.reserve(p, cancel)
	if err != nil {
		return control.MountInfo{}, err
	}
	instance, err := t.build(ctx, p)
	if err != nil {
		err = t.mountError(ctx, p, err)
		if !t.quiet {
			t.log.Error("mount failed", "spec", p.spec.String(), "dir", p.dir, "error", err)
		}
		t.remove(e)
		return control.MountInfo{}, err
	}
	t.mu.Lock()
	e.instance, e.state = instance, control.StateMounted
	closed := t.mu.closed
	info := e.info()
	t.mu.Unlock()
	close(e.built)
	go t.watch(e)
	if closed { // Close ran during the build
		_ = instance.Unmount(ctx, control.UmountForce)
		return control.MountInfo{}, t.stopping(p)
	}
	t.log.Info("mounted", "spec", p.spec.String(), "dir", p.dir, "options", p.opts.String())
	return info, nil
}

func (t *Table) stopping(p plan) error {
	return control.Errorf(control.CodeMount, "mount %s on %s: the daemon is stopping; start it again first", p.spec,
		p.dir)
}

// plan parses r and checks everything that needs no server.
func (t *Table) plan(ctx context.Context, r control.MountRequest) (plan, error) {
	spec, err := ParseSpec(r.Spec)
	if err != nil {
		return plan{}, err
	}
	opts, err := ParseOptions(t.base, r.Options)
	if err != nil {
		return plan{}, err
	}
	if r.Virtiofs {
		return plan{spec: spec, dir: filepath.Clean(r.Dir), opts: opts, virtiofs: true}, nil
	}
	if err := CheckPrivilege(); err != nil {
		return plan{}, err
	}
	if err := opts.checkPrivilege(); err != nil {
		return plan{}, err
	}
	at, err := CheckMountPoint(ctx, r.Dir)
	if err != nil {
		return plan{}, err
	}
	return plan{spec: spec, dir: at.Path(), at: at, opts: opts}, nil
}

func (t *Table) reserve(p plan, cancel context.CancelFunc) (*entry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, t.stopping(p)
	}
	if other := t.mu.entries[p.dir]; other != nil {
		return nil, control.Errorf(control.CodeMount, "mount point %s: in use by %s (%s); unmount it first", p.dir,
			other.spec, other.state)
	}
	e := &entry{plan: p, since: time.Now(), cancel: cancel, built: make(chan struct{}),
		removed: make(chan struct{}), state: control.StateMounting}
	t.mu.entries[p.dir] = e
	t.work.Add(1)
	return e, nil
}

// remove removes an entry from the table at the end of its mount.
func (t *Table) remove(e *entry) {
	t.mu.Lock()
	if t.mu.entries[e.dir] == e {
		delete(t.mu.entries, e.dir)
	}
	delete(t.mu.detached, e)
	t.mu.Unlock()
	close(e.removed)
	t.work.Done()
}

// watch waits for the end of a mount and releases it.
func (t *Table) watch(e *entry) {
	e.instance.Wait()
	e.instance.Close()
	t.log.Info("unmounted", "spec", e.spec.String(), "dir", e.dir)
	t.remove(e)
}

// mountError adds the mount and a class to an error of the builder that has no class.
func (t *Table) mountError(ctx context.Context, p plan, err error) error {
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
		return &control.Error{Code: control.CodeCanceled, Err: err,
			Text: fmt.Sprintf("mount %s on %s: interrupted", p.spec, p.dir)}
	}
	return &control.Error{Code: control.CodeMount, Err: err,
		Text: fmt.Sprintf("mount %s on %s: %s", p.spec, p.dir, control.OneLine(err.Error()))}
}

// forceFlushTimeout and forceStall bound how long a forced unmount writes dirty data.
const (
	forceFlushTimeout = 20 * time.Second
	forceStall        = 5 * time.Second // without progress
)

// Umount unmounts the mount at r.Dir. A normal unmount fails if a file is open, or if the server
// does not accept the dirty data before ctx ends. The mount then stays mounted. A forced unmount
// first writes the dirty data, while the server accepts it.
func (t *Table) Umount(ctx context.Context, r control.UmountRequest) error {
	switch r.Mode {
	case control.UmountNormal, control.UmountLazy, control.UmountForce:
	default:
		return control.Errorf(control.CodeUsage, "unmount %s: unknown mode %q; use force or lazy", r.Dir,
			string(r.Mode))
	}
	dir, err := t.resolve(ctx, r.Dir)
	if err != nil {
		return err
	}
	e := t.find(dir, r.Mode)
	if e == nil {
		return notMounted("unmount", dir)
	}
	if r.Mode == control.UmountForce {
		flushCtx, cancel := running.WithTimeout(ctx, forceFlushTimeout)
		t.flush(flushCtx, e, forceStall)
		cancel()
	}
	return t.unmount(ctx, e, r.Mode)
}

// flush makes later writes of a mount synchronous and writes its dirty data. See
// [mountInstance.Flush]. It does nothing during the build of the mount.
func (t *Table) flush(ctx context.Context, e *entry, stall time.Duration) {
	if instance := t.setState(e, control.StateUnmounting); instance != nil {
		instance.Flush(ctx, stall)
	}
}

// notMounted returns the error of an operation on a directory that is not in the table. The
// directory may be a mount of another process, or of a daemon that was killed.
func notMounted(operation, dir string) error {
	if mounted, err := isMountPoint(dir); err == nil && mounted {
		return control.Errorf(control.CodeNotMounted, "%s %s: another process owns the mount at %s; use umount(8)",
			operation, dir, dir)
	}
	return control.Errorf(control.CodeNotMounted, "%s %s: not mounted by this daemon; see nfsrdmad list", operation,
		dir)
}

// resolve returns the mount point that a request names. If the table has a mount with exactly this
// name, resolve accesses no file system: the directory may be below a mount whose server does not
// reply.
func (t *Table) resolve(ctx context.Context, dir string) (string, error) {
	if clean := filepath.Clean(dir); t.find(clean, control.UmountForce) != nil {
		return clean, nil
	}
	return ResolveMountPoint(ctx, dir)
}

// find returns the mount at dir, or nil. With UmountForce it also finds detached mounts.
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
	instance := t.setState(e, control.StateUnmounting)
	if instance == nil && e.left != nil {
		return t.umountLeft(ctx, e, mode)
	}
	if instance == nil {
		e.cancel() // the build may complete nevertheless
		select {
		case <-e.removed:
			return nil
		case <-e.built:
			instance = t.setState(e, control.StateUnmounting)
		case <-ctx.Done():
			return umountTimeout(e)
		}
	}
	if err := instance.Unmount(ctx, mode); err != nil {
		t.setState(e, control.StateMounted)
		return err
	}
	if mode == control.UmountLazy {
		t.detach(e)
		return nil
	}
	select {
	case <-e.removed:
		return nil
	case <-ctx.Done():
		return umountTimeout(e)
	}
}

func umountTimeout(e *entry) error {
	return control.Errorf(control.CodeMount, "unmount %s: timeout; try --force", e.dir)
}

// setState sets the state of a mount that is neither in its build nor detached. It returns the
// instance of the mount, nil during the build.
func (t *Table) setState(e *entry, state control.MountState) mountInstance {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.instance != nil && t.mu.entries[e.dir] == e {
		e.state = state
	}
	return e.instance
}

// detach moves a lazily unmounted mount to the detached mounts, so that its mount point is free.
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

// A view is a snapshot of an entry.
type view struct {
	control.MountInfo
	instance mountInstance // nil during the build
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

// info describes e. The caller holds the lock of the table.
func (e *entry) info() control.MountInfo {
	i := control.MountInfo{Dir: e.dir, State: e.state, Since: e.since, Reason: e.reason}
	if e.spec != (Spec{}) { // unknown in StateKept
		i.Spec, i.Options = e.spec.String(), e.opts.String()
	}
	if e.instance != nil {
		e.instance.Describe(&i)
	}
	if i.Failure != "" && i.State == control.StateMounted {
		i.State = control.StateFailed
	}
	return i
}

// Status returns the status of the mount at dir, or of all mounts if dir is empty. It never waits
// for a server.
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
		// During the build there are no calls and no history.
		s := control.MountStatus{Calls: []control.PendingCall{}, History: []control.ConnEvent{}}
		if v.instance != nil {
			s = v.instance.Status()
		}
		s.MountInfo = v.MountInfo
		all = append(all, s)
	}
	if dir != "" && len(all) == 0 {
		return nil, notMounted("status", dir)
	}
	return all, nil
}

// Snapshots returns the statistics of all completed mounts. It leaves detached mounts out, because
// their mount point may have another mount.
func (t *Table) Snapshots() []metrics.Snapshot {
	t.mu.Lock()
	instances := make([]mountInstance, 0, len(t.mu.entries))
	for _, e := range t.mu.entries {
		if e.instance != nil {
			instances = append(instances, e.instance)
		}
	}
	t.mu.Unlock()
	snaps := make([]metrics.Snapshot, 0, len(instances))
	for _, instance := range instances {
		snaps = append(snaps, instance.Snapshot())
	}
	return snaps
}

// Close refuses new mounts and unmounts all mounts. It first writes their dirty data, until ctx
// ends. It unmounts mounts with open files by force. It leaves mounts in [control.StateKept] alone.
// Close returns when all other mounts are released, at the latest [CloseGrace] after the end of
// ctx. It logs the mounts that are not released. Its error means that written data is lost; the log
// names the files.
func (t *Table) Close(ctx context.Context) error {
	defer settleConnects()
	defer t.shared.locks.Close()
	lostBefore := t.shared.unmount.Load()
	t.mu.Lock()
	t.mu.closed = true
	var unmounts sync.WaitGroup
	for _, e := range t.mu.entries {
		if e.state != control.StateKept {
			unmounts.Go(func() {
				t.flush(ctx, e, 0)
				t.unmountOrForce(ctx, e)
			})
		}
	}
	for e := range t.mu.detached {
		if e.state != control.StateKept {
			unmounts.Go(func() {
				t.flush(ctx, e, 0)
				t.force(ctx, e)
			})
		}
	}
	t.mu.Unlock()
	unmounts.Wait()
	released := make(chan struct{})
	go func() {
		defer close(released)
		t.work.Wait()
	}()
	select {
	case <-released:
	case <-time.After(releaseTimeout):
		for _, v := range t.all() {
			t.log.Error("mount not released", "spec", v.Spec, "dir", v.Dir)
		}
	}
	return t.LossError(lostBefore)
}

// releaseTimeout bounds the release of unmounted mounts. It is longer than the timeouts of its
// steps together.
const releaseTimeout = writeBackTimeout + nlm.CloseTimeout + umntTimeout + 3*time.Second

// CloseGrace bounds the time that [Table.Close] takes after the end of its context.
const CloseGrace = pathTimeout + releaseTimeout + nlm.CloseTimeout + settleTimeout

// unmountOrForce unmounts e normally, and by force if that fails.
func (t *Table) unmountOrForce(ctx context.Context, e *entry) {
	if err := t.unmount(ctx, e, control.UmountNormal); err != nil {
		t.log.Warn("forcing unmount", "dir", e.dir, "reason", err)
		t.force(ctx, e)
	}
}

// force unmounts e by force, also if ctx has ended.
func (t *Table) force(ctx context.Context, e *entry) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pathTimeout)
	defer cancel()
	if err := t.unmount(ctx, e, control.UmountForce); err != nil {
		t.log.Error("forced unmount failed", "dir", e.dir, "error", err)
	}
}

// Wait returns when the mount at dir is released, or when ctx ends.
func (t *Table) Wait(ctx context.Context, dir string) {
	t.mu.Lock()
	e := t.mu.entries[dir]
	t.mu.Unlock()
	if e == nil {
		return
	}
	select {
	case <-e.removed:
	case <-ctx.Done():
	}
}
