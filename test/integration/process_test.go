package integration

import "github.com/nfsrdmad/nfsrdmad/internal/nfstest"

var inOwnProcess = nfstest.InOwnProcess
