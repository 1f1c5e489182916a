package daemon

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/nfsrdmad/nfsrdmad/internal/statuspage"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

const (
	// Timeouts of the metrics listener.
	headerTimeout = 5 * time.Second
	scrapeTimeout = 10 * time.Second
	// The pause before the metrics listener retries is metricsRetryMin at first and doubles up to
	// metricsRetryMax.
	metricsRetryMin = time.Second
	metricsRetryMax = time.Minute
)

// A metricsListener serves metrics at one address. While another process uses the address, it
// retries. It does not stop the daemon, because any local user can use an address. Its methods may
// be called concurrently.
type metricsListener struct {
	address string // "" if metrics are off
	log     hclog.Logger
	server  *http.Server

	closing chan struct{}
	running sync.WaitGroup

	mu    sync.Mutex // guards the fields below
	bound net.Addr   // nil while it does not listen
	err   error      // why it does not listen
}

// startMetrics returns a metricsListener for an address. It has tried to listen once.
func startMetrics(address string, log hclog.Logger, handler http.Handler) *metricsListener {
	m := newMetrics(address, log, handler)
	m.start()
	return m
}

func newMetrics(address string, log hclog.Logger, handler http.Handler) *metricsListener {
	return &metricsListener{address: address, log: log, closing: make(chan struct{}),
		server: &http.Server{Handler: handler, ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout,
			WriteTimeout: scrapeTimeout, ConnState: noteState}}
}

// start tries to listen once, and serves and retries in the background.
func (m *metricsListener) start() {
	if m.address == "" {
		return
	}
	l := m.listen()
	m.running.Go(func() { m.serve(l) })
}

// metricsHandler serves /metrics, /healthz, and the status page, to requests for hosts of the
// configuration.
func (d *Daemon) metricsHandler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics.NewCollector(d.table.Snapshots), metrics.DaemonCollector(d.Metrics),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	if isLoopback(string(d.cfg.MetricsListen)) {
		statuspage.Register(mux, d.table)
	} else {
		mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintln(w, "nfsrdmad: /metrics and /healthz; the status page needs a loopback address in "+
				"metrics_listen")
		})
	}
	hosts, _ := parseHosts(string(d.cfg.MetricsHosts)) // checked by Config.Check
	if host, _, err := net.SplitHostPort(string(d.cfg.MetricsListen)); err == nil && host != "" {
		hosts[plainHost(host)] = true
	}
	return hosts.guard(mux)
}

// Metrics returns the metrics of the whole daemon. It may be called concurrently.
func (d *Daemon) Metrics() []stats.Metric {
	var notKept, restarts, inject uint64
	notKept = uint64(len(control.NotKept(d.table.List())))
	if d.store != nil {
		restarts = d.store.Restarts()
	}
	if d.inject != "" {
		inject = 1
	}
	all := append(d.table.Metrics(),
		stats.New("mounts_not_kept", "Mounts that would end with the daemon now, although keep_mounts is true.",
			&notKept),
		stats.New("holder_restarts_total", "How often the daemon replaced the holder process, which keeps the mounts "+
			"without systemd.", &restarts),
		stats.New("fault_injection_enabled", "1 if the daemon injects faults; always 0 in production.", &inject))
	if d.traces != nil {
		all = append(all, d.traces.Metrics()...)
	}
	return all
}

// isLoopback reports whether only this host can connect to an address HOST:PORT.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}

// listen returns a listener, or nil.
func (m *metricsListener) listen() net.Listener {
	l, err := net.Listen("tcp", m.address)
	if err != nil {
		m.set(nil, fmt.Errorf("metrics listener %s: %w; free the address, or choose another metrics_listen",
			m.address, err))
		return nil
	}
	m.set(l.Addr(), nil)
	return limitScrapers(l)
}

// serve serves l, which may be nil, and listens again when l fails.
func (m *metricsListener) serve(l net.Listener) {
	for pause := metricsRetryMin; ; {
		if l != nil {
			pause = metricsRetryMin
			err := m.server.Serve(l)
			if errors.Is(err, http.ErrServerClosed) {
				return
			}
			m.set(nil, fmt.Errorf("metrics listener %s: %w", m.address, err))
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-m.closing:
			timer.Stop()
			return
		}
		pause = min(2*pause, metricsRetryMax)
		l = m.listen()
	}
}

// set records whether the listener works, and logs a change.
func (m *metricsListener) set(bound net.Addr, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.err
	m.bound, m.err = bound, err
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		m.log.Warn("metrics are not available; the daemon retries", "error", err)
	case err == nil && before != nil:
		m.log.Info("metrics are available", "metrics", bound)
	}
}

// addr returns ADDRESS:PORT, or "" while there is no listener.
func (m *metricsListener) addr() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bound == nil {
		return ""
	}
	return m.bound.String()
}

// problem returns why there is no listener, or "".
func (m *metricsListener) problem() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		return ""
	}
	return m.err.Error()
}

// close ends the listener and, after the grace period, its requests.
func (m *metricsListener) close() {
	close(m.closing)
	shutdown(m.server)
	m.running.Wait()
}
