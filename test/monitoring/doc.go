// Package monitoring tests what administrators look at: the alerts in deploy/prometheus, the
// dashboard in deploy/grafana, and the status page of the daemon in a browser. A real Prometheus
// scrapes a daemon with a mount under load and faults, and evaluates every expression. TestPanels
// draws the panels of the dashboard from such a run; see "make panels".
package monitoring
