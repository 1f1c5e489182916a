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
	{"cmd/nfsrdmad", "internal/bench internal/demo pkg/keep/fdstore internal/server/nfsserve internal/screen " +
		"internal/statview internal/server/svcrdma pkg/control pkg/csi pkg/daemon pkg/doctor pkg/fuse/kernel pkg/vfs " +
		"pkg/mount pkg/verbs/softiwarp"},
	{"internal/demo", "internal/server/nfsserve internal/screen pkg/control pkg/daemon pkg/vfs pkg/mount " +
		"pkg/verbs/softiwarp"},
	{"pkg/csi", "pkg/control pkg/mount"},
	{"test/lab/beside/program", "pkg/control pkg/daemon test/differential"},
	{"test/differential", "pkg/nfs/nfsacl"},
	{"pkg/daemon", "pkg/keep/fdstore internal/otlp internal/statuspage pkg/control pkg/metrics pkg/mount"},
	{"pkg/doctor", "pkg/sunrpc/rpctcp pkg/control pkg/membuf pkg/mount pkg/nfs/nfs3 " +
		"pkg/nfs/mountd pkg/sunrpc pkg/trace pkg/verbs pkg/verbs/rdmacore pkg/verbs/softiwarp pkg/xprt"},
	{"pkg/mount", "internal/backoff pkg/keep/fdstore internal/loglimit internal/otlp internal/running " +
		"pkg/keep/slotfile pkg/control pkg/fuse/kernel pkg/vfs pkg/ledger pkg/membuf pkg/metrics pkg/nfs/nfs3 " +
		"pkg/nfs/mountd pkg/nfs/nfsacl pkg/nfs/nlm " +
		"pkg/sunrpc pkg/trace pkg/verbs pkg/verbs/faults pkg/verbs/rdmacore pkg/verbs/softiwarp pkg/fuse/virtiofs pkg/xprt"},
	{"test/kit/mounts", "test/kit/ganesha test/kit pkg/vfs pkg/nfs/nfs3 pkg/sunrpc"},
	{"test/kit/ganesha", "pkg/sunrpc/rpctcp test/kit pkg/nfs/nfs3 pkg/nfs/mountd pkg/sunrpc"},
	{"test/kit/server", "internal/server/nfsserve pkg/verbs/softiwarp"},
	{"internal/server/nfsserve", "internal/fairshare internal/server/nfsd internal/resvport pkg/sunrpc/rpctcp internal/server/svcrdma " +
		"pkg/nfs/nfs3 pkg/sunrpc pkg/verbs"},
	{"pkg/metrics", "pkg/fuse/kernel pkg/vfs pkg/ledger pkg/nfs/nlm pkg/stats"},
	{"pkg/xprt", "internal/backoff internal/fairqueue internal/leakcheck internal/running internal/verify " +
		"pkg/ledger pkg/membuf pkg/memreg pkg/rpcrdma pkg/stats pkg/sunrpc pkg/trace pkg/verbs"},
	{"test/kit/hostile", "test/kit pkg/membuf pkg/nfs/nfs3 pkg/rpcrdma pkg/sunrpc pkg/verbs pkg/verbs/faults"},
	{"internal/server/nfsd", "internal/server/nlmd internal/resvport pkg/nfs pkg/nfs/nfs3 pkg/nfs/nfsacl pkg/nfs/nlm pkg/sunrpc"},
	{"internal/server/nlmd", "internal/share pkg/nfs/nfs3 pkg/nfs/nlm pkg/nfs/rangelock pkg/sunrpc"},
	{"internal/server/svcrdma", "internal/fairshare pkg/membuf pkg/rpcrdma pkg/sunrpc pkg/verbs"},
	{"pkg/vfs", "internal/fairqueue internal/loglimit internal/running internal/share pkg/keep/slotfile pkg/fuse/kernel " +
		"pkg/membuf pkg/nfs pkg/nfs/nfsacl pkg/nfs/nlm pkg/nfs/rangelock pkg/sunrpc pkg/vfs/attr pkg/vfs/name"},
	{"pkg/fuse/virtiofs", "pkg/keep/slotfile pkg/fuse/kernel pkg/ledger"},
	{"pkg/nfs/nlm", "internal/backoff internal/loglimit internal/resvport pkg/sunrpc/rpctcp internal/running " +
		"internal/share pkg/keep/slotfile pkg/nfs/nfs3 pkg/nfs/mountd pkg/nfs/rangelock pkg/sunrpc"},
	{"pkg/memreg", "internal/verify pkg/membuf pkg/trace pkg/verbs"},
	{"pkg/nfs/nfsacl", "pkg/nfs/nfs3 pkg/sunrpc"},
	{"pkg/nfs/mountd", "internal/resvport pkg/sunrpc/rpctcp pkg/nfs/nfs3 pkg/sunrpc"},
	{"pkg/verbs/faults", "pkg/membuf pkg/verbs"},
	{"pkg/verbs/rdmacore", "internal/leakcheck pkg/membuf pkg/verbs pkg/verbs/internal/base"},
	{"pkg/verbs/softiwarp", "internal/leakcheck internal/resvport pkg/verbs pkg/verbs/internal/base"},
	{"pkg/verbs/verbstest", "test/kit pkg/membuf pkg/verbs"},
	{"pkg/sunrpc/rpctcp", "pkg/sunrpc"},
	{"test/kit/systemd", "test/kit"},
	{"test/lab/systemd/load", "test/kit"},
	{"test/kit", "internal/leakcheck internal/resvport internal/verify"},
	{"internal/statuspage", "pkg/control"},
	{"internal/statview", "pkg/control pkg/stats"},
	{"internal/otlp", "pkg/control pkg/ledger"},
	{"pkg/control", "pkg/stats"},
	{"pkg/keep/fdstore", "internal/backoff internal/oomscore"},
	{"pkg/keep/slotfile", "internal/memfd"},
	{"pkg/fuse/kernel", "internal/memfd internal/oomscore pkg/ledger"},
	{"pkg/membuf", "internal/fairqueue internal/leakcheck internal/memfd"},
	{"pkg/nfs/nfs3", "pkg/nfs pkg/sunrpc"},
	{"pkg/nfs", "pkg/sunrpc"},
	{"pkg/verbs/internal/base", "internal/leakcheck pkg/verbs"},
	{"internal/resvport", "internal/loglimit"},
	{"internal/archtest", ""},
	{"internal/backoff", ""},
	{"internal/bench", ""},
	{"internal/fairshare", ""},
	{"internal/fairqueue", ""},
	{"pkg/keep/fdstore", ""},
	{"internal/leakcheck", ""},
	{"internal/loglimit", ""},
	{"internal/memfd", ""},
	{"test/kit/collector", ""},
	{"test/kit/power", ""},
	{"internal/oomscore", ""},
	{"internal/reference", ""},
	{"internal/running", ""},
	{"internal/screen", ""},
	{"internal/share", ""},
	{"internal/verify", ""},
	{"pkg/vfs/name", "pkg/nfs pkg/vfs/attr"},
	{"pkg/vfs/attr", "pkg/nfs"},
	{"pkg/ledger", ""},
	{"pkg/nfs/rangelock", ""},
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
