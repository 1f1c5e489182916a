//go:build rdmacore && cgo && linux

package rdmacore

import (
	"debug/elf"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestProgramIsNotLinkedToLibraries checks that the program starts on machines without the RDMA
// libraries.
func TestProgramIsNotLinkedToLibraries(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range libs {
		if strings.Contains(l, "ibverbs") || strings.Contains(l, "rdmacm") {
			t.Errorf("imported libraries: got %s, want no RDMA library", l)
		}
	}
}

// TestMissingLibraryErrorNamesPackages checks that the error names the library and the packages to
// install.
func TestMissingLibraryErrorNamesPackages(t *testing.T) {
	err := missingLibrary("libibverbs.so.1: cannot open shared object file")
	for _, want := range []string{"libibverbs.so.1", "libibverbs1", "librdmacm1", "ibverbs-providers",
		"provider=softiwarp"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing library: got error %v, want %q in it", err, want)
		}
	}
}

// TestMissingConnectionManagerErrorNamesModule checks that New fails without the kernel's
// connection manager, and that the error names the module to load.
func TestMissingConnectionManagerErrorNamesModule(t *testing.T) {
	err := checkConnectionManager(filepath.Join(t.TempDir(), "rdma_cm"))
	var u *UnavailableError
	if !errors.As(err, &u) || !strings.Contains(err.Error(), "rdma_ucm") {
		t.Errorf("missing connection manager: got error %v, want an *UnavailableError with rdma_ucm", err)
	}
	if _, missing := os.Stat(connectionDevice); missing == nil {
		return
	}
	if _, err := New(Config{}); !errors.As(err, &u) {
		t.Errorf("New on a machine without RDMA: got error %v, want an *UnavailableError", err)
	}
}

// TestSockaddrRoundTrip converts addresses to struct sockaddr and back.
func TestSockaddrRoundTrip(t *testing.T) {
	for _, s := range []string{"192.0.2.7:20049", "[2001:db8::1]:1", "0.0.0.0:0", "[fe80::1%1]:65535"} {
		want := netip.MustParseAddrPort(s)
		p, err := sockaddr(want)
		if err != nil {
			t.Errorf("sockaddr of %s: got error %v, want nil", s, err)
			continue
		}
		if got := addressIn(p); got != want {
			t.Errorf("address after the round trip: got %v, want %v", got, want)
		}
		freeC(p)
	}
	if _, err := sockaddr(netip.AddrPort{}); err == nil {
		t.Error("sockaddr of the zero AddrPort: got nil, want an error")
	}
}

// TestRegionTableFindsByIndex checks that the upper bits of a key find its region. A region that is
// removed must not remove another one that has got the same index.
func TestRegionTableFindsByIndex(t *testing.T) {
	table := regionTable{byIndex: make(map[uint32]region)}
	a, b := &perIOMR{}, &perIOMR{}
	table.add(0x1201, a)
	if got := table.find(0x12ff); got != region(a) {
		t.Errorf("region of a key with the index of a: got %v, want %v", got, a)
	}
	if got := table.find(0x1301); got != nil {
		t.Errorf("region of a key with another index: got %v, want nil", got)
	}
	table.add(0x1202, b)
	table.remove(0x1201, a)
	if got := table.find(verbs.RKey(0x1200)); got != region(b) {
		t.Errorf("region of the index after a was removed: got %v, want %v", got, b)
	}
	table.remove(0x1202, b)
	if got := table.find(0x1202); got != nil {
		t.Errorf("region after b was removed: got %v, want nil", got)
	}
}
