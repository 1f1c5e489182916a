package archtest

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// allowed lists, for each package, the packages of this module that its non-test files may import.
// The order is from the top layer down: a package imports only packages of later lines.
var allowed = []struct{ pkg, imports string }{
	{"cmd/nfsrdmad", "internal/bench internal/demo internal/fdstore internal/nfsserve internal/screen " +
		"internal/statview internal/svcrdma pkg/control pkg/csi pkg/daemon pkg/doctor pkg/front pkg/fusefs " +
		"pkg/mount pkg/verbs/softiwarp"},
	{"internal/demo", "internal/nfsserve internal/screen pkg/control pkg/daemon pkg/fusefs pkg/mount " +
		"pkg/verbs/softiwarp"},
	{"pkg/csi", "pkg/control pkg/mount"},
	{"test/lab/beside/program", "pkg/control pkg/daemon test/differential"},
	{"test/differential", "pkg/nfs3/nfsacl"},
	{"pkg/daemon", "internal/fdstore internal/otlp internal/statuspage pkg/control pkg/metrics pkg/mount"},
	{"pkg/doctor", "internal/kernelfault internal/rpctcp pkg/control pkg/front pkg/membuf pkg/mount pkg/nfs3 " +
		"pkg/nfs3/mountd pkg/sunrpc pkg/trace pkg/verbs pkg/verbs/rdmacore pkg/verbs/softiwarp pkg/xprt"},
	{"pkg/mount", "internal/backoff internal/fdstore internal/otlp internal/running internal/slotfile pkg/control " +
		"pkg/front pkg/fusefs pkg/ledger pkg/membuf pkg/metrics pkg/nfs3 pkg/nfs3/mountd pkg/nfs3/nfsacl pkg/nlm " +
		"pkg/sunrpc pkg/trace pkg/verbs pkg/verbs/faults pkg/verbs/rdmacore pkg/verbs/softiwarp pkg/virtiofs pkg/xprt"},
	{"test/kit/mounts", "test/kit/ganesha test/kit pkg/fusefs pkg/nfs3 pkg/sunrpc"},
	{"test/kit/ganesha", "internal/rpctcp test/kit pkg/nfs3 pkg/nfs3/mountd pkg/sunrpc"},
	{"test/kit/server", "internal/nfsserve pkg/verbs/softiwarp"},
	{"internal/nfsserve", "internal/nfsd internal/rpctcp internal/svcrdma pkg/nfs3 pkg/sunrpc pkg/verbs"},
	{"pkg/metrics", "pkg/fusefs pkg/ledger pkg/nlm pkg/stats"},
	{"pkg/xprt", "internal/backoff internal/leakcheck internal/running internal/verify pkg/ledger pkg/membuf " +
		"pkg/memreg pkg/rpcrdma pkg/stats pkg/sunrpc pkg/trace pkg/verbs"},
	{"test/kit/hostile", "pkg/membuf pkg/nfs3 pkg/rpcrdma pkg/sunrpc pkg/verbs"},
	{"internal/nfsd", "internal/nlmd pkg/nfs3 pkg/nfs3/nfsacl pkg/nlm pkg/sunrpc"},
	{"internal/nlmd", "pkg/nfs3 pkg/nlm pkg/rangelock pkg/sunrpc"},
	{"internal/svcrdma", "pkg/membuf pkg/rpcrdma pkg/sunrpc pkg/verbs"},
	{"pkg/fusefs", "internal/running internal/slotfile pkg/front pkg/ledger pkg/membuf pkg/nfs3 pkg/nfs3/nfsacl " +
		"pkg/nlm pkg/rangelock pkg/sunrpc"},
	{"pkg/virtiofs", "internal/slotfile pkg/front pkg/ledger"},
	{"pkg/nlm", "internal/backoff internal/rpctcp internal/running internal/slotfile pkg/nfs3 pkg/nfs3/mountd " +
		"pkg/rangelock pkg/sunrpc"},
	{"pkg/memreg", "internal/verify pkg/membuf pkg/trace pkg/verbs"},
	{"pkg/nfs3/nfsacl", "pkg/nfs3 pkg/sunrpc"},
	{"pkg/nfs3/mountd", "internal/rpctcp pkg/nfs3 pkg/sunrpc"},
	{"pkg/verbs/faults", "pkg/membuf pkg/verbs"},
	{"pkg/verbs/rdmacore", "internal/leakcheck pkg/membuf pkg/verbs pkg/verbs/internal/base"},
	{"pkg/verbs/softiwarp", "internal/leakcheck pkg/verbs pkg/verbs/internal/base"},
	{"pkg/verbs/verbstest", "pkg/membuf pkg/verbs"},
	{"internal/rpctcp", "pkg/sunrpc"},
	{"test/kit/systemd", "test/kit"},
	{"test/lab/systemd/load", "test/kit"},
	{"test/kit", "internal/kernelfault internal/leakcheck internal/verify"},
	{"internal/statuspage", "pkg/control"},
	{"internal/statview", "pkg/control pkg/stats"},
	{"internal/otlp", "pkg/control pkg/ledger"},
	{"pkg/control", "pkg/stats"},
	{"internal/slotfile", "internal/memfd"},
	{"pkg/front", "internal/kernelfault internal/memfd pkg/ledger"},
	{"pkg/membuf", "internal/leakcheck internal/memfd"},
	{"pkg/nfs3", "pkg/sunrpc"},
	{"pkg/verbs/internal/base", "internal/leakcheck pkg/verbs"},
	{"internal/archtest", ""},
	{"internal/backoff", ""},
	{"internal/bench", ""},
	{"internal/fdstore", ""},
	{"internal/kernelfault", ""},
	{"internal/leakcheck", ""},
	{"internal/memfd", ""},
	{"test/kit/collector", ""},
	{"test/kit/power", ""},
	{"internal/running", ""},
	{"internal/screen", ""},
	{"internal/verify", ""},
	{"pkg/ledger", ""},
	{"pkg/rangelock", ""},
	{"pkg/rpcrdma", ""},
	{"pkg/stats", ""},
	{"pkg/sunrpc", ""},
	{"pkg/trace", ""},
	{"pkg/verbs", ""},
	{"test/bench", ""},
	{"test/docs", ""},
	{"test/integration", ""},
	{"test/kubernetes", ""},
	{"test/lab", ""},
	{"test/lab/beside", ""},
	{"test/lab/knfsd", ""},
	{"test/lab/rdmacore", ""},
	{"test/lab/systemd", ""},
	{"test/lab/takeover", ""},
	{"test/lab/virtiofs", ""},
	{"test/monitoring", ""},
	{"test/mutants", ""},
	{"test/packages", ""},
	{"test/programs", ""},
	{"test/restart", ""},
	{"test/scale", ""},
}

// testPackages hold helpers of tests. Only test files and other test packages may import them.
var testPackages = []string{
	"internal/archtest", "test/kit/ganesha", "test/kit/hostile", "test/kit/mounts", "test/kit/collector",
	"test/kit/power", "test/kit/server", "test/kit/systemd", "test/kit",
	"pkg/verbs/verbstest",
	"test/bench", "test/differential", "test/docs",
	"test/integration", "test/kubernetes", "test/lab", "test/lab/beside",
	"test/lab/beside/program",
	"test/lab/knfsd",
	"test/lab/rdmacore", "test/lab/systemd", "test/lab/systemd/load", "test/lab/takeover", "test/lab/virtiofs",
	"test/monitoring", "test/mutants", "test/packages", "test/programs", "test/restart", "test/scale",
}

func TestImportsAreAllowed(t *testing.T) {
	got := make(map[string]map[string]bool)
	for _, f := range goFiles(t) {
		if f.test {
			continue
		}
		if got[f.pkg] == nil {
			got[f.pkg] = make(map[string]bool)
		}
		for _, to := range f.imports {
			got[f.pkg][to] = true
		}
	}
	listed := make(map[string]bool)
	for _, line := range allowed {
		listed[line.pkg] = true
		want := strings.Fields(line.imports)
		for _, to := range want {
			if !got[line.pkg][to] {
				t.Errorf("%s may import %s but does not; remove the edge from the list", line.pkg, to)
			}
		}
		for _, to := range slices.Sorted(maps.Keys(got[line.pkg])) {
			if !slices.Contains(want, to) {
				t.Errorf("%s imports %s, which is not in the list", line.pkg, to)
			}
		}
	}
	for pkg := range got {
		if !listed[pkg] {
			t.Errorf("package %s is not in the list; add a line for it", pkg)
		}
	}
}

func TestListedImportsPointDown(t *testing.T) {
	for i, line := range allowed {
		for _, to := range strings.Fields(line.imports) {
			isTo := func(l struct{ pkg, imports string }) bool { return l.pkg == to }
			below := slices.ContainsFunc(allowed[i+1:], isTo)
			if !below {
				t.Errorf("%s imports %s, which is not below it in the list", line.pkg, to)
			}
			if slices.Contains(testPackages, to) && !slices.Contains(testPackages, line.pkg) {
				t.Errorf("%s imports the test package %s", line.pkg, to)
			}
		}
	}
}
