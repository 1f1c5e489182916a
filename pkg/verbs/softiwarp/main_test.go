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

// configs are the configurations for which the conformance suite runs.
var configs = []struct {
	name string
	cfg  Config
}{
	{"CRC off", Config{}},
	{"small FPDUs, CRC on", Config{MaxFPDU: 1448, SocketBuffer: 16 << 10, CRC: true}},
	{"large FPDUs", Config{MaxFPDU: maxSentULPDU}},
}

func TestConformance(t *testing.T) {
	for _, c := range configs {
		t.Run(c.name, func(t *testing.T) {
			verbstest.Conformance(t, func(testing.TB) verbs.Provider { return New(c.cfg) }, loopback)
		})
	}
}
