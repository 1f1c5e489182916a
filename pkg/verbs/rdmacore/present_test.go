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

// TestNotLinked: the program starts on machines that have no RDMA libraries.
func TestNotLinked(t *testing.T) {
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
			t.Errorf("the program needs %s to start", l)
		}
	}
}

// TestMissingLibrary: what is missing is named, with the packages that have it.
func TestMissingLibrary(t *testing.T) {
	err := missingLibrary("libibverbs.so.1: cannot open shared object file")
	for _, want := range []string{"libibverbs.so.1", "libibverbs1", "librdmacm1", "ibverbs-providers",
		"provider=softiwarp"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
}

// TestNoConnectionManager: without the kernel's part there is no provider, and the error says which
// module.
func TestNoConnectionManager(t *testing.T) {
	err := openable(filepath.Join(t.TempDir(), "rdma_cm"))
	var u *UnavailableError
	if !errors.As(err, &u) || !strings.Contains(err.Error(), "rdma_ucm") {
		t.Errorf("%v, want an *UnavailableError that names the module", err)
	}
	if _, missing := os.Stat(connectionDevice); missing == nil {
		return
	}
	if _, err := New(Config{}); !errors.As(err, &u) {
		t.Errorf("%v on a machine without RDMA, want an *UnavailableError", err)
	}
}

// TestSockaddr: addresses go to the libraries and back.
func TestSockaddr(t *testing.T) {
	for _, s := range []string{"192.0.2.7:20049", "[2001:db8::1]:1", "0.0.0.0:0", "[fe80::1%1]:65535"} {
		want := netip.MustParseAddrPort(s)
		p, err := sockaddr(want)
		if err != nil {
			t.Errorf("%s: %v", s, err)
			continue
		}
		if got := addressIn(p); got != want {
			t.Errorf("%v came back as %v", want, got)
		}
		freeC(p)
	}
	if _, err := sockaddr(netip.AddrPort{}); err == nil {
		t.Error("no address was taken for one")
	}
}

// TestKeys: what LOCAL_INV names is found by the upper bits of its key, and a key that the device
// has given to another is not forgotten with the first.
func TestKeys(t *testing.T) {
	table := regionTable{byIndex: make(map[uint32]region)}
	a, b := &useMR{}, &useMR{}
	table.add(0x1201, a)
	if table.find(0x12ff) != region(a) || table.find(0x1301) != nil {
		t.Error("found by something else than its index")
	}
	table.add(0x1202, b)
	table.remove(0x1201, a)
	if table.find(verbs.RKey(0x1200)) != region(b) {
		t.Error("the second lost its index to the end of the first")
	}
	table.remove(0x1202, b)
	if table.find(0x1202) != nil {
		t.Error("found after its end")
	}
}
