package restart

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A fioRun runs fio on a mount again and again.
type fioRun struct {
	stop        chan struct{}
	ended       chan struct{}
	err         error
	runs        int
	read, wrote int64 // bytes
}

// startFio starts fio(1) with verification in a directory of the mount until end is called.
func startFio(t *testing.T, dir string, seed uint64) *fioRun {
	t.Helper()
	if _, err := exec.LookPath("fio"); err != nil {
		t.Fatalf("%v; install the Debian package fio", err)
	}
	f := &fioRun{stop: make(chan struct{}), ended: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(f.ended)
		for f.err == nil {
			f.err = f.run(ctx, dir, seed+uint64(f.runs))
			select {
			case <-f.stop:
				return
			default:
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		for {
			select {
			case <-f.ended:
				return
			case <-time.After(2 * time.Second):
				forceUnmount(filepath.Dir(dir))
			}
		}
	})
	return f
}

// run writes and reads random parts of three files: buffered, past the page cache, and mapped. fio
// checks each block some time after it has written it, and all at the end.
func (f *fioRun) run(ctx context.Context, dir string, seed uint64) error {
	args := strings.Fields("--output-format=json --thread --fallocate=none --directory=" + dir +
		" --rw=randrw --rwmixread=40 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --verify_state_save=0" +
		" --do_verify=1 --end_fsync=1")
	args = append(args, fmt.Sprintf("--randseed=%d", seed%(1<<31)))
	args = append(args, strings.Fields("--name=buffered --ioengine=psync --bs=4k --size=8m --fsync=100 "+
		"--name=direct --ioengine=psync --direct=1 --bs=64k --size=16m "+
		"--name=mapped --ioengine=mmap --bs=16k --size=8m")...)
	cmd := exec.CommandContext(ctx, "fio", args...)
	cmd.WaitDelay = time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("fio: %w\n%s\n%s", err, stderr.String(), stdout.String())
	}
	var result struct {
		Jobs []struct {
			Error int
			Read  struct {
				Bytes int64 `json:"io_bytes"`
			}
			Write struct {
				Bytes int64 `json:"io_bytes"`
			}
		}
	}
	out := stdout.String()
	if err := json.Unmarshal([]byte(out[max(0, strings.Index(out, "{")):]), &result); err != nil {
		return fmt.Errorf("output of fio: %w\n%s", err, out)
	}
	if len(result.Jobs) != 3 {
		return fmt.Errorf("fio ran %d jobs, want 3\n%s", len(result.Jobs), out)
	}
	for _, j := range result.Jobs {
		if j.Error != 0 || j.Read.Bytes == 0 || j.Write.Bytes == 0 {
			return fmt.Errorf("a job of fio has error %d, read %d and wrote %d bytes\n%s", j.Error, j.Read.Bytes,
				j.Write.Bytes, out)
		}
		f.read += j.Read.Bytes
		f.wrote += j.Write.Bytes
	}
	f.runs++
	return nil
}

// end waits for the end of the current run.
func (f *fioRun) end(t *testing.T) {
	t.Helper()
	close(f.stop)
	<-f.ended
	if f.err != nil {
		t.Error(f.err)
	}
	t.Logf("fio: %d runs, %d bytes read and %d written, all verified", f.runs, f.read, f.wrote)
}
