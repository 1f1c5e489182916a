package monitoring

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

var updateFlag = flag.Bool("update", false, "write the dashboard")

const dashboardFile = "../../deploy/grafana/nfsrdmad.json"

// A query is one expression of a panel, with the legend of its series. SEL stands for the labels of
// the chosen hosts and mounts, HOST for those of the chosen hosts.
type query struct{ expr, legend string }

// A panel is a graph over time.
type panel struct {
	title, unit string
	text        string // description
	stack       bool
	queries     []query
}

// A row is a heading with panels.
type row struct {
	title  string
	panels []panel
}

func rate(metric string) string { return "rate(nfsrdmad_" + metric + "{SEL}[$__rate_interval])" }

func increase(metric string) string {
	return "increase(nfsrdmad_" + metric + "{SEL}[$__rate_interval])"
}

func quantile(q, metric, by string) string {
	return "histogram_quantile(" + q + ", sum by (le, " + by + ") (rate(nfsrdmad_" + metric +
		"_bucket{SEL}[$__rate_interval])))"
}

// seconds returns the seconds for each second that calls spend in each phase. A Prometheus without
// native histograms has them in another series.
func seconds(metric string) string {
	return "sum by (phase) (histogram_sum(" + rate(metric) + ")) or sum by (phase) (" + rate(metric+"_sum") + ")"
}

// dashboard is what deploy/grafana/nfsrdmad.json shows.
var dashboard = []row{
	{"Programs", []panel{
		{title: "Throughput", unit: "Bps",
			text: "File data that programs read and write, without the caches of the kernel.",
			queries: []query{
				{rate("read_bytes_total"), "read {{mount}}"},
				{rate("written_bytes_total"), "written {{mount}}"}}},
		{title: "Requests", unit: "ops", text: "FUSE requests by operation.", stack: true,
			queries: []query{{"sum by (operation) (" + rate("fuse_ops_total") + ")", "{{operation}}"}}},
		{title: "Latency of requests, 99 %", unit: "s", text: "What programs wait for, by operation of FUSE.",
			queries: []query{{quantile("0.99", "fuse_op_duration_seconds", "operation"), "{{operation}}"}}},
		{title: "Errors", unit: "ops", text: "Requests that failed. lookup counts every missing name.",
			queries: []query{{"sum by (operation) (" + rate("fuse_op_errors_total") + ")", "{{operation}}"}}},
	}},
	{"Server", []panel{
		{title: "Calls", unit: "ops", text: "RPC calls by procedure.", stack: true,
			queries: []query{{"sum by (procedure) (" + rate("rpc_duration_seconds_count") + ")", "{{procedure}}"}}},
		{title: "Latency of calls, median", unit: "s", text: "Time from call to reply, including reconnects.",
			queries: []query{{quantile("0.5", "rpc_duration_seconds", "procedure"), "{{procedure}}"}}},
		{title: "Latency of calls, 99 %", unit: "s", text: "Time from call to reply, including reconnects.",
			queries: []query{{quantile("0.99", "rpc_duration_seconds", "procedure"), "{{procedure}}"}}},
		{title: "Calls in flight", unit: "short", text: "Calls that hold a credit, calls that wait, and the limits.",
			queries: []query{
				{"nfsrdmad_calls_in_flight{SEL}", "in flight {{mount}}"},
				{"nfsrdmad_calls_queued{SEL}", "waiting {{mount}}"},
				{"nfsrdmad_credits{SEL}", "credits {{mount}}"},
				{"nfsrdmad_slots{SEL}", "slots {{mount}}"}}},
	}},
	{"Phases", []panel{
		{title: "Time of requests by phase", unit: "short", stack: true,
			text:    "What requests of programs wait for: seconds for each second, over all requests in progress.",
			queries: []query{{seconds("fuse_phase_seconds"), "{{phase}}"}}},
		{title: "Time of calls by phase", unit: "short", stack: true,
			text:    "What RPC calls wait for, including those of write-behind.",
			queries: []query{{seconds("rpc_phase_seconds"), "{{phase}}"}}},
	}},
	{"Connections", []panel{
		{title: "Connections by state", unit: "short",
			text: "State idle is normal: the next call connects.", stack: true,
			queries: []query{{"sum by (state) (nfsrdmad_connections{SEL})", "{{state}}"}}},
		{title: "Reconnects", unit: "short",
			text: "Connects, timeouts that dropped a connection, and calls sent again.",
			queries: []query{
				{increase("connects_total"), "connects {{mount}}"},
				{increase("connect_failures_total"), "failures {{mount}}"},
				{increase("rpc_timeouts_total"), "timeouts {{mount}}"},
				{increase("rpc_resends_total"), "resends {{mount}}"}}},
		{title: "Stalled mounts", unit: "s",
			text:    "Age of the oldest request without reply of a stalled mount: should be 0.",
			queries: []query{{"nfsrdmad_mount_stalled_seconds{SEL}", "{{mount}}"}}},
		{title: "Violations by servers", unit: "short",
			text: "Refused RDMA operations and invalid replies: should be 0.",
			queries: []query{
				{increase("remote_access_errors_total"), "remote access {{mount}}"},
				{increase("bad_reply_total"), "invalid header {{mount}}"},
				{increase("invalid_replies_total"), "invalid reply {{mount}}"}}},
	}},
	{"Memory regions", []panel{
		{title: "Memory regions by state", unit: "short", text: "VALID ones belong to calls in flight.", stack: true,
			queries: []query{{"sum by (state) (nfsrdmad_mrs{SEL})", "{{state}}"}}},
		{title: "Invalidations", unit: "ops", text: "Regions that the server or this host has invalidated.",
			queries: []query{
				{rate("remote_invalidations_total"), "remote {{mount}}"},
				{rate("local_inv_needed_total"), "local {{mount}}"}}},
		{title: "Lost and replaced regions", unit: "short",
			text: "A lost connection recovers regions. Orphaned ones are lost.",
			queries: []query{
				{increase("mrs_recovered_total"), "recovered {{mount}}"},
				{increase("mrs_recycled_total"), "recycled {{mount}}"},
				{increase("mrs_failed_total"), "unknown state {{mount}}"},
				{increase("mrs_orphaned_total"), "orphaned {{mount}}"},
				{increase("map_errors_total"), "not registered {{mount}}"}}},
	}},
	{"Data and daemon", []panel{
		{title: "Lost data", unit: "short",
			text: "Extents that the server rejected, and those that it lost and got again.",
			queries: []query{
				{increase("write_errors_total"), "rejected {{mount}}"},
				{increase("write_replays_total"), "replays {{mount}}"}}},
		{title: "Memory of the daemon", unit: "bytes", text: "Resident memory.",
			queries: []query{{`process_resident_memory_bytes{job="nfsrdmad",HOST}`, "{{instance}}"}}},
		{title: "Processor time of the daemon", unit: "percentunit", text: "1 is one processor.",
			queries: []query{
				{`rate(process_cpu_seconds_total{job="nfsrdmad",HOST}[$__rate_interval])`, "{{instance}}"}}},
	}},
}

type object = map[string]any

// render returns the dashboard in the format of Grafana (schema version 39).
func render() ([]byte, error) {
	source := object{"type": "prometheus", "uid": "${datasource}"}
	variable := func(name, label string) object {
		return object{"name": name, "label": name, "type": "query", "datasource": source, "query": label,
			"refresh": 2, "multi": true, "includeAll": true, "allValue": ".+",
			"current": object{"text": "All", "value": "$__all"}}
	}
	var panels []object
	id, y := 0, 0
	for _, r := range dashboard {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": r.title, "collapsed": false,
			"gridPos": object{"x": 0, "y": y, "w": 24, "h": 1}})
		y++
		width := 24 / min(len(r.panels), 4)
		for i, p := range r.panels {
			var targets []object
			for k, q := range p.queries {
				targets = append(targets, object{"refId": string(rune('A' + k)), "expr": q.grafana(),
					"legendFormat": q.legend, "datasource": source})
			}
			stacking := object{"mode": "none", "group": "A"}
			if p.stack {
				stacking["mode"] = "normal"
			}
			id++
			panels = append(panels, object{"id": id, "type": "timeseries", "title": p.title, "description": p.text,
				"datasource": source, "targets": targets,
				"gridPos": object{"x": i * width, "y": y, "w": width, "h": 8},
				"fieldConfig": object{"overrides": []object{}, "defaults": object{"unit": p.unit, "min": 0,
					"custom": object{"stacking": stacking, "fillOpacity": 10}}},
				"options": object{"tooltip": object{"mode": "multi", "sort": "desc"},
					"legend": object{"displayMode": "list"}}})
		}
		y += 8
	}
	d := object{"title": "nfsrdmad", "uid": "nfsrdmad", "tags": []string{"nfs", "rdma"}, "schemaVersion": 39,
		"editable": true, "refresh": "30s", "time": object{"from": "now-1h", "to": "now"}, "panels": panels,
		"templating": object{"list": []object{
			{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
			variable("instance", `label_values(up{job="nfsrdmad"}, instance)`),
			variable("mount", `label_values(nfsrdmad_slots{instance=~"$instance"}, mount)`),
		}}}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(d)
	return b.Bytes(), err
}

// TestDashboardFile checks that the file is the dashboard of this package.
func TestDashboardFile(t *testing.T) {
	want, err := render()
	if err != nil {
		t.Fatal(err)
	}
	if *updateFlag {
		if err := os.WriteFile(dashboardFile, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("the dashboard has changed; run go test ./test/monitoring -run TestDashboardFile -update")
	}
}
