package takeover

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { kit.Main(m) }

// limit bounds the tests in the guest, which emulates its processor.
const limit = 6 * time.Minute

// TestOldKernel runs the tests of killed servers in a guest with Linux 6.1.
func TestOldKernel(t *testing.T) {
	lab.SkipIfDisabled(t)
	share := t.TempDir()
	program := filepath.Join(share, "kernel.test")
	lab.BuildPure(t, "test", "-c", "-o", program, "github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel")
	g := lab.Start(t, lab.Options{Kernel: "6.1", Provider: lab.None, HostRoot: true, Share: share})
	g.MustRun("modprobe fuse; ip link set lo up")
	const run = "TestResumeAfterKill/kept|TestInterruptOfResentRequest/kept=true"
	out, err := g.RunFor("cd /host/tmp && chroot /host "+program+" -test.v -test.run '"+run+"' 2>&1", limit)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"TestResumeAfterKill/kept",
		"TestInterruptOfResentRequest/stat_none,_killed_later=true,_kept=true"} {
		if !strings.Contains(out, "--- PASS: "+name+" ") {
			t.Errorf("test %s did not pass:\n%s", name, out)
		}
	}
}
