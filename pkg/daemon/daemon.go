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

// httpGrace is what requests under way get at the end, after all mounts are gone.
const httpGrace = 2 * time.Second

// Timeouts of the metrics listener.
const (
	headerTimeout = 5 * time.Second
	scrapeTimeout = 10 * time.Second
)

// NewLogger makes the logger that c asks for.
func NewLogger(c Config, w io.Writer) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{
		Name:       "nfsrdmad",
		Level:      hclog.LevelFromString(string(c.LogLevel)),
		JSONFormat: c.LogFormat == "json",
		Output:     w,
	})
}

// A Daemon is a started daemon. Make it with [Start].
type Daemon struct {
	cfg     Config
	log     hclog.Logger
	inject  string // the plan of faults, "" for none
	table   *mount.Table
	socket  *control.Listener
	control *http.Server
	metrics *http.Server // nil when off
	address net.Addr     // of the metrics listener

	serving sync.WaitGroup
	failed  chan error
}

// Start starts a daemon: when it returns nil, the control API and the metrics listener answer.
// [Daemon.Close] ends it.
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
		log.Warn(control.FaultBanner+"every connection of this daemon is broken on purpose", "plan", d.inject)
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
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter,
		_ *http.Request) {
		fmt.Fprintln(w, "nfsrdmad: see /metrics and /healthz")
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
			d.failed <- control.Errorf(control.CodeSystem, "serving %s: %w", l.Addr(), err)
		}
	})
}

// MetricsAddr is ADDRESS:PORT of the metrics listener, "" when it is off.
func (d *Daemon) MetricsAddr() string {
	if d.address == nil {
		return ""
	}
	return d.address.String()
}

// Table returns the mounts.
func (d *Daemon) Table() *mount.Table { return d.table }

// Close unmounts everything and ends the daemon. It takes the shutdown timeout and a few seconds at
// most.
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
