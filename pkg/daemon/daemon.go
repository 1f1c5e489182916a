package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// httpGrace bounds the end of pending requests after all mounts are unmounted.
const httpGrace = 2 * time.Second

// Timeouts of the metrics listener.
const (
	headerTimeout = 5 * time.Second
	scrapeTimeout = 10 * time.Second
)

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
// except Close, which the owner calls once.
type Daemon struct {
	cfg     Config
	log     hclog.Logger
	inject  string // fault injection plan, "" for none
	table   *mount.Table
	socket  *control.Listener
	control *http.Server
	metrics *http.Server // nil if off
	address net.Addr     // of the metrics listener; nil if off

	serving sync.WaitGroup
	failed  chan error // receives the error of a listener
}

// Start starts a daemon. Once Start returns, the control API and the metrics listener accept
// requests. The caller ends the daemon with [Daemon.Close].
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
	d := &Daemon{cfg: cfg, log: log, inject: mount.PlanText(plan), failed: make(chan error, 2)}
	d.table = mount.NewTable(mount.TableConfig{Log: log, Base: base, Timeout: cfg.ConnectTimeout.Std(), Faults: plan})
	if d.socket, err = control.Listen(string(cfg.ControlSocket)); err != nil {
		return nil, err
	}
	if err := d.startMetrics(); err != nil {
		d.socket.Close()
		d.socket.Release()
		return nil, err
	}
	v := control.Version()
	v.PID, v.FaultInjection = os.Getpid(), d.inject
	d.control = control.NewServer(d.table, v)
	d.serve(d.control, d.socket)
	log.Info("started", "version", v.Version, "control_socket", cfg.ControlSocket, "metrics", d.MetricsAddr())
	if d.inject != "" {
		log.Warn(control.FaultBanner+"this daemon breaks its connections on purpose", "plan", d.inject)
	}
	return d, nil
}

func (d *Daemon) startMetrics() error {
	if d.cfg.MetricsListen == "" {
		return nil
	}
	l, err := net.Listen("tcp", string(d.cfg.MetricsListen))
	if err != nil {
		return control.Errorf(control.CodeSystem, "metrics listener %s: %w; choose another --metrics-listen",
			string(d.cfg.MetricsListen), err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics.NewCollector(d.table.Snapshots), metrics.FaultInjection(d.inject != ""),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "nfsrdmad: /metrics and /healthz")
	})
	d.metrics = &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout,
		WriteTimeout: scrapeTimeout}
	d.address = l.Addr()
	d.serve(d.metrics, l)
	return nil
}

func (d *Daemon) serve(s *http.Server, l net.Listener) {
	d.serving.Go(func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			d.failed <- control.Errorf(control.CodeSystem, "serve %s: %w", l.Addr(), err)
		}
	})
}

// MetricsAddr returns ADDRESS:PORT of the metrics listener, "" if it is off.
func (d *Daemon) MetricsAddr() string {
	if d.address == nil {
		return ""
	}
	return d.address.String()
}

// Close unmounts all mounts and stops the daemon. It takes at most the shutdown timeout and a few
// seconds.
func (d *Daemon) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(d.cfg.ShutdownTimeout))
	defer cancel()
	d.table.Close(ctx)
	for _, s := range []*http.Server{d.control, d.metrics} {
		if s == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), httpGrace)
		if s.Shutdown(ctx) != nil {
			s.Close()
		}
		cancel()
	}
	d.serving.Wait()
	d.socket.Close()
	d.socket.Release()
	d.log.Info("stopped")
}
