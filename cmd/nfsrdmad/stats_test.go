package main

import (
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/statview"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// The load of the tests of stats: dd reads and writes this many bytes in blocks.
const (
	statsBlock  = 64 << 10
	statsBlocks = 16
)

// statsLoad writes a file on a mount with one process and reads it with another.
func statsLoad(t *testing.T, dir string) {
	t.Helper()
	file := filepath.Join(dir, "load")
	for _, args := range [][]string{{"if=/dev/zero", "of=" + file, "conv=fsync"},
		{"if=" + file, "of=/dev/null", "iflag=direct"}} {
		args = append(args, "bs=64k", "count=16")
		if out, err := exec.Command("dd", args...).CombinedOutput(); err != nil {
			t.Fatalf("dd %s: %v: %s", args, err, out)
		}
	}
}

// startStatsLoad reads the file of statsLoad again and again until the caller calls end.
func startStatsLoad(t *testing.T, dir string) (end func()) {
	t.Helper()
	statsLoad(t, dir)
	stop := filepath.Join(t.TempDir(), "stop")
	load := exec.Command("sh", "-c",
		`while [ ! -e "$1" ] && kill -0 "$2"; do dd if="$0/load" of=/dev/null iflag=direct bs=64k; done`, dir, stop,
		strconv.Itoa(os.Getpid())) // ends with the test
	kit.Must(t, load.Start())
	return func() {
		t.Helper()
		if err := os.WriteFile(stop, nil, 0o600); err != nil {
			t.Error(err)
		}
		if err := load.Wait(); err != nil {
			t.Errorf("load: %v", err)
		}
	}
}

// TestStatsShowsLoad checks bytes, requests, RPCs and processes of a known load, as text and as
// JSON.
func TestStatsShowsLoad(t *testing.T) {
	w := newTestEnv(t)
	dir, other := w.mkdir(t, "mnt"), w.mkdir(t, "other")
	w.mountWith(t, dir, "rsize=65536,wsize=65536")
	w.mountWith(t, other, "ro")
	statsLoad(t, dir)

	var r *statview.Report
	counts := make(map[string]int)
	total := func(rate float64) int { return int(math.Round(rate * r.Interval)) }
	kit.Eventually(t, "all reads and the create", func() bool { // a request is counted after its reply
		var l []statview.Report
		out := w.run(t, "stats", "--output", "json", dir).succeeds(t).stdout
		if err := json.Unmarshal([]byte(out), &l); err != nil || len(l) != 1 || l[0].Dir != dir {
			t.Fatalf("got %s, %v, want the report of %s", out, err, dir)
		}
		r = &l[0]
		for _, o := range append(r.Operations, r.Procedures...) {
			counts[o.Name] = total(o.Rate)
		}
		return counts["read"] >= statsBlocks && counts["create"] > 0
	})
	if total(r.ReadBytes) != statsBlock*statsBlocks || total(r.WrittenBytes) != statsBlock*statsBlocks ||
		total(r.SentBytes) != statsBlock*statsBlocks {
		t.Errorf("got %d bytes read, %d written, %d accepted, want %d of each", total(r.ReadBytes),
			total(r.WrittenBytes), total(r.SentBytes), statsBlock*statsBlocks)
	}
	for _, o := range append(r.Operations, r.Procedures...) {
		if o.Mean <= 0 || o.P50 <= 0 || o.P90 < o.P50 || o.P99 < o.P90 {
			t.Errorf("got %+v, want times in order", o)
		}
	}
	if counts["read"] != statsBlocks || counts["READ"] != statsBlocks || counts["WRITE"] == 0 || counts["create"] != 1 {
		t.Errorf("got %v, want %d of read and READ, WRITE, and 1 create", counts, statsBlocks)
	}
	readers, writers := 0, 0
	for _, p := range r.Processes {
		if p.Command == "dd" && p.PID != 0 && total(p.ReadBytes) == statsBlock*statsBlocks {
			readers++
		}
		if p.Command == "dd" && p.PID != 0 && total(p.WrittenBytes) == statsBlock*statsBlocks {
			writers++
		}
	}
	if readers != 1 || writers != 1 {
		t.Errorf("got processes %+v, want one dd that read and one that wrote all bytes", r.Processes)
	}
	if len(r.Users) != 1 || r.Users[0].UID != 0 || r.Metrics["slots"] == 0 || r.Metrics["credits"] == 0 ||
		len(r.MRs) == 0 {
		t.Errorf("got %+v, want root as the only user, and slots, credits and MRs", r)
	}

	wantText(t, "stats", w.run(t, "stats").succeeds(t).stdout, dir+" from 127.0.0.1:/: mounted", other+" from",
		"FUSE REQUEST", " READ ", " dd ")
}

// TestStatsPrintsIntervals checks that an interval counts only its own requests, and that an
// interrupt ends the command without an error.
func TestStatsPrintsIntervals(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mountWith(t, dir, "rsize=65536,wsize=65536")
	statsLoad(t, dir)
	args := []string{"stats", "--control-socket", w.socket, "--output", "json", "--interval", "100ms", dir}
	cmd := program(t, "nfsrdmad", args...)
	stdout, err := cmd.StdoutPipe()
	kit.Must(t, err)
	kit.Must(t, cmd.Start())
	d := json.NewDecoder(stdout)
	next := func() (bytes float64) {
		t.Helper()
		var l []statview.Report
		if err := d.Decode(&l); err != nil || len(l) != 1 {
			t.Fatalf("got %+v, %v, want a report of one mount", l, err)
		}
		return l[0].ReadBytes * l[0].Interval
	}
	if n := next(); n != 0 { // the load ended before the first interval
		t.Errorf("bytes of an idle interval: got %v, want 0", n)
	}
	statsLoad(t, dir)
	sum := 0.0
	kit.Eventually(t, "interval of the load", func() bool {
		sum += next()
		return math.Round(sum) >= statsBlock*statsBlocks
	})
	if sum += next(); math.Round(sum) != statsBlock*statsBlocks {
		t.Errorf("bytes of all intervals: got %v, want %d", sum, statsBlock*statsBlocks)
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	for d.Decode(new([]statview.Report)) == nil {
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after an interrupt: got %v, want no error", err)
	}
	out := w.run(t, "stats", "--watch", "--interval", "100ms", "--count", "2").succeeds(t).stdout
	if n := strings.Count(out, "from 127.0.0.1:/: mounted"); n != 2 {
		t.Errorf("--watch without a terminal: got %d reports, want 2: %s", n, out)
	}
}

// TestStatsWatchInTerminal runs the full-screen view in tmux.
func TestStatsWatchInTerminal(t *testing.T) {
	kit.NeedsPrograms(t, "tmux")
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mountWith(t, dir, "rsize=65536,wsize=65536")
	cmd := program(t, "nfsrdmad", "stats", "--control-socket", w.socket, "--watch", "--interval", "100ms")
	server, status := filepath.Join(w.dir, "tmux"), filepath.Join(w.dir, "status")
	tmux := func(args ...string) string {
		t.Helper()
		c := exec.Command("tmux", append([]string{"-S", server}, args...)...)
		c.Env = append(cmd.Environ(), "TERM=xterm-256color", "LC_ALL=C.UTF-8")
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("tmux %s: %v: %s", args, err, out)
		}
		return string(out)
	}
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", server, "kill-server").Run() })
	tmux(append([]string{"-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "45", "--", "sh", "-c",
		`"$@"; echo $? >"$0.new" && mv "$0.new" "$0"; exec sleep 600`, status}, cmd.Args...)...)
	wait := func(want string) {
		t.Helper()
		kit.Eventually(t, want+" on the screen", func() bool {
			return strings.Contains(tmux("capture-pane", "-p"), want)
		})
	}
	wait(dir + " from 127.0.0.1:/: mounted")
	end := startStatsLoad(t, dir)
	wait("  READ ")
	wait("\u256d") // a curve of a plot
	end()
	tmux("send-keys", "q")
	kit.Eventually(t, "exit status", func() bool {
		_, err := os.Stat(status)
		return err == nil
	})
	if text, err := os.ReadFile(status); err != nil || string(text) != "0\n" {
		t.Errorf("exit status: got %q, %v, want 0", text, err)
	}
}
