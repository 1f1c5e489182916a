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

const module = "github.com/nfsrdmad/nfsrdmad/"

// limit bounds the tests of one program in the guest. They take about 110 s on an idle host.
const limit = 6 * time.Minute

// TestOldKernel runs the tests of killed servers in a guest with Linux 6.1.
func TestOldKernel(t *testing.T) {
	lab.SkipIfDisabled(t)
	share := t.TempDir()
	build := func(pkg string) (program string) {
		program = filepath.Join(share, filepath.Base(pkg)+".test")
		lab.BuildPure(t, "test", "-c", "-o", program, module+pkg)
		return program
	}
	front, fusefs := build("pkg/front"), build("pkg/fusefs")
	g := lab.Start(t, lab.Options{Kernel: "6.1", Provider: lab.None, HostRoot: true, Share: share})
	g.MustRun("modprobe fuse; ip link set lo up")
	for _, c := range []struct{ program, run, pass string }{
		{front, "TestResumeAfterKill/requests|TestInterruptOfResentRequest/kept=true",
			"TestResumeAfterKill/requests TestInterruptOfResentRequest/stat_none,_killed_later=true,_kept=true"},
		{fusefs, "TestTakeoverKeepsWrittenData/own_server|TestTakeoverOfBusyMount/own_server",
			"TestTakeoverKeepsWrittenData/own_server TestTakeoverOfBusyMount/own_server"},
	} {
		out, err := g.RunFor("cd /host/tmp && chroot /host "+c.program+" -test.v -test.run '"+c.run+"' 2>&1", limit)
		if err != nil {
			t.Errorf("%s: %v\n%s", filepath.Base(c.program), err, out)
			continue
		}
		for name := range strings.FieldsSeq(c.pass) {
			if !strings.Contains(out, "--- PASS: "+name+" ") {
				t.Errorf("%s: test %s did not pass:\n%s", filepath.Base(c.program), name, out)
			}
		}
	}
}
