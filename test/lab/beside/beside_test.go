package beside

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var (
	providerFlag = flag.String("provider", "softiwarp", "our `provider`, as in the mount option")
	linkFlag     = flag.String("link", lab.SIW, "the guest's RDMA `device`, siw or rxe")
	kernelFlag   = flag.String("kernel", lab.Kernels[0], "the guest's `kernel`")
	optionsFlag  = flag.String("options", "", "further `options` of our mount")
	seedFlag     = flag.Uint64("seed", 1, "seed of the first stream of random operations")
	streamsFlag  = flag.Int("streams", 3, "number of streams")
	opsFlag      = flag.Int("ops", 250, "number of operations in a stream")
	updateFlag   = flag.Bool("update", false, "write the results to docs/performance.md")
	profileFlag  = flag.Bool("profile", false,
		"write CPU profiles of our daemon instead of measuring; use with -artifacts")
)

// Paths and addresses in the guest. Both clients mount lab.ExportRW.
const (
	kernelDir = "/mnt/kernel"
	oursDir   = "/mnt/ours"
	serverIP  = "10.0.2.15" // the guest's own address, the only one of its soft RDMA devices
	daemonLog = "/tmp/nfsrdmad.log"
)

// A sides is a guest with the mounts of both clients.
type sides struct {
	*lab.Guest
	t      *testing.T
	share  string // host directory of /share in the guest
	export string
}

// build builds a program of this module in the shared directory.
func build(t *testing.T, share, name, pkg string) {
	t.Helper()
	buildProgram := lab.BuildRDMA
	if *providerFlag == "softiwarp" {
		buildProgram = lab.BuildPure
	}
	buildProgram(t, "build", "-trimpath", "-o", filepath.Join(share, name), pkg)
}

// start boots a guest and mounts an export with both clients.
func start(t *testing.T, export string) *sides {
	t.Helper()
	lab.SkipIfDisabled(t)
	s := &sides{t: t, share: t.TempDir(), export: export}
	build(t, s.share, "nfsrdmad", "../../../cmd/nfsrdmad")
	build(t, s.share, "program", "./program")
	s.Guest = lab.Start(t, lab.Options{Kernel: *kernelFlag, Provider: *linkFlag, Share: s.share, MemoryMiB: 2048})
	s.must("cp /share/nfsrdmad /share/program /usr/bin/ && modprobe fuse && mkdir -p " + kernelDir + " " + oursDir)
	s.mountKernels()
	s.must("mkdir -p " + kernelDir + "/kernel " + kernelDir + "/ours")
	s.mountOurs("nfsrdmad mount --foreground")
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := s.Run("tail -c 5000 " + daemonLog)
			t.Logf("our daemon's log:\n%s", out)
		}
		if out, err := s.Run("umount " + oursDir + " && umount " + kernelDir); err != nil {
			t.Errorf("unmount: %v\n%s", err, out)
		}
	})
	return s
}

// mountKernels mounts the side of the kernel's client.
func (s *sides) mountKernels() {
	s.t.Helper()
	s.must(fmt.Sprintf("mount -t nfs -o vers=3,proto=rdma,port=20049,mountport=20048,mountproto=tcp,"+
		"nolock,nosuid,nodev %s:%s %s", serverIP, s.export, kernelDir))
}

// mountOurs mounts our side with a program that runs in the foreground.
func (s *sides) mountOurs(program string) {
	s.t.Helper()
	options := "mountport=20048,nolock,nosuid,nodev,provider=" + *providerFlag
	if *optionsFlag != "" {
		options += "," + *optionsFlag
	}
	s.must(fmt.Sprintf("%s -o %s %s:%s %s >%s 2>&1 & "+
		"for i in $(seq 600); do grep -q ' %[5]s fuse' /proc/mounts && exit 0; sleep 0.1; done; cat %[6]s; exit 1",
		program, options, serverIP, s.export, oursDir, daemonLog))
}

func (s *sides) must(command string) string {
	s.t.Helper()
	out, err := s.RunFor(command, 5*time.Minute)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// TestDiffer compares the two clients, operation by operation.
func TestDiffer(t *testing.T) {
	s := start(t, lab.ExportRW)
	text, err := os.ReadFile("KNOWN_DIFFERENCES.md")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.share, "known.md"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := s.RunFor(fmt.Sprintf("program differ -kernel %s/kernel -ours %s/ours -server-kernel %s/kernel "+
		"-server-ours %[3]s/ours -known /share/known.md -seed %d -streams %d -ops %d",
		kernelDir, oursDir, lab.ExportRW, *seedFlag, *streamsFlag, *opsFlag), 20*time.Minute)
	t.Log("\n" + strings.TrimSpace(out))
	var failed *lab.CommandError
	switch {
	case errors.As(err, &failed):
		t.Error("got differences; to repeat them, put the trace above into a file for program differ -file")
	case err != nil:
		t.Fatal(err)
	}
}

// compareTimes sets times that NFSv3 has and times that it does not have through both clients, and
// reads them on the server.
func (s *sides) compareTimes() {
	s.t.Helper()
	set := func(dir string) string {
		return s.must(fmt.Sprintf("for t in -5 4294967295 4294967296 99999999999; do "+
			"touch -d @$t %s/times; echo touch $t: $?; stat -c %%Y %s/times; done", dir, lab.ExportRW))
	}
	kernels, ours := set(kernelDir), set(oursDir)
	if kernels != ours || !strings.Contains(ours, "4294967295\n") {
		s.t.Errorf("times beyond those of NFSv3: the kernel's client:\n%sour client:\n%s", kernels, ours)
	}
}

// TestVisible changes files through one client and reads them through the other.
func TestVisible(t *testing.T) {
	s := start(t, lab.ExportRW)
	s.compareTimes()
	out := s.must(fmt.Sprintf("mkdir %s/both && program visible -kernel %[1]s/both -ours %s/both -seed %d", kernelDir,
		oursDir, *seedFlag))
	t.Log("\n" + strings.TrimSpace(out))
}
