package daemon

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// httpGrace bounds the end of pending requests after all mounts are unmounted.
const httpGrace = 2 * time.Second

// traceGrace bounds the export of the last traces after all mounts are unmounted, and
// traceLeaveGrace if the mounts stay: programs then wait for the next daemon.
const traceGrace, traceLeaveGrace = time.Second, 200 * time.Millisecond

// NewLogger returns a logger with the level and format of c.
func NewLogger(c Config, w io.Writer) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{
		Name:       "nfsrdmad",
		Level:      hclog.LevelFromString(string(c.LogLevel)),
		JSONFormat: c.LogFormat == "json",
		Output:     w,
	})
}

// A Daemon is a running daemon, started with [Start]. Its methods may be called concurrently,
// except Close and Leave: the owner calls one of them, once.
type Daemon struct {
	cfg     Config
	log     hclog.Logger
	inject  string // fault injection plan, "" for none
	table   *mount.Table
	socket  *control.Listener
	control *http.Server
	metrics *metricsListener
	traces  *otlp.Exporter // nil if traces are off

	store   fdstore.Store // keeps the mounts; nil: they end with the daemon
	noStore error         // why store is nil

	writeTime time.Duration // bounds the write of dirty data in Leave

	serving  sync.WaitGroup
	failed   chan error               // receives the error of a listener
	requests chan control.StopRequest // receives one request to stop
	ending   atomic.Bool              // requests has got a request, or a signal stops the daemon
}

// Start starts a daemon. Once Start returns, the control API accepts requests. The metrics listener
// accepts requests too, or retries until it can listen. The caller ends the daemon with
// [Daemon.Close] or [Daemon.Leave].
func Start(cfg Config, log hclog.Logger) (*Daemon, error) {
	if err := cfg.Check("flags"); err != nil {
		return nil, err
	}
	plan, err := mount.ParseFaults(string(cfg.Inject))
	if err != nil {
		return nil, err
	}
	base, err := mount.ParseOptions(mount.DefaultOptions(), string(cfg.MountOptions))
	if err != nil {
		return nil, err
	}
	allowed, err := mount.ParseAllowed(string(cfg.AllowMounts))
	if err != nil {
		return nil, err
	}
	readers, err := control.LookupGroup(string(cfg.ControlGroup))
	if err != nil {
		return nil, err
	}
	d := &Daemon{cfg: cfg, log: log, writeTime: leaveTimeout, inject: mount.PlanText(plan), failed: make(chan error, 1),
		requests: make(chan control.StopRequest, 1)}
	if cfg.OTLPEndpoint != "" {
		d.traces, err = otlp.New(otlp.Config{Endpoint: string(cfg.OTLPEndpoint), Ratio: float64(cfg.OTLPRatio),
			Version: control.Version().Version, Log: log.Named("otlp")})
		if err != nil {
			return nil, err
		}
	}
	if d.socket, err = control.Listen(string(cfg.ControlSocket), readers); err != nil {
		d.closeTraces(0)
		return nil, err
	}
	if err := d.openStore(); err != nil {
		d.closeTraces(0)
		d.socket.Close()
		d.socket.Release()
		return nil, err
	}
	d.table = mount.NewTable(mount.TableConfig{Log: log, Base: base, Timeout: cfg.ConnectTimeout.Std(), Faults: plan,
		DirtyBytes: int64(cfg.DirtyBytes), ConnectRate: int(cfg.ConnectRate), LockListen: string(cfg.NLMListen),
		StateDir: string(cfg.StateDir), Store: d.store, NoStore: d.keepFailure(), Allowed: allowed, Traces: d.traces,
		NotifyHelper: []string{selfExe, NotifyHelperCommand}})
	d.table.Restore()
	d.logRestored()
	d.metrics = startMetrics(string(cfg.MetricsListen), log, d.metricsHandler())
	d.control = control.NewServer(d.table, d.version, d.stop, readers)
	d.serve(d.control, d.socket)
	log.Info("started", "version", d.version().Version, "control_socket", cfg.ControlSocket, "metrics", d.MetricsAddr())
	if d.inject != "" {
		log.Warn(control.FaultBanner+"this daemon breaks its connections on purpose", "plan", d.inject)
	}
	return d, nil
}

func (d *Daemon) serve(s *http.Server, l net.Listener) {
	d.serving.Go(func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			d.failed <- control.Errorf(control.CodeSystem, "serve %s: %w", l.Addr(), err)
		}
	})
}

// version describes the program and the state of this daemon.
func (d *Daemon) version() control.VersionInfo {
	v := control.Version()
	v.PID, v.FaultInjection, v.MetricsError = os.Getpid(), d.inject, d.metrics.problem()
	return v
}

// MetricsAddr returns ADDRESS:PORT of the metrics listener, "" if it is off or cannot listen.
func (d *Daemon) MetricsAddr() string { return d.metrics.addr() }

// Close unmounts all mounts and stops the daemon. It takes at most the shutdown timeout and a few
// seconds. Its error means that written data is lost; the log names the files.
func (d *Daemon) Close() error {
	err := d.closeTable()
	d.serving.Go(func() { d.closeTraces(traceGrace) })
	shutdown(d.control)
	d.metrics.close()
	d.serving.Wait()
	d.socket.Close()
	if d.store != nil {
		_ = d.store.Close() // of a store without entries, except mounts that could not be unmounted
	}
	d.socket.Release()
	d.log.Info("stopped")
	return err
}

// closeTable unmounts all mounts.
func (d *Daemon) closeTable() error {
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.ShutdownTimeout.Std())
	defer cancel()
	return d.table.Close(ctx)
}

// closeTraces exports the last traces, for at most the time flush, and ends the export.
func (d *Daemon) closeTraces(flush time.Duration) {
	if d.traces != nil {
		d.traces.Close(flush)
	}
}

// shutdown ends a server, and after httpGrace its pending requests.
func shutdown(s *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), httpGrace)
	defer cancel()
	if s.Shutdown(ctx) != nil {
		s.Close()
	}
}
