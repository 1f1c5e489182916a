package nfsserve

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
)

func TestMain(m *testing.M) { verbstest.Main(m) }
