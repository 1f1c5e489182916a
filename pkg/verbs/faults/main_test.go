package faults_test

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestConformance runs the conformance suite on a provider whose faults never fire. Every call
// passes through the faults' code.
func TestConformance(t *testing.T) {
	const spec = "disconnect-every=1000000000,post-fail=1000000000:*,flush-reg=1000000000,reg-error=1000000000," +
		"linv-error=1000000000,delay-reply=1000000000:1ms,lose-reply=1000000000,alloc-fail=1000000000," +
		"dereg-fail=1000000000,connect-fail=1000000000"
	verbstest.Conformance(t, func(testing.TB) verbs.Provider { return withFaults(t, spec) }, loopback, "Withdraw")
}
