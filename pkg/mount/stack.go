package mount

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// umntTimeout bounds the UMNT call, which only informs the server.
	umntTimeout = 2 * time.Second
	// writeBackTimeout and writeBackStall bound the write of dirty data after the file system was
	// unmounted. Processes that were killed leave this data.
	writeBackTimeout = 20 * time.Second
	writeBackStall   = 5 * time.Second // without progress
	// settleTimeout bounds the wait for canceled connection attempts, which end much earlier.
	settleTimeout = time.Second
)

// A frontServer serves the file system of a mount: to this host's kernel or to a virtual machine.
type frontServer interface {
	Wait() // returns when the mount has ended
	Unmount() error
	UnmountLazy() error
	ForceUnmount() error
}

// A mountStack is the stack of one mount, from the provider to /dev/fuse or to a virtual machine.
// It implements mountInstance.
type mountStack struct {
	plan
	inject     *faults.Plan // nil for none
	shared     *shared      // with the other mounts of the table
	mountArgs  mountd.Args
	address    netip.AddrPort // of the mount source, with the RDMA port
	provider   verbs.Provider
	reason     string // for the choice of the provider
	anyMemory  bool   // the provider can read into memory that is not from membuf
	transports caller
	locks      *nlm.Client // nil if the kernel keeps all locks
	fs         *vfs.FS
	lockedFS   atomic.Pointer[vfs.FS] // fs, for locks, which exists before
	server     frontServer
	phases     phases
	usage      usage
	since      time.Time // of usage and of the other counters
	keeper     *keeper   // nil if the mount ends with the process
	keepError  error     // of the keeper
	aborted    atomic.Bool
	stallFinder
	invalid pace.Limiter

	unmounts struct {
		sync.Mutex
		closed  bool           // no new umount(2) call may begin
		running sync.WaitGroup // umount(2) calls; Go is called with the mutex held
	}
}

// SettleConnects waits until the canceled connection attempts of this process have ended. Otherwise
// the end of the process could drop a TCP connection that a stock Linux server has just accepted,
// and the server would lose its listener.
func SettleConnects() {
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	softiwarp.Settle(ctx)
}

// newBuilder returns the builder of mountStacks.
func newBuilder(log hclog.Logger, inject *faults.Plan, common *shared) builder {
	return func(ctx context.Context, p plan) (mountInstance, error) {
		s := &mountStack{plan: p, inject: inject, shared: common, since: time.Now()}
		s.phases.traces = s.newTraces()
		if err := s.build(ctx, log.Named("nfs")); err != nil {
			return nil, err
		}
		return s, nil
	}
}

// build creates the layers from the bottom up. If one fails, build removes those below it.
func (s *mountStack) build(ctx context.Context, log hclog.Logger) (err error) {
	var undo []func()
	defer func() {
		if err == nil {
			return
		}
		for _, f := range slices.Backward(undo) {
			f()
		}
	}()
	prepare, cancel := s.step(ctx)
	defer cancel()
	addr, err := ResolveHost(prepare, s.spec.Host)
	if err != nil {
		return err
	}
	machine, _ := os.Hostname() // AUTH_SYS allows an empty machine name
	s.mountArgs = mountd.Args{Host: addr.String(), Export: s.spec.Export, Port: int(s.opts.MountPort),
		AnySourcePort: s.opts.NoResvPort, Timeout: remaining(prepare), Cred: &sunrpc.AuthSys{Machine: machine}}
	root, err := s.exportRoot(prepare)
	if err != nil {
		return err
	}
	if s.left == nil {
		undo = append(undo, s.sendUmnt)
		if err := CheckFlavors(s.spec.Export, root); err != nil {
			return err
		}
		if err := s.checkAddresses(prepare, root.FH, log); err != nil {
			return err
		}
	}
	s.keep(&root, log)
	if s.left == nil {
		undo = append(undo, s.keeper.remove)
	}
	s.address = netip.AddrPortFrom(addr, s.opts.Port)
	provider, reason, err := ChooseProvider(prepare, &s.opts, s.addresses()[0], log)
	if err != nil {
		return err
	}
	log.Debug("chose provider", "provider", provider.Name(), "reason", reason)
	s.anyMemory = provider.Name() == providerSoftiwarp // verbs.CapRegisterAny
	s.provider, s.reason = WithFaults(provider, s.inject, log), reason
	undo = append(undo, s.transports.close)
	if err := s.connect(ctx, log); err != nil {
		return err
	}
	client := nfs3.NewClient(&s.transports)
	if s.locks = s.newLocks(machine, root.Port, log); s.locks != nil && s.left != nil {
		undo = append(undo, s.locks.Detach)
	} else if s.locks != nil {
		undo = append(undo, s.locks.Close)
	}
	if err := s.newFS(ctx, client, root.FH, log); err != nil {
		return err
	}
	if s.left != nil {
		if err := s.resume(log); err != nil {
			undo = nil // the data of the FS must stay
			return fmt.Errorf("%w: %w", errNotResumed, err)
		}
		return nil
	}
	undo = append(undo, s.closeFS)
	if s.virtiofs {
		s.server, err = s.serveGuest(log)
		return err
	}
	if s.server, err = vfs.MountAt(s.at, s.fs, s.mountOptions(log)); err == nil {
		s.logLimits(log)
	}
	return err
}

// newFS makes the file system. It sends the first calls to the server.
func (s *mountStack) newFS(ctx context.Context, client *nfs3.Client, root nfs3.FH, log hclog.Logger) (err error) {
	ctx, cancel := s.step(ctx)
	defer cancel()
	o := s.fsOptions(log)
	if !s.opts.NoACL {
		o.ACL = nfsacl.NewClient(&s.transports)
	}
	if s.fs, err = vfs.New(ctx, nfs3.NewServer(client), root, o); err != nil {
		return s.serverError(ctx, s.address, err)
	}
	s.lockedFS.Store(s.fs)
	return nil
}

// step returns the context of a part of build that waits for other hosts, except connects. The
// context of a new mount has the deadline of the mount request. A mount of an earlier process has
// no deadline for connects: many mounts that are continued at once wait for the limits of connects.
// With a deadline, they would drop their first connections and try again, without end.
func (s *mountStack) step(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.left == nil {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, s.timeout)
}

// resume serves the requests of a mount or share of an earlier process.
func (s *mountStack) resume(log hclog.Logger) (err error) {
	if s.virtiofs {
		s.server, err = s.serveGuest(log)
		return err
	}
	defer s.left.closeMemory()
	s.server, err = vfs.Resume(s.dir, s.left.device, s.left.memoryFile, s.fs, s.mountOptions(log))
	return err
}

// logLimits logs what a new mount cannot do on this host.
func (s *mountStack) logLimits(log hclog.Logger) {
	if s.opts.Writeback && !s.fs.Writeback() {
		log.Warn("the mount does not use writeback", "mount", s.dir, "reason", "the kernel is older than Linux 6.6")
	}
}

// exportRoot asks the server for the handle of the export. A mount of an earlier process keeps its
// handle.
func (s *mountStack) exportRoot(ctx context.Context) (mountd.Result, error) {
	if s.left != nil {
		return mountd.Result{FH: s.left.root, Port: s.left.MountPort}, nil
	}
	return mountd.Mount(ctx, s.mountArgs)
}

// errNotResumed means that the connection of an earlier process to the kernel or to a virtual
// machine cannot be used.
var errNotResumed = errors.New("the connection cannot be continued")

// keep makes the state that the next process needs to continue the mount. Without it, the mount
// ends with this process.
func (s *mountStack) keep(root *mountd.Result, log hclog.Logger) {
	if s.left != nil {
		s.keeper = s.left.keeper
		return
	}
	if s.shared.store == nil {
		return
	}
	s.keeper, s.keepError = newKeeper(s.shared.store, s.shared.helper, &description{Spec: s.spec.String(), Dir: s.dir,
		Options: s.opts.String(), Since: time.Now(), Root: hex.EncodeToString(root.FH.Bytes()), MountPort: root.Port,
		Virtiofs: s.virtiofs},
		s.opts.DirtyBytes)
	if s.keepError != nil {
		log.Warn("the mount ends with the daemon: its state cannot be kept", "mount", s.dir, "reason", s.keepError)
		s.keeper = nil
	}
}

// keepConnection puts the connection to the kernel into the store.
func (s *mountStack) keepConnection(log hclog.Logger) func(*kernel.Device, *os.File) error {
	return func(d *kernel.Device, mem *os.File) error {
		if s.keepError = s.keeper.putConnection(d, mem); s.keepError != nil {
			log.Warn("the mount ends with the daemon: its connection cannot be kept", "mount", s.dir, "reason",
				s.keepError)
		}
		return nil
	}
}

func (s *mountStack) mountOptions(log hclog.Logger) vfs.MountOptions {
	return vfs.MountOptions{
		Options: mountpoint.Options{Source: s.spec.String(), ReadOnly: s.opts.ReadOnly, Suid: !s.kernelFlag("nosuid"),
			Dev: !s.kernelFlag("nodev"), NoExec: s.kernelFlag("noexec"), NoAtime: s.kernelFlag("noatime"),
			NoDirAtime: s.kernelFlag("nodiratime"), StrictAtime: s.kernelFlag("strictatime")},
		SkipDisablePoll: true, Mounted: s.keepConnection(log),
		Logger: log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}),
	}
}

// KeepError implements mountInstance.
func (s *mountStack) KeepError() error {
	if s.keeper.keeps() {
		return nil
	}
	return cmp.Or(s.keepError, errNoStore)
}

// settled is called when a mount of an earlier process has handled the requests of that process.
func (s *mountStack) settled() {
	for _, t := range s.transports.all {
		t.ReleaseReserved()
	}
	if s.locks != nil {
		s.locks.ReleaseStale(s.fs.IsOpen)
	}
}

// reserved returns the XIDs of an earlier process on connection i.
func (s *mountStack) reserved(i int) (xids []uint32) {
	if s.left == nil {
		return nil
	}
	for _, id := range s.keeper.state.ReservedCalls() {
		if int(id.Conn) == i {
			xids = append(xids, id.XID)
		}
	}
	return xids
}

// connect makes the transports and connects them one after the other, when the limits of connects
// permit all of them.
func (s *mountStack) connect(ctx context.Context, log hclog.Logger) error {
	addresses := s.addresses()
	preferred := make([]netip.Addr, s.opts.NConnect)
	for i := range preferred {
		preferred[i] = addresses[i%len(addresses)].Addr()
	}
	if err := s.shared.connects.Wait(ctx, preferred...); err != nil {
		return connectError(addresses[0], err)
	}
	servers := xprt.NewAddresses(addresses...)
	for i := range s.opts.NConnect {
		name := s.dir
		if s.opts.NConnect > 1 {
			name = fmt.Sprintf("%s#%d", s.dir, i)
		}
		c := s.opts.TransportConfig()
		c.Provider, c.Servers, c.Index, c.Reserved = s.provider, servers, uint32(i), s.reserved(i)
		c.Logger, c.ConnectLimits, c.Admitted = log.With("mount", name), s.shared.connects, true
		var t *xprt.Transport
		address := func() netip.AddrPort { return t.Address() }
		c.Observe = func(ctx context.Context, e xprt.Ended) { s.phases.rpcEnded(ctx, i, address, &e) }
		t, err := xprt.New(c)
		if err != nil {
			return err
		}
		s.transports.add(t)
		if err := t.Connect(ctx); err != nil {
			return connectError(t.Preferred(), err)
		}
	}
	return nil
}

// TransportConfig returns what the options say about a transport.
func (o *Options) TransportConfig() xprt.Config {
	return xprt.Config{Slots: o.Slots, InlineBytes: o.InlineBytes, WritePad: o.WritePad, Timeout: o.Timeout,
		Retrans: o.Retrans, Recovery: recoveries[o.Recovery], TraceEvents: o.TraceEvents,
		KeepAlive: zeroIsNever(o.KeepAlive), IdleTimeout: zeroIsNever(o.Idle)}
}

// zeroIsNever converts an option, whose 0 means never, to a time of xprt.Config, whose 0 means the
// default and whose negative values mean never.
func zeroIsNever(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

var recoveries = map[Recovery]xprt.Recovery{RecoveryHard: xprt.Hard, RecoverySoft: xprt.Soft,
	RecoverySoftErr: xprt.SoftErr}

func (s *mountStack) fsOptions(log hclog.Logger) vfs.Options {
	o := vfs.Options{RSize: s.opts.RSize, WSize: s.opts.WSize, AcRegMin: s.opts.AcRegMin, AcRegMax: s.opts.AcRegMax,
		AcDirMin: s.opts.AcDirMin, AcDirMax: s.opts.AcDirMax, NoAC: s.opts.NoAC, DirtyExpire: s.opts.DirtyExpire,
		DirtyBytes: int64(s.opts.DirtyBytes), DirtyTotal: s.shared.dirty, Lost: s.lost, Failed: s.failed,
		Invalid: s.invalidReply, Observe: s.requestEnded, Warn: log.With("mount", s.dir).Warn,
		SharedNames: s.opts.SharedNames, NoCTO: s.opts.NoCTO, Writeback: s.opts.Writeback,
		Locks: s.locks, Guest: s.virtiofs,
		ReadInPlace: s.anyMemory, LocalPosix: s.opts.LocalLock == lockPosix,
		LocalFlock: s.opts.LocalLock == lockFlock}
	if s.keeper != nil {
		o.State, o.Buffers, o.Settled = s.keeper.state, s.keeper.buffers, s.settled
	}
	if s.opts.Recovery != RecoveryHard {
		o.BusyTimeout = s.opts.Timeout * time.Duration(s.opts.Retrans+1)
	}
	if s.opts.Recovery == RecoverySoftErr {
		o.BusyErrno = unix.ETIMEDOUT
	}
	switch s.opts.LookupCache {
	case "pos":
		o.LookupCache = vfs.LookupCachePositive
	case "none":
		o.LookupCache = vfs.LookupCacheNone
	}
	return o
}

// requestEnded is vfs.Options.Observe.
func (s *mountStack) requestEnded(r *kernel.Request) {
	s.usage.observe(r, r.Times.Total()-r.Times.Spent(ledger.PhaseQueue)-r.Times.Spent(ledger.PhaseReply))
	s.phases.requestEnded(r)
}

// remaining returns the time until the deadline of ctx, or the default timeout of mountd.
func remaining(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(time.Until(deadline), time.Millisecond)
	}
	return mountd.DefaultTimeout
}

// sendUmnt sends UMNT to the server. It ignores errors, because UMNT only informs the server
// (RFC 1813 §5.2.3).
func (s *mountStack) sendUmnt() {
	ctx, cancel := context.WithTimeout(context.Background(), umntTimeout)
	defer cancel()
	args := s.mountArgs
	args.Timeout = umntTimeout
	_ = mountd.Unmount(ctx, args)
}

func (s *mountStack) closeFS() {
	ctx, cancel := running.WithTimeout(context.Background(), writeBackTimeout)
	defer cancel()
	if !s.fs.Drain(ctx, writeBackStall) {
		cancel() // discard the data
	}
	s.fs.Close(ctx)
}

// Wait implements mountInstance.
func (s *mountStack) Wait() { s.server.Wait() }

// Flush implements mountInstance.
func (s *mountStack) Flush(ctx context.Context, stall time.Duration) { _ = s.fs.Drain(ctx, stall) }

// Close implements mountInstance.
func (s *mountStack) Close() {
	s.unmounts.Lock()
	s.unmounts.closed = true
	s.unmounts.Unlock()
	s.unmounts.running.Wait()
	s.closeFS()
	if s.locks != nil {
		s.closeLocks()
	}
	s.transports.close()
	s.keeper.remove()
	if !s.aborted.Load() {
		s.sendUmnt()
	}
}

// abortGrace is the time after which a forced unmount ends the connections.
const abortGrace = 500 * time.Millisecond

// abortedRelease bounds the release of the locks of a mount that was unmounted by force.
const abortedRelease = 500 * time.Millisecond

func (s *mountStack) closeLocks() {
	if s.aborted.Load() {
		s.locks.CloseWithin(abortedRelease)
	} else {
		s.locks.Close()
	}
}

// Unmount implements mountInstance. umount(2) may wait until the server accepts dirty pages.
// Unmount therefore calls umount(2) in a goroutine. A forced unmount ends this wait.
func (s *mountStack) Unmount(ctx context.Context, mode control.UmountMode) error {
	done := make(chan error, 1)
	s.unmounts.Lock()
	if s.unmounts.closed { // already unmounted
		s.unmounts.Unlock()
		return nil
	}
	s.unmounts.running.Go(func() {
		switch mode {
		case control.UmountLazy:
			done <- s.server.UnmountLazy()
		case control.UmountForce:
			s.aborted.Store(true)
			// An interrupted call may wait for its memory until data in the send queue was sent.
			defer time.AfterFunc(abortGrace, s.transports.close).Stop()
			done <- s.server.ForceUnmount()
		default:
			done <- s.server.Unmount()
		}
	})
	s.unmounts.Unlock()
	select {
	case err := <-done:
		return s.umountError(err)
	case <-ctx.Done():
		return control.Errorf(control.CodeMount, "unmount %s: timeout while dirty data is written to the server; "+
			"wait and try again, or discard the data with --force", s.dir)
	}
}

// umountError adds advice to an error of umount(2).
func (s *mountStack) umountError(err error) error {
	switch {
	case err == nil, errors.Is(err, unix.EINVAL): // EINVAL: another process has unmounted it
		return nil
	case errors.Is(err, unix.EBUSY) && s.virtiofs:
		return &control.Error{Code: control.CodeMount, Err: err, Text: "unmount " + s.dir +
			": in use by a virtual machine; unmount it there, or use --lazy or --force"}
	case errors.Is(err, unix.EBUSY):
		return &control.Error{Code: control.CodeMount, Err: err, Text: "unmount " + s.dir +
			": in use; close its files (fuser -m lists the processes), or use --lazy or --force"}
	}
	return control.Errorf(control.CodeMount, "unmount %s: %w; try --force", s.dir, err)
}

// kernelFlag reports whether the options have the given mount flag of the kernel.
func (s *mountStack) kernelFlag(name string) bool { return slices.Contains(s.opts.Kernel, name) }

// ResolveHost returns the first address of the server, as mount.nfs(8) does.
func ResolveHost(ctx context.Context, host string) (netip.Addr, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Unmap(), nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("server %q: %w; check the spelling, or use an address", host, err)
	}
	if len(addrs) == 0 {
		return netip.Addr{}, fmt.Errorf("server %q: no address; check the spelling, or use an address", host)
	}
	return addrs[0].Unmap(), nil
}
