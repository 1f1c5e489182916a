//go:build rdmacore && cgo && linux

package rdmacore

import (
	"net/netip"
	"os"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// addrEnv names the environment variable with the address of an RDMA device of this machine, as
// ADDRESS:0. Tests that need a device are skipped without it. The lab sets it in its guests.
const addrEnv = "NFSRDMAD_RDMACORE_ADDR"

func TestMain(m *testing.M) {
	if os.Getenv(addrEnv) != "" {
		rxeRemoteInv = true // no test posts a LOCAL_INV that can meet a Send With Invalidate
		Devices()           // librdmacm keeps these devices open, which is no leak
	}
	kit.Main(m)
}

// deviceAddr returns the address in addrEnv, or skips the test.
func deviceAddr(t testing.TB) netip.AddrPort {
	t.Helper()
	s := os.Getenv(addrEnv)
	if s == "" {
		t.Skipf("no RDMA device to test: %s is not set", addrEnv)
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func newProvider(t testing.TB) verbs.Provider {
	t.Helper()
	p, err := New(Config{Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Debug, Output: t.Output()})})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestConformance skips tests for capabilities that some devices lack.
func TestConformance(t *testing.T) {
	verbstest.Conformance(t, newProvider, deviceAddr(t), "BadRemoteInvalidate", "Gaps", "SendWithInvalidate", "STags",
		"SharedPDOtherKey", "ForeignResources", "Withdraw")
}

// TestDevicesListsAttributes lists the devices of the machine and logs their attributes.
func TestDevicesListsAttributes(t *testing.T) {
	deviceAddr(t)
	all, err := Devices()
	if err != nil || len(all) == 0 {
		t.Fatalf("Devices: got %d devices and error %v, want at least one device", len(all), err)
	}
	for _, a := range all {
		t.Logf("%+v", a)
	}
}
