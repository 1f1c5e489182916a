package monitoring

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

var (
	panelsFlag  = flag.String("panels", "", "run TestPanels, and write pictures of the dashboard to `DIR`")
	panelsLoad  = flag.Duration("panels-load", 5*time.Minute, "`time` of the load of TestPanels")
	legendLabel = regexp.MustCompile(`{{(\w+)}}`)
)

// The load of TestPanels: workers that always run, and further ones for a part of the time.
const (
	steadyWorkers, burstWorkers = 2, 4
	panelPoints                 = 300 // of each series
)

// panelFaults are injected into the daemon, and serverFaults into the server.
const (
	panelFaults  = "seed=1,disconnect-every=20000,flush-reg=9000,delay-reply=~400:40ms"
	serverFaults = "seed=2,late-write=3000"
)

// ranges returns the series of an expression over a range of time. Their names are in the format of
// Grafana's legends.
func (s *server) ranges(q query, times *timeRange) ([]series, error) {
	end := times.begin.Add(time.Duration(times.count-1) * times.step)
	var data struct {
		Result []struct {
			Metric map[string]string
			Values [][2]json.RawMessage // seconds since 1970, and the value as a string
		}
	}
	err := s.get("/api/v1/query_range", url.Values{"query": {q.prometheus()}, "start": {unixSeconds(times.begin)},
		"end": {unixSeconds(end)}, "step": {fmt.Sprint(times.step.Seconds())}}, &data)
	if err != nil {
		return nil, err
	}
	var all []series
	for _, r := range data.Result {
		one := series{name: legendLabel.ReplaceAllStringFunc(q.legend, func(label string) string {
			return r.Metric[strings.Trim(label, "{}")]
		}), values: make([]float64, times.count)}
		for i := range one.values {
			one.values[i] = math.NaN()
		}
		for _, v := range r.Values {
			var at float64
			var text string
			if err := errors.Join(json.Unmarshal(v[0], &at), json.Unmarshal(v[1], &text)); err != nil {
				return nil, err
			}
			i := int(math.Round((at - float64(times.begin.UnixMilli())/1000) / times.step.Seconds()))
			if i < 0 || i >= times.count {
				return nil, fmt.Errorf("%s: value at %v is outside of the range", q.expr, at)
			}
			if one.values[i], err = strconv.ParseFloat(text, 64); err != nil {
				return nil, err
			}
		}
		all = append(all, one)
	}
	return all, nil
}

func unixSeconds(t time.Time) string { return fmt.Sprintf("%.3f", float64(t.UnixMilli())/1000) }

// work uses a directory of the mount until stop is closed: large and small files, names, random
// reads.
func work(dir string, stop <-chan struct{}) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for round := 0; !closed(stop); round++ {
		if err := errors.Join(use(dir, round), useNames(dir, round), readRandom(filepath.Join(dir, "f0"))); err != nil {
			return err
		}
		time.Sleep(30 * time.Millisecond) // a program that also does something else
	}
	return nil
}

// useNames makes, lists, renames and removes small files.
func useNames(dir string, round int) error {
	sub := filepath.Join(dir, fmt.Sprintf("d%d", round))
	if err := os.Mkdir(sub, 0o755); err != nil {
		return err
	}
	for i := range 4 {
		name := filepath.Join(sub, strconv.Itoa(i))
		if err := errors.Join(os.WriteFile(name, []byte("small"), 0o644), os.Rename(name, name+".new")); err != nil {
			return err
		}
	}
	_, err := os.ReadDir(sub)
	return errors.Join(err, os.RemoveAll(sub))
}

// readRandom reads pages of a file past the cache of the kernel.
func readRandom(name string) error {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	page := make([]byte, 8192)
	for i := range 16 {
		if _, err := unix.Pread(fd, page[:4096], int64(i*37%64)*4096); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
	}
	return nil
}

// TestPanels draws what the dashboard shows of a daemon under load, whose connections and server
// fail now and then. It runs the queries of the dashboard on a Prometheus that scraped the daemon.
// "make panels" writes the pictures in docs.
func TestPanels(t *testing.T) {
	if *panelsFlag == "" {
		t.Skip("run make panels")
	}
	kit.NeedsPrograms(t, "prometheus")
	kit.NeedsFUSE(t)
	r := startRig(t, panelFaults, "--inject", serverFaults)
	prom := startPrometheus(t, r.metrics)
	began := time.Now()
	stop, burst := make(chan struct{}), make(chan struct{})
	var workers sync.WaitGroup
	start := func(name string, n int, stop <-chan struct{}) {
		for i := range n {
			workers.Go(func() {
				if err := work(filepath.Join(r.dir, name+strconv.Itoa(i)), stop); err != nil {
					t.Errorf("load: %v", err)
				}
			})
		}
	}
	after := func(part float64) { time.Sleep(time.Until(began.Add(time.Duration(part * float64(*panelsLoad))))) }
	start("steady", steadyWorkers, stop)
	after(0.15)
	start("burst", burstWorkers, burst)
	after(0.45)
	close(burst)
	after(0.55)
	pause(t, r.served, 6*time.Second)
	after(0.75)
	r.served.Restart(t, syscall.SIGTERM, func() { time.Sleep(8 * time.Second) })
	after(1)
	step := (*panelsLoad / panelPoints).Round(100 * time.Millisecond)
	times := &timeRange{begin: began.Add(5 * time.Second).Truncate(time.Second), step: max(step, time.Second)}
	times.count = int(time.Since(times.begin) / times.step)
	for i := range dashboard {
		row := &dashboard[i]
		data := make([][]series, len(row.panels))
		for k, p := range row.panels {
			for _, q := range p.queries {
				all, err := prom.ranges(q, times)
				if err != nil || len(all) == 0 {
					t.Errorf("panel %s: %s: got %d series, error %v; want some", p.title, q.prometheus(), len(all), err)
				}
				data[k] = append(data[k], all...)
			}
		}
		name := "dashboard-" + strings.ReplaceAll(strings.ToLower(row.title), " ", "-") + ".png"
		if err := drawRow(row, data, times, filepath.Join(*panelsFlag, name)); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	workers.Wait()
}

// pause stops the server for some time, as when its host hangs.
func pause(t *testing.T, s *mounts.ServedDir, d time.Duration) {
	t.Helper()
	if err := syscall.Kill(s.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(d)
	if err := syscall.Kill(s.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}
