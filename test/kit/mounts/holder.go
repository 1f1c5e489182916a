package mounts

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// HolderOf returns the ID of the process that keeps the mounts of the daemon at a control socket, or
// 0 for none.
func HolderOf(t testing.TB, control string) int {
	t.Helper()
	sockets, err := os.ReadFile("/proc/net/unix")
	kit.Must(t, err)
	inodes := make(map[string]bool)
	for line := range strings.Lines(string(sockets)) {
		if f := strings.Fields(line); len(f) == 8 && f[7] == control+".fds" {
			inodes["socket:["+f[6]+"]"] = true
		}
	}
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range comms {
		if comm, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(comm)) != "nfsrdmad-holder" {
			continue
		}
		files, _ := filepath.Glob(filepath.Dir(file) + "/fd/*")
		if slices.ContainsFunc(files, func(f string) bool {
			target, _ := os.Readlink(f)
			return inodes[target]
		}) {
			var pid int
			_, _ = fmt.Sscanf(file, "/proc/%d/comm", &pid)
			return pid
		}
	}
	return 0
}
