package knfsd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// The cases of a provider that needs RDMA devices run in a guest: this very test program, in the
// host's file system. It gets the server, and more guests, from the host's lab. Here is the host's
// part.

const (
	// caseLimit is how long one case may run in the guest, several times what the longest took on a
	// busy host; then it says where it stands, which takes a moment.
	caseLimit = 15 * time.Minute
	caseSays  = time.Minute
	// clientMiB is the client guest's memory: its temporary files are there too.
	clientMiB = 2048
)

// Programs of the client guest, and where they are in the host's file system as the guest has it.
const (
	testProgram = "knfsd.test"
	ourProgram  = "nfsrdmad"
	programDir  = "/var/tmp"
)

// A pair is a guest for the cases, and one for the server.
type pair struct {
	setup
	share          string
	link           *lab.Link
	client, server *lab.Guest
}

// startPair builds the programs, and starts both guests.
func startPair(t *testing.T, s setup) *pair {
	t.Helper()
	lab.SkipIfDisabled(t)
	p := &pair{setup: s, share: t.TempDir()}
	lab.BuildRDMA(t, "test", "-c", "-o", filepath.Join(p.share, testProgram), ".")
	lab.BuildRDMA(t, "build", "-o", filepath.Join(p.share, ourProgram), "github.com/nfsrdmad/nfsrdmad/cmd/nfsrdmad")
	return p.start(t)
}

// run runs a case in the client guest. It passes if the guest says that it has passed.
func (p *pair) run(t *testing.T, c testCase) {
	p.client.ServeRemote(t, p.server, p.adapt)
	name := "TestServers/" + p.test() + "/" + strings.ReplaceAll(c.name, " ", "_")
	pattern := "^TestServers$/^" + regexp.QuoteMeta(p.test()) + "$/^" + regexp.QuoteMeta(c.name) + "$"
	out, err := p.client.RunFor(p.command(pattern), caseLimit+caseSays)
	t.Logf("in the guest:\n%s", out)
	var failed *lab.CommandError
	switch {
	case errors.As(err, &failed):
		t.Error("failed in the guest")
	case err != nil:
		t.Error(err)
	case !strings.Contains(out, "--- PASS: "+name+" ("):
		t.Errorf("the guest does not say that %s has passed", name)
	}
}

// command is the shell command in the client guest that runs what a pattern selects.
func (p *pair) command(pattern string) string {
	// What a shell runs in the background, as the guest's does with commands, ignores SIGINT. Siw
	// of 6.1 holds root to the limit of locked memory, too, which our unit lifts.
	env := fmt.Sprintf("env --default-signal=INT,QUIT %s=1 HOME='%s' PATH='%s'", lab.RemoteEnv, os.Getenv("HOME"),
		os.Getenv("PATH"))
	return fmt.Sprintf("ulimit -l unlimited && chroot /host %s %s -test.v -test.timeout %v -test.run '%s' -provider %s -servers %s -program %s 2>&1",
		env, filepath.Join(programDir, testProgram), caseLimit, pattern, p.name, p.serverName(), filepath.Join(
			programDir, ourProgram))
}

// start starts the guests.
func (p *pair) start(t *testing.T) *pair {
	p.link = lab.NewLink(t)
	guests := lab.StartAll(t,
		lab.Options{Name: "server", Kernel: p.kernel, Provider: p.device, Link: p.link},
		lab.Options{Name: "client", Kernel: p.kernel, Provider: p.device, Link: p.link, HostRoot: true,
			Share: p.share, MemoryMiB: clientMiB})
	p.server, p.client = guests[0], guests[1]
	// What lies in the shared directory is read anew by every process.
	p.client.MustRun(fmt.Sprintf("cp /share/%s /share/%s /host%s", testProgram, ourProgram, programDir))
	return p
}

// adapt is for guests that a case starts by itself.
func (p *pair) adapt(o *lab.Options) { o.Link = p.link }
