package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
)

// A measurement is one run of one workload on one side, as a line of JSON.
type measurement struct {
	Workload string  // name of the workload
	Side     string  // "kernel" or "ours"
	Round    int     // the sides of a round run consecutively
	Seconds  float64 // until the data is on the server, or read
	// CPU is the processor time of the guest in seconds: application, client and server.
	CPU float64
	MiB float64 // data transferred; 0 for metadata
}

const mib = 1 << 20

// blocks are the sizes of read(2) and write(2), and the amounts of data that take a few seconds in
// an emulated guest.
var blocks = []struct {
	name        string
	size        int
	sequential  int // bytes
	randomCount int // calls
}{{"4 KiB", 4 << 10, 16 * mib, 800}, {"64 KiB", 64 << 10, 48 * mib, 300}, {"1 MiB", mib, 96 * mib, 48}}

// manyFiles is the number of names that the metadata workloads create, stat and remove.
const manyFiles = 200

// A workload runs in a directory of one side. prepare is not measured.
type workload struct {
	name    string
	mib     float64
	prepare func(dir string) error
	run     func(dir string) error
}

func bench(args []string) error {
	f := flag.NewFlagSet("bench", flag.ExitOnError)
	kernel := f.String("kernel", "", "directory on the mount of the kernel's client")
	ours := f.String("ours", "", "directory on our mount")
	rounds := f.Int("rounds", 5, "number of `rounds`")
	only := f.String("only", "", "run the workloads whose complete names match `regexp`")
	side := f.String("side", "", "run only this `side`: kernel or ours")
	profiled := f.Int("profiled", 0, "`PID` of a profiled mount, which writes a profile of each run")
	f.Parse(args)
	wanted, err := regexp.Compile("^(" + *only + ")$")
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	dirs := map[string]string{"kernel": *kernel, "ours": *ours}
	for _, w := range workloads() {
		if *only != "" && !wanted.MatchString(w.name) {
			continue
		}
		for round := range *rounds {
			order := []string{"kernel", "ours"}
			if round%2 == 1 {
				order[0], order[1] = order[1], order[0]
			}
			for _, name := range order {
				if *side != "" && *side != name {
					continue
				}
				m, err := measure(&w, dirs[name], *profiled)
				if err != nil {
					return fmt.Errorf("%s on %s: %w", w.name, name, err)
				}
				m.Side, m.Round = name, round
				if err := out.Encode(m); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// measure runs a workload once, with empty caches on both clients.
func measure(w *workload, dir string, profiled int) (*measurement, error) {
	if w.prepare != nil {
		if err := w.prepare(dir); err != nil {
			return nil, err
		}
	}
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		return nil, err
	}
	runtime.GC()
	if profiled != 0 {
		const settle = time.Second // time to start and to write a profile
		if err := unix.Kill(profiled, unix.SIGUSR1); err != nil {
			return nil, err
		}
		time.Sleep(settle)
		defer func() {
			unix.Kill(profiled, unix.SIGUSR2)
			time.Sleep(settle)
		}()
	}
	busy, begin := busyTime(), time.Now()
	if err := w.run(dir); err != nil {
		return nil, err
	}
	return &measurement{Workload: w.name, MiB: w.mib, Seconds: time.Since(begin).Seconds(), CPU: busyTime() - busy}, nil
}

// busyTime returns the time in seconds for which the guest's processors were not idle or in iowait
// (proc_stat(5)).
func busyTime() float64 {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	sum := 0
	for i, word := range bytes.Fields(line) {
		if n, err := strconv.Atoi(string(word)); err == nil && i != 4 && i != 5 && i <= 7 {
			sum += n
		}
	}
	const ticks = 100 // USER_HZ
	return float64(sum) / ticks
}

func workloads() (list []workload) {
	for _, b := range blocks {
		seq, random := float64(b.sequential)/mib, float64(b.size*b.randomCount)/mib
		buf := differential.Aligned(b.size)
		copy(buf, differential.Pattern(1, 0, b.size))
		file := "/bench"
		fill := func(dir string) error {
			return withFile(dir+file, os.O_RDWR|os.O_CREATE|os.O_TRUNC,
				func(f *os.File) error { return writeAll(f, differential.Pattern(2, 0, mib), b.sequential) })
		}
		list = append(list,
			workload{"sequential write, " + b.name, seq,
				func(dir string) error { return ignoreMissing(os.Remove(dir + file)) }, func(dir string) error {
					return withFile(dir+file, os.O_WRONLY|os.O_CREATE,
						func(f *os.File) error { return writeAll(f, buf, b.sequential) })
				}},
			workload{"sequential read, " + b.name, seq, fill, func(dir string) error {
				return withFile(dir+file, os.O_RDONLY, func(f *os.File) error {
					for done := 0; done < b.sequential; {
						n, err := f.Read(buf)
						if err != nil {
							return err
						}
						done += n
					}
					return nil
				})
			}},
			workload{"random write, " + b.name, random, fill, func(dir string) error {
				return withFile(dir+file, os.O_WRONLY,
					func(f *os.File) error { return atRandom(b.size, b.sequential, b.randomCount, buf, f.WriteAt) })
			}},
			workload{"random read, " + b.name, random, fill, func(dir string) error {
				return withFile(dir+file, os.O_RDONLY,
					func(f *os.File) error { return atRandom(b.size, b.sequential, b.randomCount, buf, f.ReadAt) })
			}})
	}
	names := func(do func(path string) error) func(dir string) error {
		return func(dir string) error {
			for i := range manyFiles {
				if err := do(fmt.Sprintf("%s/many/%d", dir, i)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	create := func(path string) error {
		return withFile(path, os.O_WRONLY|os.O_CREATE, func(*os.File) error { return nil })
	}
	empty := func(dir string) error {
		if err := os.RemoveAll(dir + "/many"); err != nil {
			return err
		}
		return os.Mkdir(dir+"/many", 0o755)
	}
	full := func(dir string) error {
		if err := empty(dir); err != nil {
			return err
		}
		return names(create)(dir)
	}
	return append(list, workload{"create", 0, empty, names(create)},
		workload{"stat", 0, full, names(func(path string) error { _, err := os.Lstat(path); return err })},
		workload{"unlink", 0, full, names(os.Remove)})
}

func ignoreMissing(err error) error {
	if os.IsNotExist(err) {
		return nil
	}
	return err
}

// withFile opens a file, and syncs it if it is open for writing.
func withFile(path string, flags int, use func(*os.File) error) error {
	f, err := os.OpenFile(path, flags, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := use(f); err != nil {
		return err
	}
	if flags&(os.O_WRONLY|os.O_RDWR) != 0 {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return f.Close()
}

func writeAll(f *os.File, buf []byte, n int) error {
	for done := 0; done < n; done += len(buf) {
		if _, err := f.Write(buf); err != nil {
			return err
		}
	}
	return nil
}

// atRandom calls call at random multiples of a size, the same in each run.
func atRandom(size, fileSize, count int, buf []byte, call func([]byte, int64) (int, error)) error {
	r := rand.New(rand.NewPCG(1, 1))
	for range count {
		if _, err := call(buf, int64(r.IntN(fileSize/size)*size)); err != nil {
			return err
		}
	}
	return nil
}
