package csi

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }
