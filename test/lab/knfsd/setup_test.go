package knfsd

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) {
	if lab.Remote() {
		// librdmacm opens all devices once and never closes them. This is no leak of a test.
		if _, err := rdmacore.Devices(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	kit.Main(m)
}

var (
	providerFlag = flag.String("provider", softiwarpName+","+rdmacore.Name,
		"test these `providers`, separated by commas")
	serversFlag = flag.String("servers", "",
		"test these `servers`, as KERNEL/DEVICE, separated by commas "+
			"(default: by provider; more with NFSRDMAD_LAB=all)")
	programFlag = flag.String("program", "", "use this nfsrdmad `binary` instead of building it")
	updateFlag  = flag.Bool("update", false, "write the results to docs/interop.md")
)

const softiwarpName = "softiwarp"

// A provider is a provider to run the cases with.
type provider struct {
	name string
	// make returns a provider. crc requests MPA's CRC, if the user can request it.
	make func(crc bool) (verbs.Provider, error)
	// inGuest reports that the provider needs a kernel with RDMA devices. The cases then run in a
	// guest, with the server in another one.
	inGuest bool
	devices []string // devices of servers that it can reach; a routine run uses the first
}

var providers = []provider{
	{
		name:    softiwarpName,
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

// servers returns the servers that p is tested with by default.
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

// test returns the name of the setup's subtest of TestServers.
func (s setup) test() string { return s.kernel + "-" + s.device + "-" + s.name }

// serverName returns the server's name in -servers and docs/interop.md.
func (s setup) serverName() string { return s.kernel + "/" + s.device }

// setups returns the setups that the flags select.
func setups(t *testing.T) (all []setup) {
	t.Helper()
	for name := range strings.SplitSeq(*providerFlag, ",") {
		i := slices.IndexFunc(providers, func(p provider) bool { return p.name == name })
		if i < 0 {
			t.Fatalf("-provider: unknown provider %q", name)
		}
		p := providers[i]
		servers := p.servers()
		if *serversFlag != "" {
			servers = strings.Split(*serversFlag, ",")
		}
		for _, server := range servers {
			kernel, device, _ := strings.Cut(server, "/")
			if !slices.Contains(lab.Kernels, kernel) || device != lab.SIW && device != lab.RXE {
				t.Fatalf("-servers: unknown server %q", server)
			}
			if slices.Contains(p.devices, device) {
				all = append(all, setup{p, kernel, device})
			}
		}
	}
	if len(all) == 0 {
		t.Fatalf("-servers %s: not reachable with -provider %s", *serversFlag, *providerFlag)
	}
	return all
}

// A bench is the environment of a case: a server, and a provider to reach it.
type bench struct {
	*lab.Guest
	setup
	crc bool // request MPA's CRC
	t   *testing.T
}

// MustRun is Guest.MustRun, but fails the case and not the server's test.
func (b bench) MustRun(command string) string {
	b.t.Helper()
	out, err := b.Run(command)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// newProvider returns a new provider.
func (b bench) newProvider(t *testing.T) verbs.Provider {
	t.Helper()
	p, err := b.make(b.crc)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// ownServer starts a server like b's for this case only. It sets opts.Kernel and opts.Provider.
func (b bench) ownServer(opts lab.Options) bench {
	b.t.Helper()
	opts.Kernel, opts.Provider = b.kernel, b.device
	b.Guest = lab.Start(b.t, opts)
	return b
}

// A testCase runs against each server.
type testCase struct {
	name   string
	proves string // text in docs/interop.md, without "|"
	run    func(t *testing.T, b bench)
}

// cases are all cases, in the order in which they run: by file name, and in a file from top to
// bottom.
var cases []testCase

// register adds a case; use it to initialize a package variable. All cases of a server share one
// guest with the kernel's default settings. A case must leave the guest serving, with these
// settings and with its network and power on, or use its own server. /export is emptied between
// cases.
func register(name, proves string, run func(t *testing.T, b bench)) struct{} {
	cases = append(cases, testCase{name, proves, run})
	return struct{}{}
}

// TestServers runs all cases against all servers, and compares the results with docs/interop.md. In
// a guest it runs the case that the host selects (pair_test.go).
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
	var unusable error // why the server can run no more cases
	for _, c := range cases {
		if why := s.skipReason(c.name); why != "" {
			if !lab.Remote() {
				t.Logf("%q does not apply: %s", c.name, why)
			}
			continue
		}
		ran := false
		passed := t.Run(c.name, func(t *testing.T) {
			ran = true
			if unusable != nil {
				t.Fatal(unusable)
			}
			run(t, c)
		})
		if lab.Remote() { // the host does the rest
			continue
		}
		if !ran {
			whole = false
			continue
		}
		if unusable != nil {
			continue
		}
		if _, err := server.RunFor("rm -rf "+lab.ExportRW+"/*", mounts.RunTimeout); err != nil {
			unusable = fmt.Errorf("empty the export after %s: %w", c.name, err)
			t.Error(unusable)
		}
		if passed {
			got.proved = append(got.proved, c.proves)
		}
	}
	if !lab.Remote() {
		checkInterop(t, got, whole)
	}
}

// scaled returns n, or inGuest if the case runs in a guest, where both ends of the network are
// emulated. Both values must be enough to prove the same.
func (b bench) scaled(n, inGuest int) int {
	if b.inGuest {
		return inGuest
	}
	return n
}

// String returns the setup's name in messages.
func (s setup) String() string { return fmt.Sprintf("%s with %s", s.serverName(), s.name) }

// An inapplicableCase does not apply to some setups.
type inapplicableCase struct {
	name             string
	provider, device string // "" is any
	why              string
}

var inapplicableCases = []inapplicableCase{
	{"crc", rdmacore.Name, "", "the device decides on CRCs: siw has a module parameter, RoCE always has a CRC"},
	{"split", rdmacore.Name, "", "the case is about MPA's CRC, and RDMA devices do not connect through a TCP relay"},
	{"remote invalidation", rdmacore.Name, "",
		"neither soft device can offer it to a peer; \"local invalidation\" replaces it"},
	{"local invalidation", softiwarpName, "", "softiwarp offers remote invalidation"},
}

// skipReason returns why a case does not apply to a setup, or "" if it applies.
func (s setup) skipReason(name string) string {
	for _, c := range inapplicableCases {
		if c.name == name && (c.provider == "" || c.provider == s.name) && (c.device == "" || c.device == s.device) {
			return c.why
		}
	}
	return ""
}
