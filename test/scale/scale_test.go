package scale

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

var (
	fullFlag = flag.Bool("full", false, "measure with many mounts")
	outFlag  = flag.String("out", "", "write the results of TestScale to `FILE`")
)

func TestMain(m *testing.M) { kit.MainNeedsRoot(m) }

// A report is the file of -out.
type report struct {
	Date       string `json:"date"`
	Kernel     string `json:"kernel"`
	Processors int    `json:"processors"`
	Runs       []run  `json:"runs"`
	// Recoveries are the times in seconds from the restart of the server until all connections of
	// the daemon were connected again.
	Recoveries []recovery `json:"recoveries"`
}

// A run is one daemon with mounts of one server.
type run struct {
	Mounts      int `json:"mounts"`
	NConnect    int `json:"nconnect"`
	ConnectRate int `json:"connect_rate"`
	// Seconds is the time until all mounts that were requested at the same moment were complete.
	Seconds float64 `json:"seconds"`
	Daemon  usage   `json:"daemon"`
	Server  usage   `json:"server"`
	// Helpers is the number of helper processes of the daemon. HelperBytes is their memory, with
	// shared pages divided by the number of processes that share them.
	Helpers     int   `json:"helpers"`
	HelperBytes int64 `json:"helper_bytes"`
}

// A usage is what a process has, some seconds after the mounts.
type usage struct {
	Resident    int64   `json:"resident_bytes"`
	Descriptors int     `json:"descriptors"`
	Threads     int     `json:"threads"`
	Goroutines  int     `json:"goroutines,omitempty"` // of the daemon
	CPU         float64 `json:"cpu"`                  // processor time of one second while the mounts are idle
}

// A recovery is what happened after restarts of the server.
type recovery struct {
	Mounts   int       `json:"mounts"`
	NConnect int       `json:"nconnect"`
	Down     float64   `json:"down_seconds"` // while no server runs
	Seconds  []float64 `json:"seconds"`      // of each restart
}

// A plan has the sizes of a run of TestScale.
type plan struct {
	runs     []run
	settle   time.Duration // after the mounts
	idle     time.Duration // in which the processor time is measured
	restarts []recovery    // Seconds has the number of restarts
	progress time.Duration // of the connections before a restart
}

// TestScale measures daemons with mounts, and restarts of their server. Without -full it checks
// only that all figures exist.
func TestScale(t *testing.T) {
	kit.NeedsFUSE(t)
	p := plan{runs: []run{{Mounts: 1, NConnect: 1}, {Mounts: 3, NConnect: 2, ConnectRate: 50}},
		idle:     100 * time.Millisecond,
		restarts: []recovery{{Mounts: 2, NConnect: 2, Seconds: make([]float64, 1)}}}
	if *fullFlag {
		p = plan{settle: 3 * time.Second, idle: 10 * time.Second, progress: 5500 * time.Millisecond}
		for _, n := range [][2]int{{0, 1}, {1, 1}, {1, 16}, {64, 1}, {64, 4}, {256, 1}} {
			for _, rate := range []int{50, 0} {
				if rate != 0 || n[0]*n[1] > 16 {
					p.runs = append(p.runs, run{Mounts: n[0], NConnect: n[1], ConnectRate: rate})
				}
			}
		}
		for _, down := range []float64{0, 1, 3} {
			p.restarts = append(p.restarts, recovery{1, 1, down, make([]float64, 5)},
				recovery{64, 4, down, make([]float64, 3)})
		}
	}
	rep := &report{Date: time.Now().UTC().Format(time.DateOnly), Kernel: bench.Kernel(), Processors: runtime.NumCPU()}
	for i := range p.runs {
		p.runs[i].measure(t, &p)
	}
	for i := range p.restarts {
		p.restarts[i].measure(t, &p)
	}
	rep.Runs, rep.Recoveries = p.runs, p.restarts
	if t.Failed() || *outFlag == "" {
		return
	}
	data, err := json.MarshalIndent(rep, "", " ")
	if err == nil {
		err = os.WriteFile(*outFlag, data, 0o644)
	}
	if err != nil {
		t.Error(err)
	}
}

// A rig is a server, and a daemon without mounts.
type rig struct {
	server  *mounts.ServedDir
	daemon  *mounts.Process
	metrics string
	client  *control.Client
}

func newRig(t *testing.T, rate int) *rig {
	t.Helper()
	r := &rig{metrics: kit.FreePort(t).String(),
		server: mounts.ServeDir(t, mounts.MemoryDir(t, "mode=777"), "--max-connections", "4096", "--insecure")}
	dir := t.TempDir()
	socket := filepath.Join(dir, "control.sock")
	r.daemon = mounts.StartProcess(t, nil, nil, "daemon", "--control-socket", socket, "--metrics-listen", r.metrics,
		"--state-dir", dir, "--connect-rate", strconv.Itoa(rate), "--log-level", "error")
	r.client = control.NewClient(socket)
	r.daemon.WaitFor(t, "starting the daemon", func() error {
		_, err := r.client.PID(t.Context())
		return err
	})
	return r
}

// end unmounts all mounts and ends the daemon.
func (r *rig) end(t *testing.T) {
	t.Helper()
	r.daemon.End(t, syscall.SIGTERM)
}

// mount mounts the export n times at once and returns the time until the last mount was complete.
func (r *rig) mount(t *testing.T, n, nconnect int) time.Duration {
	t.Helper()
	options := fmt.Sprintf("port=%s,mountport=%s,nconnect=%d,idle=0", mounts.PortOf(t, r.server.RDMA),
		mounts.PortOf(t, r.server.TCP), nconnect)
	base := mounts.OpenTempDir(t)
	requests := make([]control.MountRequest, n)
	for i := range requests {
		dir := filepath.Join(base, strconv.Itoa(i))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		requests[i] = control.MountRequest{Spec: "127.0.0.1:/", Dir: dir, Options: options}
	}
	began := time.Now()
	var mounts sync.WaitGroup
	for _, request := range requests {
		mounts.Go(func() {
			if _, err := r.client.Mount(t.Context(), request); err != nil {
				t.Error(err)
			}
		})
	}
	mounts.Wait()
	return time.Since(began)
}

func (r *run) measure(t *testing.T, p *plan) {
	t.Helper()
	g := newRig(t, r.ConnectRate)
	defer g.end(t)
	r.Seconds = g.mount(t, r.Mounts, r.NConnect).Seconds()
	time.Sleep(p.settle)
	processes := bench.Processes{"daemon": g.daemon.Cmd.Process.Pid, "server": g.server.PID()}
	before, err := processes.Usage()
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(p.idle)
	after, err := processes.Usage()
	if err != nil {
		t.Fatal(err)
	}
	cpu := after.Since(before)
	r.Daemon, r.Server = usageOf(t, processes["daemon"]), usageOf(t, processes["server"])
	r.Daemon.Goroutines = goroutines(t, g.metrics)
	r.Helpers, r.HelperBytes = helpers(t, processes["daemon"])
	r.Daemon.CPU = cpu["daemon"].Seconds / p.idle.Seconds()
	r.Server.CPU = cpu["server"].Seconds / p.idle.Seconds()
	t.Logf("%+v", *r)
	if n := r.Mounts * r.NConnect; r.Daemon.Descriptors < n || r.Server.Descriptors < n ||
		r.Daemon.Goroutines <= n || r.Seconds <= 0 || r.Helpers < r.Mounts || r.HelperBytes < int64(r.Helpers) {
		t.Errorf("got too little for %d connections", n)
	}
}

// usageOf returns what /proc knows about a process.
func usageOf(t *testing.T, pid int) (u usage) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	u.Descriptors = len(fds)
	u.Resident = number(t, pid, "status", "VmRSS") << 10
	u.Threads = int(number(t, pid, "status", "Threads"))
	if u.Resident == 0 || u.Threads == 0 {
		t.Fatalf("process %d: no VmRSS or Threads in its status", pid)
	}
	return u
}

// number returns the number of a line "NAME: NUMBER" in a file of /proc/PID. It returns 0 if the
// line does not exist or the process has ended.
func number(t *testing.T, pid int, file, name string) (n int64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			first, _, _ := strings.Cut(strings.TrimSpace(value), " ")
			n, _ = strconv.ParseInt(first, 10, 64)
		}
	}
	return n
}

// helpers returns the number of child processes of a process, and their memory in bytes.
func helpers(t *testing.T, parent int) (n int, bytes int64) {
	t.Helper()
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if pid, err := strconv.Atoi(e.Name()); err == nil && int(number(t, pid, "status", "PPid")) == parent {
			n++
			bytes += number(t, pid, "smaps_rollup", "Pss") << 10
		}
	}
	return n, bytes
}

// goroutines returns the number of goroutines of the daemon, from its metrics.
func goroutines(t *testing.T, metrics string) (n int) {
	t.Helper()
	resp, err := http.Get("http://" + metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), "go_goroutines "); ok {
			n, _ = strconv.Atoi(value)
		}
	}
	if err := lines.Err(); err != nil || n == 0 {
		t.Fatalf("no go_goroutines in the metrics, error %v", err)
	}
	return n
}

// measure restarts the server of a daemon once for each element of Seconds.
func (r *recovery) measure(t *testing.T, p *plan) {
	t.Helper()
	g := newRig(t, 50)
	defer g.end(t)
	g.mount(t, r.Mounts, r.NConnect)
	for i := range r.Seconds {
		time.Sleep(p.progress)
		g.server.Restart(t, syscall.SIGKILL, func() { time.Sleep(time.Duration(r.Down * float64(time.Second))) })
		began := time.Now()
		connects := uint64(r.NConnect * (i + 2)) // those of the mount, and one after each restart
		g.daemon.WaitFor(t, "connections to the new server", func() error { return g.connected(t, connects) })
		r.Seconds[i] = time.Since(began).Seconds()
	}
	slices.Sort(r.Seconds)
	t.Logf("%+v", *r)
}

// connected returns an error unless all connections are connected and each mount has connected the
// given number of times.
func (r *rig) connected(t *testing.T, connects uint64) error {
	t.Helper()
	all, err := r.client.Status(t.Context(), "")
	if err != nil {
		return err
	}
	for i := range all {
		lost := slices.ContainsFunc(all[i].Addresses, func(c control.Connection) bool {
			return c.State != xprt.StateConnected
		})
		if lost || all[i].Metrics.Count("connects_total") < connects {
			return fmt.Errorf("%s is not connected", all[i].Dir)
		}
	}
	return nil
}
