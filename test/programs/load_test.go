package programs

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestFio writes files with each way of I/O and verifies the checksum of each block, also from a
// second mount.
func TestFio(t *testing.T) {
	kit.NeedsPrograms(t, "fio")
	s := startEmbedded(t)
	mnt, other := s.mount(t), s.mount(t)
	for _, c := range []struct{ name, options string }{
		{"psync", "--ioengine=psync --direct=0 --bsrange=1k-256k"},
		{"psync-direct", "--ioengine=psync --direct=1 --bsrange=4k-256k --blockalign=4k"},
		{"psync-fsync", "--ioengine=psync --direct=0 --bsrange=512-64k --fsync=64 --size=16m"},
		{"libaio", "--ioengine=libaio --iodepth=16 --direct=0 --bsrange=4k-64k"},
		{"libaio-direct", "--ioengine=libaio --iodepth=16 --direct=1 --bsrange=4k-1m --blockalign=4k"},
		{"mmap", "--ioengine=mmap --direct=0 --bs=4k"},
		{"mixed", "--ioengine=psync --direct=0 --rw=randrw --bs=8k"},
		{"mixed-direct", "--ioengine=libaio --iodepth=8 --direct=1 --rw=randrw --bs=8k"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := makeDir(t, mnt, c.name)
			fio := func(dir string, more ...string) {
				t.Helper()
				args := append([]string{"--name=" + c.name, "--rw=randwrite", "--size=64m", "--numjobs=3",
					"--verify=crc32c", "--verify_fatal=1", "--randseed=7", "--fallocate=none", "--group_reporting",
					"--end_fsync=1"}, strings.Fields(c.options)...)
				t.Log(summary(run(t, dir, "fio", append(args, more...)...)))
			}
			fio(dir, "--do_verify=1")
			if !strings.HasPrefix(c.name, "mixed") { // a random mix writes only a part of the blocks
				fio(filepath.Join(other, c.name), "--verify_only")
			}
			run(t, "", "rm", "-r", dir)
		})
	}
}

// summary returns the lines of fio that have the amounts of data.
func summary(out string) string {
	var lines []string
	for _, line := range strings.Split(out, "\n") {
		if strings.Contains(line, "BW=") || strings.Contains(line, "err=") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}

// dbenchError matches messages about operations. Most begin with the number of a line of the load.
// The message about a semaphore of dbench is none of these.
var dbenchError = regexp.MustCompile(`(?m)^[\[(]\d+[\])]|ERROR|Child failed|FAILED TO START`)

// TestDbench replays the load of file server clients. dbench fails when an operation of the load
// does not have the expected result.
func TestDbench(t *testing.T) {
	kit.NeedsPrograms(t, "dbench")
	s := startEmbedded(t)
	for _, clients := range []string{"4", "10"} {
		dir := makeDir(t, s.mount(t), clients)
		out := run(t, "", "dbench", "-t", "60", "-D", dir, clients)
		if !strings.Contains(out, "Throughput") || dbenchError.MatchString(out) {
			t.Errorf("dbench with %s clients:\n%s", clients, out)
		}
		t.Log(out[max(0, strings.Index(out, " Operation ")):])
		run(t, "", "rm", "-r", dir)
	}
}
