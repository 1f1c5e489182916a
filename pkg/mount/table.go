package mount

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
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
	// KeepError returns why the mount ends with the process, nil if it continues when the process
	// ends without unmounting.
	KeepError() error
	// Stalled returns the age of the oldest request without reply. One goroutine calls it, again
	// and again.
	Stalled() stall
	Status(*metrics.Snapshot) control.MountStatus
	// Stats returns the counters. The caller sets Dir, Spec and State.
	Stats(*metrics.Snapshot) control.MountStats
	// Slow returns the slowest calls, without Dir.
	Slow() control.SlowCalls
	// Snapshot returns the statistics. The caller sets Stalled and Stalls.
	Snapshot() metrics.Snapshot
	// Describe sets Server, Provider, ProviderReason, FaultInjection and Failure.
	Describe(*control.MountInfo)
	// Rings returns the trace events of each connection, nil for a connection without trace.
	Rings() []*trace.Ring
}

// A plan is a parsed and checked control.MountRequest.
type plan struct {
	spec Spec
	dir  string            // without symbolic links
	at   *mountpoint.Point // dir, open until the mount is built; nil with virtiofs
	opts Options
	// virtiofs: dir is the path of a socket for a virtual machine
	virtiofs bool
	left     *leftMount    // the mount of an earlier process; nil for a new one
	timeout  time.Duration // of each step to continue the mount of an earlier process
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
	allowed Allowed
	shared  *shared

	mu struct {
		sync.Mutex
		entries  map[string]*entry   // by mount point
		detached map[*entry]struct{} // lazily unmounted, with open files
		closed   bool                // no new entry may be added
	}
	work sync.WaitGroup // one per entry, from reserve to remove; Add is called with mu held

	closing chan struct{}             // closed when mu.closed is set
	looked  atomic.Pointer[time.Time] // when watchStalls looked

	stallAborts atomic.Uint64
}

// An entry is one mount of a table.
type entry struct {
	plan
	since   time.Time          // of the mount request
	cancel  context.CancelFunc // cancels the build
	built   chan struct{}      // closed after a successful build
	ended   chan struct{}      // closed when the file system is unmounted
	removed chan struct{}      // closed when the entry has left the table

	restored func() // of a mount of an earlier process: it continues or was discarded

	// The lock of the table guards the following fields.
	state    control.MountState
	instance mountInstance // nil during the build
	reason   string        // of StateRestoring and StateKept
	stall    stall
	stalls   uint64    // how often a stall began
	aborting bool      // because of a stall
	refused  time.Time // when the first attempt to continue the mount failed; zero for none
}

// A TableConfig configures a [Table].
type TableConfig struct {
	Log     hclog.Logger
	Base    Options       // defaults of the options of each mount
	Timeout time.Duration // of one mount request
	Faults  *faults.Plan  // injected into each mount; nil for none
	// DirtyBytes bounds the data of all mounts together that is not on stable storage.
	DirtyBytes int64
	// ConnectRate bounds the connects per second to each address of servers; 0 for no bound.
	ConnectRate int
	// LockListen is ADDRESS:PORT for the calls of lock servers; "" for none.
	LockListen string
	// StateDir keeps the owners of locks; "" for none.
	StateDir string
	// Store keeps the mounts while no daemon runs. nil: the mounts end with this process. NoStore is
	// why then; nil if they are meant to.
	Store   fdstore.Store
	NoStore error
	// Allowed are the mounts that the table may make. Mounts of an earlier process continue in any
	// case.
	Allowed Allowed
	// Traces, if not nil, gets the sampled requests and RPCs. The caller closes it after the table.
	Traces *otlp.Exporter
	// NotifyHelper is the command of the process that sends notifications to the kernel.
	NotifyHelper []string
	// Quiet does not log mount errors, for a caller that reports the error of Mount on the same
	// terminal.
	Quiet bool
}

// NewTable returns an empty table.
func NewTable(c TableConfig) *Table {
	common := &shared{log: c.Log.Named("mount"), dirty: data.NewTotal(c.DirtyBytes),
		store: c.Store, noStore: c.NoStore, helper: c.NotifyHelper, connects: xprt.NewConnectLimits(c.ConnectRate),
		traces: c.Traces}
	common.locks = nlm.NewService(nlm.ServiceConfig{Listen: c.LockListen, StateDir: c.StateDir,
		Restore: c.Store != nil,
		Logger:  c.Log.Named("locks")})
	t := newTable(common, c.Base, c.Timeout, newBuilder(c.Log, c.Faults, common))
	t.quiet, t.allowed = c.Quiet, c.Allowed
	go t.watchStalls()
	return t
}

func newTable(common *shared, base Options, timeout time.Duration, build builder) *Table {
	t := &Table{log: common.log, build: build, base: base, timeout: timeout, shared: common,
		closing: make(chan struct{})}
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
	t.awaitRelease(ctx, p)
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
	if err := t.allowed.CheckSource(spec, &opts); err != nil {
		return plan{}, err
	}
	if r.Virtiofs {
		if opts.Writeback {
			return plan{}, &OptionError{"writeback", "", "not supported by virtiofs; remove the option"}
		}
		socket := filepath.Clean(r.Dir)
		if err := t.allowed.checkSocket(ctx, socket); err != nil {
			return plan{}, err
		}
		return plan{spec: spec, dir: socket, opts: opts, virtiofs: true}, nil
	}
	if err := CheckPrivilege(); err != nil {
		return plan{}, err
	}
	if err := opts.checkPrivilege(); err != nil {
		return plan{}, err
	}
	at, err := CheckMountPoint(ctx, r)
	if err != nil {
		return plan{}, err
	}
	if err := t.allowed.checkDir(at.Path()); err != nil { // of the directory that is open
		at.Close()
		return plan{}, err
	}
	return plan{spec: spec, dir: at.Path(), at: at, opts: opts}, nil
}

// awaitRelease waits for the release of a mount at the same directory that was unmounted by another
// program, such as umount(8). It returns when reserve can decide, or when ctx ends.
func (t *Table) awaitRelease(ctx context.Context, p plan) {
	t.mu.Lock()
	other := t.mu.entries[p.dir]
	mounted := other != nil && other.instance != nil
	t.mu.Unlock()
	if !mounted || p.at == nil {
		return
	}
	notice := time.NewTimer(unmountNotice)
	defer notice.Stop()
	select {
	case <-other.ended:
	case <-other.removed:
	case <-notice.C:
		return // in use
	case <-ctx.Done():
		return
	}
	select {
	case <-other.removed:
	case <-ctx.Done():
	}
}

// unmountNotice bounds the time in which the kernel tells the daemon that a file system was
// unmounted.
const unmountNotice = time.Second

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
	e := &entry{plan: p, since: time.Now(), cancel: cancel, built: make(chan struct{}), ended: make(chan struct{}),
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
	close(e.ended)
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
