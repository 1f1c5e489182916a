package lab

import (
	"math"
	"sync"
	"time"
)

// counter reads the processor's time stamp counter, which the emulator hands through to its guests.
func counter() uint64

const (
	// tscSpan is what the counter is measured over. The two readings are some ten microseconds
	// wrong at worst, which no guest's clock notices.
	tscSpan = 50 * time.Millisecond
	// tscReadings is how many readings the one is chosen from that nothing came between.
	tscReadings = 20
)

// tscKHz is the counter's rate. A guest's kernel would measure it against an emulated timer, and on
// a busy host be wrong by any factor: its clock would run as many times too fast or too slow, and
// its timeouts with it.
var tscKHz = sync.OnceValue(func() int {
	begin, from := reading()
	time.Sleep(tscSpan)
	end, to := reading()
	return int(math.Round(float64(to-from) / end.Sub(begin).Seconds() / 1000))
})

// reading is a time and what the counter was then.
func reading() (at time.Time, count uint64) {
	best := time.Duration(math.MaxInt64)
	for range tscReadings {
		before := time.Now()
		c := counter()
		if took := time.Since(before); took < best {
			best, at, count = took, before.Add(took/2), c
		}
	}
	return at, count
}
