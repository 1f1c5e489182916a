package daemon

import (
	"context"
	"strings"
	"testing"
)

func TestCheckHost(t *testing.T) {
	seen := map[string]Finding{}
	for _, f := range CheckHost(context.Background(), t.TempDir()+"/no.sock") {
		seen[f.Subject] = f
		if f.Text == "" {
			t.Errorf("%+v says nothing", f)
		}
	}
	if f := seen["mounting"]; !f.OK || !f.Needed {
		t.Errorf("%+v", f)
	}
	if f := seen["daemon"]; f.OK || !strings.Contains(f.Text, "no.sock") ||
		!strings.Contains(f.Text, "nfsrdmad daemon") {
		t.Errorf("%+v", f)
	}
	if !seen["softiwarp"].OK || seen["rdma-core"].Needed {
		t.Errorf("%+v", seen)
	}
}
