package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// umntTimeout bounds the courtesy of telling the server that a mount is gone.
	umntTimeout = 2 * time.Second
	// writeBackTimeout bounds writing back what users that are gone left behind.
	writeBackTimeout = 5 * time.Second
)

// A mountStack is one mount from the provider to /dev/fuse. It implements mountInstance.
type mountStack struct {
	plan
	inject     *faults.Plan // nil for none
	mountArgs  mountd.Args
	address    netip.AddrPort // of the server's RDMA side
	provider   verbs.Provider
	why        string // it is this provider
	transports caller
	fs         *fusefs.FS
	server     *fusefs.Server
	procs      [nfs3.NumProcs]metrics.Histogram
	ops        [fusefs.NumOps]metrics.Histogram
	aborted    atomic.Bool

	mu       sync.Mutex
	closing  bool           // guarded by mu: no umount(2) begins any more
	unmounts sync.WaitGroup // umount(2) calls under way; added to under mu
}

// settleTimeout bounds the wait for connects that were given up: each ends long before.
const settleTimeout = time.Second

// settleConnects keeps the end of this process from dropping a TCP connection that a stock Linux
// server has just taken, which would cost it its listener.
func settleConnects() {
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	softiwarp.Settle(ctx)
}

// newBuilder returns the builder of real mounts.
func newBuilder(log hclog.Logger, inject *faults.Plan) builder {
	return func(ctx context.Context, p plan) (mountInstance, error) {
		s := &mountStack{plan: p, inject: inject}
		if err := s.build(ctx, log.Named("nfs")); err != nil {
			return nil, err
		}
		return s, nil
	}
}

// build makes the layers bottom up, and takes them down again when one fails.
func (s *mountStack) build(ctx context.Context, log hclog.Logger) (err error) {
	var undo []func()
	defer func() {
		if err == nil {
			return
		}
		for i := len(undo) - 1; i >= 0; i-- {
			undo[i]()
		}
	}()
	addr, err := resolveHost(ctx, s.spec.Host)
	if err != nil {
		return err
	}
	machine, _ := os.Hostname() // an empty machine name is valid
	s.mountArgs = mountd.Args{Host: addr.String(), Export: s.spec.Export, Port: int(s.opts.MountPort),
		Timeout: remaining(ctx),
		Cred:    &sunrpc.AuthSys{Machine: machine}}
	root, err := mountd.Mount(ctx, s.mountArgs)
	if err != nil {
		return err
	}
	undo = append(undo, s.tellServer)
	if err := checkFlavors(s.spec.Export, root); err != nil {
		return err
	}
	server := netip.AddrPortFrom(addr, s.opts.Port)
	s.address = server
	provider, why, err := chooseProvider(ctx, &s.opts, server, log)
	if err != nil {
		return err
	}
	log.Debug("provider chosen", "provider", provider.Name(), "because", why)
	s.provider, s.why = WithFaults(provider, s.inject, log), why
	undo = append(undo, func() { s.transports.close() })
	if err := s.connect(ctx, server, log); err != nil {
		return err
	}
	client := nfs3.NewClient(&s.transports, nfs3.Options{Observe: func(p nfs3.Proc, d time.Duration, _ error) {
		if p < nfs3.NumProcs {
			s.procs[p].Observe(d)
		}
	}})
	if s.fs, err = fusefs.New(ctx, client, root.FH, s.fsOptions()); err != nil {
		return s.serverError(ctx, server, err)
	}
	undo = append(undo, func() { s.closeFS() })
	s.server, err = fusefs.Mount(s.dir, s.fs, fusefs.MountOptions{
		FsName: s.spec.String(), ReadOnly: s.opts.ReadOnly, SkipDisablePoll: true,
		Suid: !s.flag("nosuid"), Dev: !s.flag("nodev"), NoExec: s.flag("noexec"),
		Logger: log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}),
	})
	return err
}

func (s *mountStack) connect(ctx context.Context, addr netip.AddrPort, log hclog.Logger) error {
	for i := range s.opts.NConnect {
		name := s.dir
		if s.opts.NConnect > 1 {
			name = fmt.Sprintf("%s#%d", s.dir, i)
		}
		t, err := xprt.New(xprt.Config{
			Provider: s.provider, Addr: addr, Slots: s.opts.Slots, InlineBytes: s.opts.InlineBytes, Timeout: s.opts.Timeout,
			Retrans: s.opts.Retrans, Recovery: recoveries[s.opts.Recovery], WritePad: s.opts.WritePad, Logger: log.With("mount", name), Name: name,
			TraceEvents: s.opts.TraceEvents, KeepAlive: orNever(s.opts.KeepAlive), IdleTimeout: orNever(s.opts.Idle),
		})
		if err != nil {
			return err
		}
		s.transports.all = append(s.transports.all, t)
		if err := t.Connect(ctx); err != nil {
			return connectError(addr, err)
		}
	}
	return nil
}

// orNever is d as xprt has it: it takes 0 for its default, and a negative time for never.
func orNever(d time.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return d
}

var recoveries = map[Recovery]xprt.Recovery{RecoveryHard: xprt.Hard, RecoverySoft: xprt.Soft,
	RecoverySoftErr: xprt.SoftErr}

func (s *mountStack) fsOptions() fusefs.Options {
	o := fusefs.Options{RSize: s.opts.RSize, WSize: s.opts.WSize, AcRegMin: s.opts.AcRegMin, AcRegMax: s.opts.AcRegMax,
		AcDirMin: s.opts.AcDirMin, AcDirMax: s.opts.AcDirMax, NoAC: s.opts.NoAC, Observe: s.observeOp}
	switch s.opts.LookupCache {
	case "pos":
		o.LookupCache = fusefs.LookupCachePositive
	case "none":
		o.LookupCache = fusefs.LookupCacheNone
	}
	return o
}

func (s *mountStack) observeOp(op fusefs.Op, d time.Duration) { s.ops[op].Observe(d) }

// remaining is the time that ctx leaves.
func remaining(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(time.Until(deadline), time.Millisecond)
	}
	return mountd.DefaultTimeout
}

// tellServer sends UMNT, which is a courtesy.
func (s *mountStack) tellServer() {
	ctx, cancel := context.WithTimeout(context.Background(), umntTimeout)
	defer cancel()
	args := s.mountArgs
	args.Timeout = umntTimeout
	_ = mountd.Unmount(ctx, args)
}

func (s *mountStack) closeFS() {
	ctx, cancel := context.WithTimeout(context.Background(), writeBackTimeout)
	defer cancel()
	s.fs.Close(ctx)
}

// Wait implements mountInstance.
func (s *mountStack) Wait() { s.server.Wait() }

// Close implements mountInstance.
func (s *mountStack) Close() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.unmounts.Wait()
	s.closeFS()
	s.transports.close()
	if !s.aborted.Load() {
		s.tellServer()
	}
}

// Unmount implements mountInstance. umount(2) may wait for the server to take dirty pages, so it gets a
// goroutine of its own, which ends at the latest with the forced unmount that comes next.
func (s *mountStack) Unmount(ctx context.Context, mode control.UmountMode) error {
	done := make(chan error, 1)
	s.mu.Lock()
	if s.closing { // gone already
		s.mu.Unlock()
		return nil
	}
	s.unmounts.Go(func() {
		switch mode {
		case control.UmountLazy:
			done <- s.server.UnmountLazy()
		case control.UmountForce:
			s.aborted.Store(true)
			done <- s.server.ForceUnmount()
		default:
			done <- s.server.Unmount()
		}
	})
	s.mu.Unlock()
	select {
	case err := <-done:
		return s.explain(err)
	case <-ctx.Done():
		return control.Errorf(control.CodeMount, "unmounting %s: the server does not take what is still to be written; wait, or lose it with --force", s.dir)
	}
}

// explain says what to do about an error of umount(2).
func (s *mountStack) explain(err error) error {
	switch {
	case err == nil, errors.Is(err, unix.EINVAL): // not mounted any more: somebody was faster
		return nil
	case errors.Is(err, unix.EBUSY):
		return &control.Error{Code: control.CodeMount, Err: err, Text: "unmounting " + s.dir +
			": it is in use; close the files there (fuser -m tells whose), or use --lazy or --force"}
	}
	return control.Errorf(control.CodeMount, "unmounting %s: %w; try --force", s.dir, err)
}

// flag tells whether one of the kernel's mount flags was asked for.
func (s *mountStack) flag(name string) bool { return slices.Contains(s.opts.Kernel, name) }

// resolveHost looks the server's name up. Its first address is taken, as by mount.nfs(8).
func resolveHost(ctx context.Context, host string) (netip.Addr, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Unmap(), nil
	}
	addrs, err := resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("server %q: %w; check the spelling, or give an address", host, err)
	}
	if len(addrs) == 0 {
		return netip.Addr{}, fmt.Errorf("server %q has no address; check the spelling, or give an address", host)
	}
	return addrs[0].Unmap(), nil
}
