package nfsserve

import (
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) {
	if code, ok := loadMain(); ok {
		os.Exit(code)
	}
	kit.Main(m)
}
