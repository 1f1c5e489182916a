package daemon

import (
	"context"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

func TestCheckHost(t *testing.T) {
	testutil.NeedsFUSE(t)
	seen := map[string]Finding{}
	for _, f := range CheckHost(context.Background(), t.TempDir()+"/no.sock") {
		seen[f.Subject] = f
		if f.Text == "" {
			t.Errorf("finding %+v has no text", f)
		}
	}
	if f := seen["mounting"]; !f.OK || !f.Needed {
		t.Errorf("mounting: got %+v, want OK and needed", f)
	}
	if f := seen["daemon"]; f.OK || !strings.Contains(f.Text, "no.sock") ||
		!strings.Contains(f.Text, "nfsrdmad daemon") {
		t.Errorf("daemon: got %+v, want the socket and the command that starts the daemon", f)
	}
	if !seen["softiwarp"].OK || seen["rdma-core"].Needed {
		t.Errorf("providers: got %+v, want softiwarp OK and rdma-core not needed", seen)
	}
}
