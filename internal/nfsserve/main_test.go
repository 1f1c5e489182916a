package nfsserve

import (
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

func TestMain(m *testing.M) {
	if code, ok := loadMain(); ok {
		os.Exit(code)
	}
	testutil.Main(m)
}
