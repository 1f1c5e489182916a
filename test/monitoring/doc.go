// Package monitoring tests what administrators load into Prometheus and Grafana: the alerts in
// deploy/prometheus and the dashboard in deploy/grafana. A real Prometheus scrapes a daemon with a
// mount under load and faults, and evaluates every expression. TestPanels draws the panels of the
// dashboard from such a run; see "make panels".
package monitoring
