package softiwarp

import (
	"net/netip"
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) {
	if to := os.Getenv(connectEnv); to != "" {
		connectUntilKilled(to)
	}
	kit.Main(m)
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

func TestConformance(t *testing.T) {
	for _, c := range configs {
		t.Run(c.name, func(t *testing.T) {
			verbstest.Conformance(t, func(testing.TB) verbs.Provider { return New(c.cfg) }, loopback)
		})
	}
}
