package doctor

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

const (
	// maxEntry bounds one entry of an archive in bytes; a longer one is cut.
	maxEntry = 4 << 20
	// collectTimeout bounds the collection of one entry.
	collectTimeout = 10 * time.Second
	// bundleTrace is the number of trace events of each mount.
	bundleTrace = 4096
	// bundleLog is the number of lines of the journal.
	bundleLog = 2000
	bundleDir = "nfsrdmad-support/"
)

// A Setting is one key of the configuration of the daemon with its value.
type Setting struct{ Key, Value string }

// A BundleConfig says what an archive contains.
type BundleConfig struct {
	Report *Report
	Socket string // control socket of the daemon
	// Settings are the parsed keys of the configuration. An archive does not contain the file,
	// whose comments and unknown keys can have secrets. ConfigError says why Settings is empty.
	Settings    []Setting
	ConfigError error
	// Metrics is the HOST:PORT of the metrics listener of the daemon; "" for none.
	Metrics string
	Unit    string // systemd unit of the daemon
}

// A Bundle is an archive that is being made. Close or Discard ends it.
type Bundle struct {
	path string
	file *os.File
}

// CreateBundle creates the file of an archive, which only the caller may read. It fails if
// something exists at path, or if a part of path is a symbolic link: the caller is often root, and
// the directory may belong to another user.
func CreateBundle(path string) (*Bundle, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Mode: 0o600, Resolve: unix.RESOLVE_NO_SYMLINKS,
		Flags: unix.O_CREAT | unix.O_EXCL | unix.O_WRONLY | unix.O_CLOEXEC})
	advice := "choose another path"
	switch {
	case errors.Is(err, unix.EEXIST):
		advice = "remove it, or choose another path"
	case errors.Is(err, unix.ELOOP):
		advice = "give the path without symbolic links"
	}
	if err != nil {
		return nil, control.Errorf(control.CodeUsage, "create archive %s: %w; %s", path, err, advice)
	}
	return &Bundle{path, os.NewFile(uintptr(fd), path)}, nil
}

// Discard removes the file of an archive.
func (b *Bundle) Discard() {
	b.file.Close()
	_ = os.Remove(b.path)
}

// Write collects the contents of an archive, writes the file and closes it. What cannot be
// collected is an entry with the reason. After an error of the file, Write has removed it.
func (b *Bundle) Write(ctx context.Context, cfg BundleConfig) error {
	zip := gzip.NewWriter(b.file)
	archive := tar.NewWriter(zip)
	var err error
	for _, e := range collect(ctx, &cfg) {
		data := e.data
		if len(data) > maxEntry {
			data = append(data[:maxEntry:maxEntry], "\n(cut)\n"...)
		}
		h := tar.Header{Name: bundleDir + e.name, Mode: 0o600, Size: int64(len(data)), ModTime: cfg.Report.Time}
		if err == nil {
			err = archive.WriteHeader(&h)
		}
		if err == nil {
			_, err = archive.Write(data)
		}
	}
	err = errors.Join(err, archive.Close(), zip.Close(), b.file.Close())
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = os.Remove(b.path)
		return control.Errorf(control.CodeSystem, "write archive %s: %w; free space, or choose another path", b.path,
			err)
	}
	return nil
}

const bundleReadme = `This is a support archive of nfsrdmad. Look at it before you send it.

doctor.json       result of "nfsrdmad doctor"
version.json      versions of the program and of the daemon
status.json       result of "nfsrdmad status"
slow.json         result of "nfsrdmad status --slow"
trace-N.jsonl     newest trace events of mount N of status.json
metrics.txt       metrics of the daemon
config.txt        keys of the configuration file; not the file
unit.txt          properties of the systemd unit
journal.txt       journal of the unit, level info and above
kernel.txt        facts of the kernel and of this host
devices.txt       network interfaces and RDMA devices

Left out: names of files, file handles, contents of files, remote keys and
addresses of memory, user IDs, IDs and names of processes, comments of the
configuration file, hardware addresses.

In it: names and addresses of servers and of this host, paths of exports, of
mount points and of sockets, the names of exports that the server lists.
`

// An entry is one file of an archive.
type entry struct {
	name string
	data []byte
}

// collect collects the entries of an archive.
func collect(ctx context.Context, cfg *BundleConfig) []entry {
	client := control.NewClient(cfg.Socket)
	entries := []entry{
		{"README.txt", []byte(bundleReadme)},
		{"doctor.json", jsonEntry(cfg.Report, nil)},
		{"config.txt", configEntry(cfg)},
		{"kernel.txt", kernelEntry()},
		{"devices.txt", devicesEntry()},
		{"unit.txt", unitEntry(ctx, cfg.Unit)},
		{"journal.txt", journalEntry(ctx, cfg.Unit)},
		{"metrics.txt", metricsEntry(ctx, cfg.Metrics)},
	}
	version, err := client.Version(ctx)
	version.PID = 0
	versions := map[string]control.VersionInfo{"program": control.Version(), "daemon": version}
	entries = append(entries, entry{"version.json", jsonEntry(versions, err)})
	mounts, err := client.Status(ctx, "")
	entries = append(entries, entry{"status.json", jsonEntry(withoutUsers(mounts), err)})
	slow, err := client.Slow(ctx, "")
	entries = append(entries, entry{"slow.json", jsonEntry(slowWithoutUsers(slow), err)})
	for i := range mounts {
		entries = append(entries, entry{fmt.Sprintf("trace-%d.jsonl", i), traceEntry(ctx, client, mounts[i].Dir)})
	}
	return entries
}

func reason(err error) []byte { return []byte("not available: " + err.Error() + "\n") }

// jsonEntry returns v as JSON, or the reason why there is none.
func jsonEntry(v any, err error) []byte {
	if err != nil {
		return reason(err)
	}
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return reason(err)
	}
	return append(b, '\n')
}

// A mountView is a MountStatus whose pending calls name no user and no process.
type mountView struct {
	control.MountStatus
	Calls []callView `json:"calls"` // hides that of MountStatus
}

type callView struct {
	XID        string  `json:"xid,omitempty"`
	Procedure  string  `json:"procedure"`
	Connection int     `json:"connection"`
	Slot       int     `json:"slot"`
	Age        float64 `json:"age_seconds"`
	SinceSent  float64 `json:"since_sent_seconds"`
	WaitsFor   string  `json:"waits_for"`
	Owner      string  `json:"owner"`
}

func withoutUsers(mounts []control.MountStatus) []mountView {
	views := make([]mountView, len(mounts))
	for i := range mounts {
		views[i] = mountView{mounts[i], []callView{}}
		for _, c := range mounts[i].Calls {
			views[i].Calls = append(views[i].Calls, callView{c.XID, c.Procedure, c.Connection, c.Slot, c.Age,
				c.SinceSent, c.WaitsFor, c.Owner})
		}
	}
	return views
}

// A slowView is a SlowCalls whose calls name no user and no process.
type slowView struct {
	Dir      string         `json:"dir"`
	Since    time.Time      `json:"since"`
	Requests []slowCallView `json:"requests"`
	Calls    []slowCallView `json:"calls"`
}

type slowCallView struct {
	Name       string             `json:"name"`
	Ended      time.Time          `json:"ended"`
	Total      float64            `json:"total_seconds"`
	Calls      int                `json:"calls,omitempty"`
	XID        string             `json:"xid,omitempty"`
	Connection int                `json:"connection"`
	Resends    int                `json:"resends,omitempty"`
	Error      string             `json:"error,omitempty"`
	Owner      string             `json:"owner"`
	Phases     map[string]float64 `json:"phases"`
}

func slowWithoutUsers(mounts []control.SlowCalls) []slowView {
	views := make([]slowView, len(mounts))
	for i := range mounts {
		m := &mounts[i]
		views[i] = slowView{m.Dir, m.Since, slowCallViews(m.Requests), slowCallViews(m.Calls)}
	}
	return views
}

func slowCallViews(calls []control.SlowCall) []slowCallView {
	views := make([]slowCallView, len(calls))
	for i, c := range calls {
		views[i] = slowCallView{c.Name, c.Ended, c.Total, c.Calls, c.XID, c.Connection, c.Resends, c.Error, c.Owner,
			c.Phases}
	}
	return views
}

func traceEntry(ctx context.Context, c *control.Client, dir string) []byte {
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	var lines bytes.Buffer
	if err := c.Trace(ctx, control.TraceRequest{Dir: dir, JSON: true, Last: bundleTrace}, &lines); err != nil {
		return reason(err)
	}
	return redactTrace(lines.Bytes())
}

func configEntry(cfg *BundleConfig) []byte {
	if cfg.ConfigError != nil {
		return reason(cfg.ConfigError)
	}
	var b bytes.Buffer
	for _, s := range cfg.Settings {
		fmt.Fprintf(&b, "%s = %q\n", s.Key, s.Value)
	}
	return b.Bytes()
}

// metricsEntry reads the metrics of the daemon. A listener for all addresses is reached by
// loopback.
func metricsEntry(ctx context.Context, listen string) []byte {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return reason(errors.New("the configuration has no address of metrics"))
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/metrics", nil)
	if err != nil {
		return reason(err)
	}
	// Another user may hold the port, and must not make root read something else.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return reason(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return reason(fmt.Errorf("GET /metrics: status %s", resp.Status))
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxEntry))
	if err != nil {
		return reason(err)
	}
	return b
}

// unitProperties are the properties of the unit in an archive. The command line and the environment
// are not among them.
const unitProperties = "Id,LoadState,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,NRestarts," +
	"ActiveEnterTimestamp,InactiveEnterTimestamp,MemoryCurrent,MemoryPeak,TasksCurrent,NFileDescriptorStore," +
	"FileDescriptorStoreMax,LimitMEMLOCK,LimitNOFILE,OOMPolicy,OOMScoreAdjust,Restart,TimeoutStopUSec"

func unitEntry(ctx context.Context, unit string) []byte {
	b, err := output(ctx, "systemctl", "show", unit, "--no-pager", "--property="+unitProperties)
	if err != nil {
		return reason(err)
	}
	return b
}

// output returns the output of a program.
func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	var errText bytes.Buffer
	cmd.Stderr = &errText
	b, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w %s", name, err, control.Brief(control.OneLine(errText.String())))
	}
	return b, nil
}

func journalEntry(ctx context.Context, unit string) []byte {
	b, err := output(ctx, "journalctl", "--unit="+unit, fmt.Sprintf("--lines=%d", bundleLog), "--no-pager",
		"--output=short-iso", "--quiet")
	if err != nil {
		return reason(err)
	}
	return redactLog(b)
}

// kernelFiles are the facts of the kernel in an archive. None has the name of a file or a user.
var kernelFiles = []string{
	"/proc/version", "/etc/os-release", "/proc/uptime", "/proc/loadavg", "/proc/meminfo", "/proc/self/limits",
	"/proc/net/snmp", "/proc/net/netstat", "/proc/net/sockstat",
	"/proc/sys/net/core/rmem_max", "/proc/sys/net/core/wmem_max", "/proc/sys/net/ipv4/tcp_rmem",
	"/proc/sys/net/ipv4/tcp_wmem", "/proc/sys/net/ipv4/tcp_congestion_control", "/proc/sys/vm/dirty_ratio",
	"/proc/sys/vm/dirty_background_ratio", "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/max_map_count",
	"/sys/module/fuse/parameters/*", "/sys/fs/fuse/connections/*/waiting",
	"/sys/kernel/security/lsm", "/sys/kernel/mm/transparent_hugepage/enabled",
}

// modules are the beginnings of the names of kernel modules in an archive.
var modules = []string{"fuse", "virtiofs", "ib_", "iw_", "rdma", "siw", "mlx", "irdma", "bnxt", "cxgb", "qed", "efa",
	"nfs", "sunrpc", "rpcrdma", "svcrdma", "lockd", "libcrc", "crc32c"}

func kernelEntry() []byte {
	var b bytes.Buffer
	appendFiles(&b, kernelFiles)
	b.WriteString("== modules\n")
	loaded, _ := os.ReadFile("/proc/modules")
	for line := range bytes.Lines(loaded) {
		if slices.ContainsFunc(modules, func(m string) bool { return bytes.HasPrefix(line, []byte(m)) }) {
			fields := strings.Fields(string(line))
			fmt.Fprintln(&b, strings.Join(fields[:min(len(fields), 5)], " ")) // without the address
		}
	}
	return b.Bytes()
}

// appendFiles appends the beginning of each file of the patterns.
func appendFiles(b *bytes.Buffer, patterns []string) {
	const limit = 16 << 10
	for _, pattern := range patterns {
		names, _ := filepath.Glob(pattern) // the patterns are valid
		for _, name := range names {
			f, err := os.Open(name)
			if err != nil {
				continue
			}
			data, err := io.ReadAll(io.LimitReader(f, limit))
			f.Close()
			if err == nil {
				fmt.Fprintf(b, "== %s\n%s\n", name, bytes.TrimSpace(data))
			}
		}
	}
}

// deviceFiles are the facts of devices in an archive. Hardware addresses and GUIDs are not among
// them.
var deviceFiles = []string{
	"/sys/class/infiniband/*/node_type", "/sys/class/infiniband/*/fw_ver", "/sys/class/infiniband/*/board_id",
	"/sys/class/infiniband/*/ports/*/state", "/sys/class/infiniband/*/ports/*/phys_state",
	"/sys/class/infiniband/*/ports/*/rate", "/sys/class/infiniband/*/ports/*/link_layer",
	"/sys/class/infiniband/*/ports/*/counters/*", "/sys/class/infiniband/*/ports/*/hw_counters/*",
	"/sys/class/net/*/mtu", "/sys/class/net/*/operstate", "/sys/class/net/*/speed",
	"/sys/class/net/*/statistics/*_errors", "/sys/class/net/*/statistics/*_dropped",
}

func devicesEntry() []byte {
	var b bytes.Buffer
	appendFiles(&b, deviceFiles)
	if b.Len() == 0 {
		b.WriteString("none\n")
	}
	return b.Bytes()
}
