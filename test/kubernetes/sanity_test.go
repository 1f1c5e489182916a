package kubernetes

import (
	"path/filepath"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// fewestSpecs is how many specs csi-sanity runs for the capabilities of the driver. It skips the
// others.
const fewestSpecs = 46

// TestSanity runs csi-sanity of the Kubernetes project with real mounts.
func TestSanity(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	n := newNode(t)
	c := sanity.NewTestConfig()
	c.Address = n.endpoint()
	c.TargetPath, c.StagingPath = filepath.Join(n.kubelet, "target"), filepath.Join(n.kubelet, "staging")
	c.TestVolumeParameters = n.parameters()
	c.SecretsFile = filepath.Join(t.TempDir(), "secrets.yaml")
	write(t, c.SecretsFile, "DeleteVolumeSecret: {mountOptions: \""+n.options()+"\"}\n"+
		"ControllerValidateVolumeCapabilitiesSecret: {mountOptions: \""+n.options()+"\"}\n")
	passed := 0
	ginkgo.ReportAfterSuite("count", func(r ginkgo.Report) {
		passed = r.SpecReports.WithLeafNodeType(types.NodeTypeIt).CountWithState(types.SpecStatePassed)
	})
	sanity.Test(t, c)
	if passed < fewestSpecs {
		t.Errorf("%d specs of csi-sanity passed, want at least %d: the driver misses a capability", passed, fewestSpecs)
	}
	if l, err := n.list(); err != nil || len(l) != 0 {
		t.Errorf("mounts after the tests: got %+v, %v, want none", l, err)
	}
}
