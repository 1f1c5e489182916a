//go:build rdmacore && cgo && linux

package rdmacore

import (
	"net/netip"
	"os"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
)

// addrEnv is the address of an RDMA device of this machine, as ADDRESS:0. Tests that need a device
// run where it is set: in a guest of the lab.
const addrEnv = "NFSRDMAD_RDMACORE_ADDR"

func TestMain(m *testing.M) {
	if os.Getenv(addrEnv) != "" {
		rxeRemoteInv = true // no other test posts a LOCAL_INV beside a Send With Invalidate
		Devices()           // what librdmacm opens it keeps, and that is no leak
	}
	testutil.Main(m)
}

// deviceAddr is the address, or skips.
func deviceAddr(t testing.TB) netip.AddrPort {
	t.Helper()
	s := os.Getenv(addrEnv)
	if s == "" {
		t.Skipf("no RDMA device is wanted: %s is not set", addrEnv)
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

func TestConformance(t *testing.T) { verbstest.Conformance(t, newProvider, deviceAddr(t)) }

// TestDevices tells of the devices of the machine what the tests run on.
func TestDevices(t *testing.T) {
	deviceAddr(t)
	all, err := Devices()
	if err != nil || len(all) == 0 {
		t.Fatalf("%d devices: %v", len(all), err)
	}
	for _, a := range all {
		t.Logf("%+v", a)
	}
}
