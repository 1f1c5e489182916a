package integration

import "github.com/nfsrdmad/nfsrdmad/test/kit/mounts"

var inOwnProcess = mounts.InOwnProcess
