package archtest

import (
	"go/parser"
	"go/token"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/nfsrdmad/nfsrdmad/"

// allowed lists, for each package, the packages of this module that its non-test files may import,
// from the top layer down. Packages without a line import none.
var allowed = []struct{ pkg, imports string }{
	{"cmd/nfsrdmad", "internal/bench internal/demo internal/screen internal/server/nfsserve " +
		"internal/server/svcrdma internal/statview pkg/control pkg/csi pkg/daemon pkg/doctor pkg/fuse/kernel " +
		"pkg/fuse/mountpoint pkg/keep/fdstore pkg/mount pkg/verbs/softiwarp"},
	{"internal/demo", "internal/screen internal/server/nfsserve pkg/control pkg/daemon pkg/fuse/mountpoint " +
		"pkg/mount pkg/verbs/softiwarp"},
	{"pkg/csi", "pkg/control pkg/mount"},
	{"test/lab/beside/program", "pkg/control pkg/daemon test/differential"},
	{"test/differential", "pkg/nfs/nfsacl"},
	{"pkg/daemon", "internal/statuspage pkg/control pkg/keep/fdstore pkg/metrics pkg/mount pkg/metrics/otlp " +
		"pkg/observe/stats"},
	{"pkg/doctor", "pkg/control pkg/membuf pkg/mount pkg/nfs/mountd pkg/nfs/nfs3 pkg/observe/trace pkg/sunrpc " +
		"pkg/sunrpc/rpctcp pkg/verbs pkg/verbs/rdmacore pkg/verbs/softiwarp pkg/xprt"},
	{"pkg/mount", "internal/pace internal/running pkg/control pkg/fuse/kernel pkg/fuse/mountpoint " +
		"pkg/fuse/virtiofs pkg/keep/fdstore pkg/keep/slotfile pkg/membuf pkg/metrics pkg/nfs/mountd pkg/nfs/nfs3 " +
		"pkg/nfs/nfsacl pkg/nfs/nlm pkg/observe/ledger pkg/metrics/otlp pkg/observe/stats pkg/observe/trace " +
		"pkg/sunrpc pkg/verbs pkg/verbs/faults pkg/verbs/rdmacore pkg/verbs/softiwarp pkg/vfs pkg/vfs/data " +
		"pkg/xprt"},
	{"test/kit/mounts", "pkg/fuse/mountpoint pkg/nfs/nfs3 pkg/sunrpc pkg/vfs test/kit test/kit/ganesha"},
	{"test/kit/ganesha", "pkg/nfs/mountd pkg/nfs/nfs3 pkg/sunrpc pkg/sunrpc/rpctcp test/kit"},
	{"test/kit/server", "internal/server/nfsserve pkg/verbs/softiwarp"},
	{"internal/server/nfsserve", "internal/fair internal/resvport internal/server/nfsd internal/server/svcrdma " +
		"pkg/nfs/nfs3 pkg/sunrpc pkg/sunrpc/rpctcp pkg/verbs"},
	{"pkg/metrics", "pkg/fuse/kernel pkg/nfs/nlm pkg/observe/ledger pkg/observe/stats pkg/vfs pkg/xprt"},
	{"pkg/xprt", "internal/fair internal/pace internal/running internal/selfcheck pkg/membuf pkg/memreg " +
		"pkg/observe/ledger pkg/observe/stats pkg/observe/trace pkg/rpcrdma pkg/sunrpc pkg/verbs"},
	{"test/kit/hostile", "pkg/membuf pkg/nfs/nfs3 pkg/rpcrdma pkg/sunrpc pkg/verbs pkg/verbs/faults test/kit"},
	{"internal/server/nfsd", "internal/resvport internal/server/nlmd pkg/nfs pkg/nfs/nfs3 pkg/nfs/nfsacl " +
		"pkg/nfs/nlm/nlmwire pkg/sunrpc"},
	{"internal/server/nlmd", "internal/fair pkg/nfs/nfs3 pkg/nfs/nlm/nlmwire pkg/nfs/rangelock pkg/sunrpc"},
	{"internal/server/svcrdma", "internal/fair pkg/membuf pkg/rpcrdma pkg/sunrpc pkg/verbs"},
	{"pkg/vfs", "internal/fair internal/pace pkg/fuse/kernel pkg/fuse/mountpoint pkg/keep/slotfile pkg/membuf " +
		"pkg/nfs pkg/nfs/nfsacl pkg/nfs/nlm pkg/nfs/rangelock pkg/observe/stats pkg/sunrpc pkg/vfs/acl " +
		"pkg/vfs/attr pkg/vfs/data pkg/vfs/name"},
	{"pkg/fuse/virtiofs", "pkg/fuse/kernel pkg/keep/slotfile pkg/observe/ledger"},
	{"pkg/nfs/nlm", "internal/fair internal/pace internal/resvport internal/running pkg/keep/slotfile " +
		"pkg/nfs/mountd pkg/nfs/nfs3 pkg/nfs/nlm/nlmwire pkg/nfs/rangelock pkg/observe/stats pkg/sunrpc " +
		"pkg/sunrpc/rpctcp"},
	{"pkg/nfs/nlm/nlmwire", "pkg/nfs/nfs3 pkg/sunrpc"},
	{"pkg/memreg", "internal/selfcheck pkg/membuf pkg/observe/stats pkg/observe/trace pkg/verbs"},
	{"pkg/nfs/nfsacl", "pkg/nfs/nfs3 pkg/sunrpc"},
	{"pkg/nfs/mountd", "internal/resvport pkg/nfs/nfs3 pkg/sunrpc pkg/sunrpc/rpctcp"},
	{"pkg/verbs/faults", "pkg/membuf pkg/verbs"},
	{"pkg/verbs/rdmacore", "internal/selfcheck pkg/membuf pkg/verbs pkg/verbs/internal/base"},
	{"pkg/verbs/softiwarp", "internal/resvport internal/selfcheck pkg/verbs pkg/verbs/internal/base"},
	{"pkg/verbs/verbstest", "pkg/membuf pkg/verbs test/kit"},
	{"pkg/sunrpc/rpctcp", "pkg/sunrpc"},
	{"test/kit/systemd", "test/kit"},
	{"test/lab/systemd/load", "test/kit"},
	{"test/kit", "internal/resvport internal/selfcheck"},
	{"internal/statuspage", "pkg/control"},
	{"internal/statview", "pkg/control pkg/observe/stats"},
	{"internal/otlp", ""},
	{"pkg/control", "pkg/observe/stats"},
	{"pkg/keep/fdstore", "internal/pace internal/running"},
	{"pkg/keep/slotfile", "pkg/membuf"},
	{"pkg/fuse/kernel", "internal/running pkg/membuf pkg/observe/ledger"},
	{"pkg/membuf", "internal/fair internal/selfcheck"},
	{"pkg/nfs/nfs3", "pkg/nfs pkg/sunrpc"},
	{"pkg/nfs", "pkg/sunrpc"},
	{"pkg/verbs/internal/base", "internal/selfcheck pkg/verbs"},
	{"internal/resvport", "internal/pace"},
	{"internal/archtest", ""},
	{"internal/pace", ""},
	{"internal/bench", ""},
	{"internal/fair", ""},
	{"internal/selfcheck", ""},
	{"test/kit/collector", ""},
	{"test/kit/power", ""},
	{"internal/running", ""},
	{"internal/screen", ""},
	{"pkg/vfs/name", "pkg/nfs pkg/vfs/attr"},
	{"pkg/vfs/data", "internal/fair internal/running pkg/membuf pkg/nfs pkg/sunrpc pkg/vfs/attr"},
	{"test/kit/memnfs", "pkg/nfs"},
	{"pkg/vfs/attr", "pkg/nfs"},
	{"pkg/observe/ledger", ""},
	{"pkg/nfs/rangelock", ""},
	{"pkg/rpcrdma", ""},
	{"pkg/observe/stats", ""},
	{"pkg/sunrpc", ""},
	{"pkg/observe/trace", ""},
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
	{"pkg/metrics/otlp", "pkg/control pkg/observe/ledger pkg/observe/stats"},
	{"pkg/fuse/mountpoint", "pkg/fuse/kernel"},
	{"pkg/vfs/acl", "pkg/nfs pkg/nfs/nfsacl pkg/sunrpc pkg/vfs/attr"},
}

// isTest reports whether a package is for tests only.
func isTest(pkg string) bool {
	return strings.HasPrefix(pkg, "test/") || pkg == "internal/archtest" || pkg == "pkg/verbs/verbstest"
}

func TestImportsAreAllowed(t *testing.T) {
	got := make(map[string]map[string]bool)
	for file, text := range sources(t) {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		syntax, err := parser.ParseFile(token.NewFileSet(), file, text, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		pkg := path.Dir(file)
		if got[pkg] == nil {
			got[pkg] = make(map[string]bool)
		}
		for _, spec := range syntax.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if to, ok := strings.CutPrefix(name, module); ok {
				got[pkg][to] = true
			}
		}
	}
	for _, line := range allowed {
		for _, to := range strings.Fields(line.imports) {
			if !got[line.pkg][to] {
				t.Errorf("%s may import %s but does not; remove the edge from the list", line.pkg, to)
			}
			if isTest(to) && !isTest(line.pkg) {
				t.Errorf("%s imports the test package %s", line.pkg, to)
			}
			delete(got[line.pkg], to)
		}
	}
	for _, pkg := range slices.Sorted(maps.Keys(got)) {
		for to := range got[pkg] {
			t.Errorf("%s imports %s, which is not in the list", pkg, to)
		}
	}
}
