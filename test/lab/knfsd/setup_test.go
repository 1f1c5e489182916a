package knfsd

import (
	"flag"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { verbstest.Main(m) }

var (
	providerFlag = flag.String("provider", "softiwarp", "the provider to test, one of those in setup_test.go")
	serversFlag  = flag.String("servers", defaultServers(), "the servers to test against, as KERNEL/PROVIDER, separated by commas")
	updateFlag   = flag.Bool("update", false, "write to docs/interop.md what this run has proved")
)

// providers are the providers that the tests can be run with, by the names of -provider. crc asks for MPA's CRC, where that is for the user
// to say.
var providers = map[string]func(crc bool) verbs.Provider{
	"softiwarp": func(crc bool) verbs.Provider { return softiwarp.New(softiwarp.Config{CRC: crc}) },
}

func defaultServers() string {
	var names []string
	for _, kernel := range lab.Kernels {
		names = append(names, kernel+"/"+lab.SIW)
	}
	return strings.Join(names, ",")
}

// A bench is what a case is run on: a server, and the provider to reach it with.
type bench struct {
	*lab.Guest
	kernel string // one of lab.Kernels
	crc    bool   // ask for MPA's CRC
	t      *testing.T
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

// another starts a guest of the server's kind for this case alone; it ends with the case. opts.Kernel and opts.Provider are set here.
func (b bench) another(opts lab.Options) bench {
	b.t.Helper()
	opts.Kernel, opts.Provider = b.kernel, lab.SIW
	b.Guest = lab.Start(b.t, opts)
	return b
}

// A testCase is run against each server.
type testCase struct {
	name   string
	proves string // what docs/interop.md says when it passed; no "|"
	run    func(t *testing.T, b bench)
}

// cases are all of the package, in the order in which they run: by file name, and within a file from top to bottom.
var cases []testCase

// register adds a case; call it for a package variable. All cases of a server share one guest, with the kernel's own settings: a case
// leaves it serving, with these settings, its network and power on; or starts another one. /export is emptied between cases.
func register(name, proves string, run func(t *testing.T, b bench)) struct{} {
	cases = append(cases, testCase{name, proves, run})
	return struct{}{}
}

// TestServers runs all cases against all servers, and compares what they prove with what docs/interop.md claims.
func TestServers(t *testing.T) {
	if providers[*providerFlag] == nil {
		t.Fatalf("-provider %q is not known", *providerFlag)
	}
	for name := range strings.SplitSeq(*serversFlag, ",") {
		kernel, link, _ := strings.Cut(name, "/")
		if !slices.Contains(lab.Kernels, kernel) || link != lab.SIW {
			t.Fatalf("-servers: %q is none of %s", name, defaultServers())
		}
		t.Run(kernel+"-"+link, func(t *testing.T) {
			g := lab.Start(t, lab.Options{Kernel: kernel})
			got := column{server: name, kernel: strings.TrimSpace(g.MustRun("uname -r")), provider: *providerFlag}
			whole := true
			for _, c := range cases {
				ran := false
				passed := t.Run(c.name, func(t *testing.T) {
					ran = true
					c.run(t, bench{Guest: g, kernel: kernel, t: t})
				})
				if _, err := g.Run("rm -rf " + lab.ExportRW + "/*"); ran && err != nil {
					t.Fatalf("after %s: %v", c.name, err)
				}
				whole = whole && ran
				if ran && passed {
					got.proved = append(got.proved, c.proves)
				}
			}
			interop(t, got, whole)
		})
	}
}
