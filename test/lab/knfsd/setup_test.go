package knfsd

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) {
	if lab.Remote() {
		// librdmacm opens all devices once, for good. That is no leak of a test.
		if _, err := rdmacore.Devices(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	testutil.Main(m)
}

var (
	providerFlag = flag.String("provider", softi+","+rdmacore.Name, "the providers to test, separated by commas")
	serversFlag  = flag.String("servers", "",
		"the servers to test against, as KERNEL/DEVICE, separated by commas; empty for what each provider is tested with: more if NFSRDMAD_LAB=all")
	programFlag = flag.String("program", "", "nfsrdmad, where it is built already")
	updateFlag  = flag.Bool("update", false, "write to docs/interop.md what this run has proved")
)

const softi = "softiwarp"

// A provider is what the tests can be run with.
type provider struct {
	name string
	// make makes one. crc asks for MPA's CRC, where that is for the user to say.
	make func(crc bool) (verbs.Provider, error)
	// inGuest: it needs a kernel with RDMA devices, and so the cases run in a guest, with the
	// server in another.
	inGuest bool
	devices []string // of servers that it can reach, the one that a routine run takes first
}

var providers = []provider{
	{
		name:    softi,
		make:    func(crc bool) (verbs.Provider, error) { return softiwarp.New(softiwarp.Config{CRC: crc}), nil },
		devices: []string{lab.SIW},
	},
	{
		name:    rdmacore.Name,
		make:    func(bool) (verbs.Provider, error) { return rdmacore.New(rdmacore.Config{}) },
		inGuest: true,
		devices: []string{lab.RXE, lab.SIW},
	},
}

// servers are those that it is tested with by default.
func (p provider) servers() (names []string) {
	devices := p.devices
	if !lab.FullRun() {
		devices = devices[:1]
	}
	for _, kernel := range lab.TestedKernels() {
		for _, device := range devices {
			names = append(names, kernel+"/"+device)
		}
	}
	return names
}

// A setup is a provider and a server.
type setup struct {
	provider
	kernel string // one of lab.Kernels
	device string // lab.SIW or lab.RXE
}

// test is the name of the setup's subtest of TestServers.
func (s setup) test() string { return s.kernel + "-" + s.device + "-" + s.name }

// serverName is the server's name in -servers and docs/interop.md.
func (s setup) serverName() string { return s.kernel + "/" + s.device }

// setups are what the flags ask for.
func setups(t *testing.T) (all []setup) {
	t.Helper()
	for name := range strings.SplitSeq(*providerFlag, ",") {
		i := slices.IndexFunc(providers, func(p provider) bool { return p.name == name })
		if i < 0 {
			t.Fatalf("-provider: %q is not known", name)
		}
		p := providers[i]
		servers := p.servers()
		if *serversFlag != "" {
			servers = strings.Split(*serversFlag, ",")
		}
		for _, server := range servers {
			kernel, device, _ := strings.Cut(server, "/")
			if !slices.Contains(lab.Kernels, kernel) || device != lab.SIW && device != lab.RXE {
				t.Fatalf("-servers: %q is none of the lab's", server)
			}
			if slices.Contains(p.devices, device) {
				all = append(all, setup{p, kernel, device})
			}
		}
	}
	if len(all) == 0 {
		t.Fatalf("-servers %s: -provider %s reaches none of them", *serversFlag, *providerFlag)
	}
	return all
}

// A bench is what a case is run on: a server, and the provider to reach it with.
type bench struct {
	*lab.Guest
	setup
	crc bool // ask for MPA's CRC
	t   *testing.T
}

// MustRun is Guest.MustRun that fails the case, not the server's whole run.
func (b bench) MustRun(command string) string {
	b.t.Helper()
	out, err := b.Run(command)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// newProvider makes the provider.
func (b bench) newProvider(t *testing.T) verbs.Provider {
	t.Helper()
	p, err := b.make(b.crc)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// another starts a guest of the server's kind for this case alone; it ends with the case.
// opts.Kernel and opts.Provider are set here.
func (b bench) another(opts lab.Options) bench {
	b.t.Helper()
	opts.Kernel, opts.Provider = b.kernel, b.device
	b.Guest = lab.Start(b.t, opts)
	return b
}

// A testCase is run against each server.
type testCase struct {
	name   string
	proves string // what docs/interop.md says when it passed; no "|"
	run    func(t *testing.T, b bench)
}

// cases are all of the package, in the order in which they run: by file name, and within a file
// from top to bottom.
var cases []testCase

// register adds a case; call it for a package variable. All cases of a server share one guest, with
// the kernel's own settings: a case leaves it serving, with these settings, its network and power
// on; or starts another one. /export is emptied between cases.
func register(name, proves string, run func(t *testing.T, b bench)) struct{} {
	cases = append(cases, testCase{name, proves, run})
	return struct{}{}
}

// TestServers runs all cases against all servers, and compares what they prove with what
// docs/interop.md claims. In a guest it runs there what the host's asks for (pair_test.go).
func TestServers(t *testing.T) {
	for _, s := range setups(t) {
		t.Run(s.test(), func(t *testing.T) {
			var server *lab.Guest
			run := func(t *testing.T, c testCase) { c.run(t, bench{Guest: server, setup: s, t: t}) }
			switch {
			case lab.Remote():
				server = lab.RemoteServer(t)
			case s.inGuest:
				p := startPair(t, s)
				server, run = p.server, p.run
			default:
				server = lab.Start(t, lab.Options{Kernel: s.kernel, Provider: s.device})
			}
			runCases(t, s, server, run)
		})
	}
}

// runCases runs the cases that apply to a setup.
func runCases(t *testing.T, s setup, server *lab.Guest, run func(*testing.T, testCase)) {
	got := column{server: s.serverName(), kernel: strings.TrimSpace(server.MustRun("uname -r")), provider: s.name}
	whole := true
	for _, c := range cases {
		if why := s.spares(c.name); why != "" {
			if !lab.Remote() {
				t.Logf("%q does not apply: %s", c.name, why)
			}
			continue
		}
		ran := false
		passed := t.Run(c.name, func(t *testing.T) {
			ran = true
			run(t, c)
		})
		if lab.Remote() { // one case, and the rest is the host's
			continue
		}
		if !ran {
			whole = false
			continue
		}
		if _, err := server.RunFor("rm -rf "+lab.ExportRW+"/*", runLimit); err != nil {
			t.Fatalf("after %s: %v", c.name, err)
		}
		if passed {
			got.proved = append(got.proved, c.proves)
		}
	}
	if !lab.Remote() {
		interop(t, got, whole)
	}
}

// smaller is what a case takes: n, or where it runs in a guest, and both ends of the network are
// emulated, in, which must be enough to prove the same.
func (b bench) smaller(n, in int) int {
	if b.inGuest {
		return in
	}
	return n
}

// String is for messages.
func (s setup) String() string { return fmt.Sprintf("%s with %s", s.serverName(), s.name) }
