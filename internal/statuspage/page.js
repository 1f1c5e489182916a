// The script of the page. It reads status.json every two seconds and shows what changed since the
// reading before. All text goes into the page as text, never as HTML.
"use strict";

const interval = 2000; // ms
const points = 150; // of a plot: 5 minutes
const history = new Map(); // by key of the mount
let before = new Map(); // stats of the last reading by key of the mount

// keyOf returns the key of a mount. A detached mount and a new one can have one mount point.
function keyOf(s) {
  return s.since + " " + s.dir;
}

// node makes an element. Children are elements or text.
function node(name, attributes, ...children) {
  const svg = name === "svg" || name === "polyline";
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) e.setAttribute(key, value);
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}

function number(v) {
  if (v < 0.005) return "0";
  if (v < 10) return v.toFixed(2);
  if (v < 100) return v.toFixed(1);
  if (v < 1e5) return v.toFixed(0);
  if (v < 1e6) return (v / 1e3).toFixed(0) + "k";
  return (v / 1e6).toFixed(1) + "M";
}

function bytes(v) {
  for (const unit of ["B/s", "kB/s", "MB/s"]) {
    if (v < 999.5) return number(v) + " " + unit;
    v /= 1000;
  }
  return number(v) + " GB/s";
}

function time(s) {
  if (!(s > 0)) return "-";
  if (s < 1e-3) return (s * 1e6).toFixed(0) + " µs";
  if (s < 1) return (s * 1e3).toPrecision(3) + " ms";
  if (s < 120) return s.toFixed(1) + " s";
  return (s / 60).toFixed(0) + " min";
}

// difference returns the calls between two readings; old is undefined without an earlier one.
function difference(old, now) {
  if (!old || old.count > now.count) return now;
  return {
    name: now.name, count: now.count - old.count, errors: now.errors - old.errors,
    seconds: now.seconds - old.seconds, buckets: now.buckets.map((n, i) => n - old.buckets[i]),
  };
}

// quantile interpolates in the bucket, as Prometheus does.
function quantile(d, bounds, q) {
  const rank = q * d.count;
  let below = 0, from = 0;
  for (let i = 0; i < bounds.length; i++) {
    const n = d.buckets[i];
    if (n > 0 && below + n >= rank) return from + (bounds[i] - from) * (rank - below) / n;
    below += n;
    from = bounds[i];
  }
  return from;
}

function table(head, rows, text) {
  if (rows.length === 0) return node("p", { class: "line" }, "none");
  const cells = (kind, row) => row.map((c, i) => node(kind, text && text.includes(i) ? { class: "text" } : {}, c));
  return node("div", { class: "scroll" }, node("table", {},
    node("thead", {}, node("tr", {}, ...cells("th", head))),
    node("tbody", {}, ...rows.map((r) => node("tr", {}, ...cells("td", r))))));
}

function latencies(title, old, now, bounds, seconds) {
  const byName = new Map((old || []).map((o) => [o.name, o]));
  const rows = (now || []).map((o) => difference(byName.get(o.name), o)).filter((d) => d.count > 0)
    .sort((a, b) => b.count - a.count)
    .map((d) => [d.name, number(d.count / seconds), number(d.errors / seconds), time(d.seconds / d.count),
      time(quantile(d, bounds, 0.5)), time(quantile(d, bounds, 0.9)), time(quantile(d, bounds, 0.99))]);
  return node("div", {}, node("h3", {}, title),
    table(["", "per s", "errors", "mean", "p50", "p90", "p99"], rows));
}

function plot(title, format, ...series) {
  const top = Math.max(...series.flatMap((s) => s.values), 1e-9);
  const svg = node("svg", { viewBox: "0 0 " + (points - 1) + " 100", preserveAspectRatio: "none" },
    ...series.map((s) => node("polyline", {
      class: s.style,
      points: s.values.map((v, i) => (points - s.values.length + i) + "," + (99 - 97 * v / top).toFixed(1)).join(" "),
    })));
  return node("div", {}, node("h3", {}, title + ", up to " + format(top),
    ...series.filter((s) => s.name).map((s) => node("span", { class: "key " + s.style }, s.name))), svg);
}

function tile(name, value, style) {
  return node("div", { class: "tile" }, node("b", style ? { class: style } : {}, value), node("span", {}, name));
}

function push(list, v) {
  list.push(v);
  if (list.length > points) list.shift();
}

// slow makes a table of slow calls with the phases that took at least a percent, the longest first.
function slow(title, calls) {
  const rows = (calls || []).slice(0, 10).map((c) => [time(c.total_seconds), c.name + (c.error ? ": " + c.error : ""),
    new Date(c.ended).toLocaleTimeString(),
    Object.entries(c.phases || {}).filter(([, s]) => s >= 0.01 * c.total_seconds).sort((a, b) => b[1] - a[1])
      .map(([name, s]) => name + " " + time(s)).join(", ")]);
  return node("div", {}, node("h3", {}, title), table(["total", "", "ended", "time in each phase"], rows, [1, 2, 3]));
}

function counts(m) {
  const l = Object.entries(m || {}).filter(([, n]) => n > 0).sort().map(([name, n]) => n + " " + name);
  return l.length ? l.join(", ") : "none";
}

function mount(m) {
  const s = m.status, now = m.stats, n = s.metrics;
  const key = keyOf(s);
  let old = before.get(key), seconds = old ? now.uptime_seconds - old.uptime_seconds : 0;
  const live = seconds > 0 && ["read_bytes_total", "rpc_sends_total"].every((name) =>
    old.metrics[name] <= now.metrics[name]);
  if (!live) {
    old = undefined;
    seconds = now.uptime_seconds || 1;
  }
  const rate = (name) => ((now.metrics[name] || 0) - (old ? old.metrics[name] : 0)) / seconds;
  const total = (l) => (l || []).reduce((n, o) => n + o.count, 0);
  const requests = (total(now.operations) - total(old && old.operations)) / seconds;
  if (!history.has(key)) history.set(key, { read: [], written: [], requests: [] });
  const h = history.get(key);
  if (live) {
    push(h.read, rate("read_bytes_total"));
    push(h.written, rate("written_bytes_total"));
    push(h.requests, requests);
  }
  const good = s.state === "mounted" && (s.connection === "connected" || s.connection === "idle");
  const failed = (n.mrs_orphaned_total || 0) > 0;
  const problem = [s.failure, s.reason, s.fault_injection && "fault injection is on: " + s.fault_injection, s.last_error]
    .filter(Boolean);
  return node("section", {},
    node("h2", {}, s.dir, node("span", { class: "badge " + (good ? "good" : "bad") },
      s.state + (s.connection ? ", " + s.connection : ""))),
    node("p", { class: "line" }, s.spec + " by " + (s.provider || "-") + ", since " +
      new Date(s.since).toLocaleString()),
    ...problem.map((text) => node("p", { class: "line bad" }, text)),
    node("div", { class: "tiles" },
      tile("read", bytes(rate("read_bytes_total"))), tile("written", bytes(rate("written_bytes_total"))),
      tile("FUSE requests/s", number(requests)), tile("RPCs/s", number(rate("rpc_sends_total"))),
      tile("calls in flight", String(n.calls_in_flight || 0)),
      tile("calls queued", String(n.calls_queued || 0), n.calls_queued > 0 ? "bad" : ""),
      tile("slots in use of " + (n.slots || 0), String(n.slots_in_use || 0)),
      tile("credits", String(n.credits || 0)),
      tile("MRs failed; " + (n.mrs_orphaned_total || 0) + " orphaned", String(n.mrs_failed_total || 0), failed ? "bad" : ""),
      tile("RPCs resent; " + (n.rpc_timeouts_total || 0) + " timed out", String(n.rpc_resends_total || 0))),
    node("p", { class: "line" }, "Memory regions: " + counts(s.mrs)),
    node("div", { class: "plots" },
      plot("Bytes", bytes, { name: "read", style: "first", values: h.read },
        { name: "written", style: "second", values: h.written }),
      plot("FUSE requests/s", number, { style: "first", values: h.requests })),
    node("div", { class: "columns" },
      latencies("FUSE requests", old && old.operations, now.operations, now.bounds_seconds || [], seconds),
      latencies("RPCs", old && old.procedures, now.procedures, now.bounds_seconds || [], seconds)),
    node("div", { class: "columns" }, slow("Slowest requests of 10 minutes", m.slow.requests),
      slow("Slowest RPCs of 10 minutes", m.slow.calls)),
    node("h3", {}, "Calls in flight"),
    table(["procedure", "age", "waits for", "connection", "XID"], (s.calls || []).slice(0, 20).map((c) =>
      [c.procedure, time(c.age_seconds), c.waits_for, "#" + c.connection, c.xid || "-"]), [2]),
    node("div", { class: "columns" },
      node("div", {}, node("h3", {}, "Connections"),
        table(["", "state", "address"], (s.addresses || []).map((c, i) => ["#" + i, c.state, c.address]), [1, 2])),
      node("div", {}, node("h3", {}, "Connection history"),
        table(["time", "", "event", "cause"], (s.history || []).slice(-10).reverse().map((e) =>
          [new Date(e.time).toLocaleTimeString(), "#" + e.connection, e.event + (e.times > 1 ? " (" + e.times + " times)" : ""),
            e.cause || ""]), [2, 3]))));
}

async function update() {
  const state = document.getElementById("state");
  try {
    const reply = await fetch("status.json", { signal: AbortSignal.timeout(10 * interval) });
    if (!reply.ok) throw new Error(await reply.text());
    const page = await reply.json();
    document.getElementById("version").textContent = page.version;
    document.getElementById("mounts").replaceChildren(...page.mounts.map(mount));
    before = new Map(page.mounts.map((m) => [keyOf(m.status), m.stats]));
    for (const key of history.keys()) if (!before.has(key)) history.delete(key);
    state.className = "";
    state.textContent = (page.mounts.length === 1 ? "1 mount" : page.mounts.length + " mounts") + ", " +
      new Date(page.time).toLocaleTimeString();
  } catch (err) {
    state.className = "bad";
    state.textContent = "The daemon does not answer: " + err.message + ". Retrying.";
  }
  setTimeout(update, interval);
}

update();
