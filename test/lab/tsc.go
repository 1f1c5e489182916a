package lab

import (
	"bytes"
	"fmt"
	"runtime"
	"runtime/pprof"
	"sync"
)

// tscKHz returns the rate of the host's time stamp counter in kHz, or 0 if a guest does not see
// that counter: QEMU passes the counter through on amd64 hosts only.
//
// A guest's kernel would measure the counter against an emulated timer. On a busy host this
// measurement can be wrong by a large factor. The guest's clock and all its timeouts would be wrong
// by the same factor.
var tscKHz = sync.OnceValue(func() int {
	if runtime.GOARCH != "amd64" {
		return 0
	}
	// The Go runtime measures the counter against the monotonic clock, from the start of the
	// process. It publishes the result only in the text form of this profile.
	var profile bytes.Buffer
	if err := pprof.Lookup("mutex").WriteTo(&profile, 1); err != nil {
		return 0
	}
	var hz int
	if _, err := fmt.Sscanf(profile.String(), "--- mutex:\ncycles/second=%d\n", &hz); err != nil {
		return 0
	}
	return hz / 1000
})
