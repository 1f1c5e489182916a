package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A Report is what `nfsrdmad bench --json` writes.
type Report struct {
	Path       string   `json:"path"`
	FileSystem string   `json:"file_system"`
	Source     string   `json:"source"`
	Kernel     string   `json:"kernel"`
	Processors int      `json:"processors"`
	Size       int64    `json:"size_bytes"`
	Seconds    float64  `json:"seconds_per_measurement"`
	Files      int      `json:"files"`
	Runs       int      `json:"runs"`
	Caches     Caches   `json:"caches"`
	Direct     bool     `json:"direct"`               // random reads used O_DIRECT
	Daemon     int      `json:"daemon_pid,omitempty"` // 0 if the process is not known
	Results    []Result `json:"results"`
	Samples    []Sample `json:"samples"`
}

// Daemon is the name under which Options.Watch has the daemon of a mount.
const Daemon = "daemon"

// Measure runs all workloads in o.Path and removes its files. It calls progress before each
// workload, with the number of the run from 1.
func Measure(ctx context.Context, o Options, runs int, progress func(run int, workload string)) (_ *Report, err error) {
	m, err := MountOf(o.Path)
	if err != nil {
		return nil, err
	}
	d, err := Open(o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if left := d.Close(); left != nil {
			err = errors.Join(err, fmt.Errorf("remove the files: %w", left))
		}
	}()
	r := &Report{Path: o.Path, FileSystem: m.Type, Source: m.Source, Kernel: Kernel(), Processors: runtime.NumCPU(),
		Size: d.opts.Size, Seconds: d.opts.Time.Seconds(), Files: d.opts.Files, Runs: runs, Daemon: o.Watch[Daemon]}
	for run := range runs {
		for _, w := range workloads {
			progress(run+1, w.Name)
			s, err := d.Run(ctx, w)
			if err != nil {
				return nil, err
			}
			s.Run = run
			r.Samples = append(r.Samples, s)
		}
	}
	r.Results, r.Caches, r.Direct = Summarize(r.Samples), d.Caches(), d.Direct()
	return r, nil
}

// A Mount is one line of the mount table.
type Mount struct {
	Dir, Type, Source string
}

// MountOf returns the mount that has path.
func MountOf(path string) (Mount, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return Mount{}, err
	}
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return Mount{}, err
	}
	all, err := mountinfo.GetMounts(mountinfo.ParentsFilter(abs))
	if err != nil {
		return Mount{}, fmt.Errorf("read the mount table: %w", err)
	}
	var m Mount
	for _, i := range all {
		if len(i.Mountpoint) >= len(m.Dir) { // the last of several mounts on one directory is visible
			m = Mount{i.Mountpoint, i.FSType, i.Source}
		}
	}
	return m, nil
}

// Kernel returns the release of the kernel.
func Kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
