package daemon

import (
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// A process that was busy keeps the memory of its heap: Go returns free memory slowly, and collects
// an idle heap every two minutes. ReturnMemory collects the heap and returns its free memory to the
// kernel when the process has become idle.
const (
	// returnInterval is the time between two looks at the heap.
	returnInterval = 10 * time.Second
	// idleBytes is the most that an idle process allocates in returnInterval. Collectors of metrics
	// and the status line allocate less.
	idleBytes = 2 << 20
	// worthBytes is what a process must have allocated since the last collection that it is worth
	// another one.
	worthBytes = 8 << 20
)

// ReturnMemory returns unused memory of the heap to the kernel whenever the process has become idle,
// within 20 seconds. It does not return. Call it once, in a goroutine of a process that serves mounts
// or clients.
func ReturnMemory() {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	var m memoryReturn
	for range time.Tick(returnInterval) {
		metrics.Read(sample)
		if m.due(sample[0].Value.Uint64()) {
			debug.FreeOSMemory()
		}
	}
}

// A memoryReturn decides when memory is returned. Both fields count bytes that the process has
// allocated since its start.
type memoryReturn struct {
	seen     uint64 // at the last look
	returned uint64 // at the last return
}

// due reports whether the process is idle and has much to return.
func (m *memoryReturn) due(allocated uint64) bool {
	idle := allocated-m.seen <= idleBytes
	m.seen = allocated
	if !idle || allocated-m.returned < worthBytes {
		return false
	}
	m.returned = allocated
	return true
}
