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

// The cases of a provider that needs RDMA devices run in a guest, in this same test program from
// the host's file system. They get the server, and further guests, from the host's lab. This file
// is the host's part.

const (
	// caseLimit bounds one case in the guest. The longest case takes a small part of it on a busy
	// host. caseDump is the further time in which the guest prints its goroutines.
	caseLimit = 15 * time.Minute
	caseDump  = time.Minute
	// clientMiB is the client guest's memory in MiB, which also holds its temporary files.
	clientMiB = 2048
)

// Programs of the client guest, and their directory in the host's file system as the guest has it.
const (
	testProgram = "knfsd.test"
	ourProgram  = "nfsrdmad"
	programDir  = "/var/tmp"
)

// A pair is a client guest for the cases and a server guest.
type pair struct {
	setup
	share          string
	link           *lab.Link
	client, server *lab.Guest
}

// startPair builds the programs and starts both guests.
func startPair(t *testing.T, s setup) *pair {
	t.Helper()
	lab.SkipIfDisabled(t)
	p := &pair{setup: s, share: t.TempDir()}
	lab.BuildRDMA(t, "test", "-c", "-o", filepath.Join(p.share, testProgram), ".")
	lab.BuildRDMA(t, "build", "-o", filepath.Join(p.share, ourProgram), "github.com/nfsrdmad/nfsrdmad/cmd/nfsrdmad")
	return p.start(t)
}

// run runs a case in the client guest. The case passes if the guest reports that it has passed.
func (p *pair) run(t *testing.T, c testCase) {
	p.client.ServeRemote(t, p.server, p.adapt)
	name := "TestServers/" + p.test() + "/" + strings.ReplaceAll(c.name, " ", "_")
	pattern := "^TestServers$/^" + regexp.QuoteMeta(p.test()) + "$/^" + regexp.QuoteMeta(c.name) + "$"
	out, err := p.client.RunFor(p.command(pattern), caseLimit+caseDump)
	t.Logf("in the guest:\n%s", out)
	var failed *lab.CommandError
	switch {
	case errors.As(err, &failed):
		t.Error("case failed in the guest")
	case err != nil:
		t.Error(err)
	case !strings.Contains(out, "--- PASS: "+name+" ("):
		t.Errorf("guest did not report that %s passed", name)
	}
}

// command returns the shell command that runs the cases that match a pattern in the client guest.
func (p *pair) command(pattern string) string {
	// The guest runs commands as background jobs of a shell, and such jobs ignore SIGINT. siw of
	// 6.1 also limits root's locked memory; the systemd unit of the daemon lifts this limit.
	env := fmt.Sprintf("env --default-signal=INT,QUIT %s=1 HOME='%s' PATH='%s'", lab.RemoteEnv, os.Getenv("HOME"),
		os.Getenv("PATH"))
	test := fmt.Sprintf("%s -test.v -test.timeout %v -test.run '%s' -provider %s -servers %s -program %s",
		filepath.Join(programDir, testProgram), caseLimit, pattern, p.name, p.serverName(),
		filepath.Join(programDir, ourProgram))
	return fmt.Sprintf("ulimit -l unlimited && chroot /host %s %s 2>&1", env, test)
}

// start starts the guests.
func (p *pair) start(t *testing.T) *pair {
	p.link = lab.NewLink(t)
	guests := lab.StartAll(t,
		lab.Options{Name: "server", Kernel: p.kernel, Provider: p.device, Link: p.link},
		lab.Options{Name: "client", Kernel: p.kernel, Provider: p.device, Link: p.link, HostRoot: true,
			Share: p.share, MemoryMiB: clientMiB})
	p.server, p.client = guests[0], guests[1]
	// The shared directory is not cached, so every process reads it again. Copy the programs.
	p.client.MustRun(fmt.Sprintf("cp /share/%s /share/%s /host%s", testProgram, ourProgram, programDir))
	return p
}

// adapt adapts the options of guests that a case starts.
func (p *pair) adapt(o *lab.Options) { o.Link = p.link }
