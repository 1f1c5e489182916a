package integration

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	// floodEnv sets how long TestFlood measures each number of readers, in the form of
	// time.ParseDuration. `make soak` sets 10s.
	floodEnv = "NFSRDMAD_FLOOD"
	// floodHelper makes the test program a flooder or a visitor: "UID READERS FILE".
	floodHelper = "NFSRDMAD_FLOOD_HELPER"
	floodRead   = 128 << 10 // bytes
	floodFile   = 64 << 20  // bytes
	smallFiles  = 64
)

// runFloodHelper runs as a user of a mount until standard input ends. With readers, it reads the
// file with direct I/O, with one thread for each reader. Without, it opens and reads the small files
// of the directory one after the other. For each line of standard input it prints what it did since
// the last one: the number of reads, the median and the 99th percentile of their times.
func runFloodHelper(args string) {
	var uid, readers int
	var path string
	_, err := fmt.Sscan(args, &uid, &readers, &path)
	check := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	check(err)
	check(syscall.Setgroups(nil))
	check(syscall.Setresgid(uid, uid, uid))
	check(syscall.Setresuid(uid, uid, uid))
	var mu sync.Mutex
	var times []time.Duration
	var stop atomic.Bool
	var wg sync.WaitGroup
	loop := func(do func() error) {
		for !stop.Load() {
			began := time.Now()
			check(do())
			mu.Lock()
			times = append(times, time.Since(began))
			mu.Unlock()
		}
	}
	if readers > 0 {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		check(err)
		for range readers {
			wg.Go(func() {
				buf := make([]byte, floodRead)
				loop(func() error {
					_, err := unix.Pread(fd, buf, rand.Int64N(floodFile/floodRead)*floodRead)
					return err
				})
			})
		}
	} else {
		wg.Go(func() {
			i := 0
			loop(func() error {
				i++
				return visit(filepath.Join(path, strconv.Itoa(i%smallFiles)))
			})
		})
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		mu.Lock()
		slices.Sort(times)
		n := len(times)
		var p50, p99 time.Duration
		if n > 0 {
			p50, p99 = times[n/2], times[n*99/100]
		}
		times = times[:0]
		mu.Unlock()
		fmt.Println(n, int64(p50), int64(p99))
	}
	stop.Store(true)
	wg.Wait()
}

// visit opens a file, reads it, and drops its pages, so that the next visit reads it again.
func visit(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if n, err := unix.Pread(fd, make([]byte, 10), 0); n != 10 || err != nil {
		return fmt.Errorf("read %s: %d bytes, %w", path, n, err)
	}
	return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
}

// A floodProcess is a process of runFloodHelper.
type floodProcess struct {
	in  io.WriteCloser
	out *bufio.Reader
	cmd *exec.Cmd
}

func startFlood(t *testing.T, uid, readers int, path string) *floodProcess {
	t.Helper()
	p := &floodProcess{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s", floodHelper, uid, readers, path))
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	kit.Must(t, err)
	out, err := p.cmd.StdoutPipe()
	kit.Must(t, err)
	p.out = bufio.NewReader(out)
	kit.Must(t, p.cmd.Start())
	return p
}

// report returns what the process did since the last report.
func (p *floodProcess) report(t *testing.T) (n int, p50, p99 time.Duration) {
	t.Helper()
	_, err := fmt.Fprintln(p.in)
	kit.Must(t, err)
	line, err := p.out.ReadString('\n')
	if _, scan := fmt.Sscan(line, &n, &p50, &p99); scan != nil {
		t.Fatalf("report of a process: %q, %v", line, err)
	}
	return n, p50, p99
}

func (p *floodProcess) end(t *testing.T) {
	t.Helper()
	p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("process of TestFlood: %v", err)
	}
}

// TestFlood lets many threads of one user read a file with direct I/O while another user opens and
// reads small files. Both users must make progress. With floodEnv it logs how much.
func TestFlood(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	var measure time.Duration
	counts := []int{128}
	if s := os.Getenv(floodEnv); s != "" {
		var err error
		measure, err = time.ParseDuration(s)
		kit.Must(t, err)
		counts = []int{32, 1024, 4096}
	}
	s := mounts.ServeDir(t, mounts.OpenTempDir(t), "--no-root-squash")
	kit.Must(t, os.WriteFile(filepath.Join(s.Dir, "large"), make([]byte, floodFile), 0o644))
	for i := range smallFiles {
		kit.Must(t, os.WriteFile(filepath.Join(s.Dir, strconv.Itoa(i)), []byte("0123456789"), 0o644))
	}
	dir := mounts.MountServed(t, s)
	visitor := startFlood(t, 4002, 0, dir)
	defer visitor.end(t)
	progress := func(p *floodProcess, reads int) {
		t.Helper()
		kit.Eventually(t, "reads", func() bool { n, _, _ := p.report(t); reads -= n; return reads <= 0 })
	}
	progress(visitor, smallFiles)
	time.Sleep(measure)
	n, p50, p99 := visitor.report(t)
	t.Logf("no readers: %d opens with a read of the other user, median %v, 99%% %v", n, p50, p99)
	for _, readers := range counts {
		flood := startFlood(t, 4001, readers, filepath.Join(dir, "large"))
		progress(flood, readers)
		progress(visitor, 2)
		flood.report(t)
		visitor.report(t)
		time.Sleep(measure)
		reads, _, slowest := flood.report(t)
		n, p50, p99 := visitor.report(t)
		t.Logf("%d readers: %d reads, 99%% %v; %d opens with a read of the other user, median %v, 99%% %v", readers,
			reads, slowest, n, p50, p99)
		flood.end(t)
	}
}
