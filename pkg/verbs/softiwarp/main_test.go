package softiwarp

import (
	"net/netip"
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
)

func TestMain(m *testing.M) {
	if to := os.Getenv(connectEnv); to != "" {
		connectUntilKilled(to)
	}
	testutil.Main(m)
}

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

// unusedPort is an address for Resolve; no test connects to it.
var unusedPort = netip.MustParseAddrPort("127.0.0.1:9")

// configs are the configurations for which the conformance suite runs.
var configs = []struct {
	name string
	cfg  Config
}{
	{"CRC off", Config{}},
	{"CRC on", Config{CRC: true}},
	{"small FPDUs", Config{MaxFPDU: 1448, SocketBuffer: 16 << 10}},
	{"small FPDUs, CRC on", Config{MaxFPDU: 1448, CRC: true}},
	{"large FPDUs", Config{MaxFPDU: maxSentULPDU}},
}

// TestCapabilitiesOfConformanceSuite checks that softiwarp has every capability without which the
// conformance suite skips a rule.
func TestCapabilitiesOfConformanceSuite(t *testing.T) {
	var devices []verbs.Device
	for range 2 {
		id, err := New(Config{}).Resolve(testContext(t), unusedPort)
		if err != nil {
			t.Fatal(err)
		}
		defer id.Close()
		devices = append(devices, id.Device())
	}
	const has, hasNot = verbs.CapFastReg | verbs.CapGaps | verbs.CapRemoteInv, verbs.CapPerIOReg
	if caps := devices[0].Attrs().Caps; caps&has != has || caps&hasNot != 0 {
		t.Errorf("capabilities: got %b, want all of %b and none of %b", caps, has, hasNot)
	}
	if devices[0] == devices[1] {
		t.Error("devices of two providers: got the same, want different ones")
	}
}

func TestConformance(t *testing.T) {
	for _, c := range configs {
		t.Run(c.name, func(t *testing.T) {
			verbstest.Conformance(t, func(testing.TB) verbs.Provider { return New(c.cfg) }, loopback)
		})
	}
}
