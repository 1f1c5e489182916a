package kit

import (
	"testing"
	"time"
)

// Timeout is how long tests wait for an event that must happen. No test depends on its value: it
// only ends a test that would hang.
const Timeout = 4 * time.Minute

// Must ends the test if err is not nil.
func Must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// Eventually waits until ok returns true. It ends the test after [Timeout]; the message
// names what.
func Eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for end := time.Now().Add(Timeout); !ok(); time.Sleep(pollInterval) {
		if time.Now().After(end) {
			tb.Fatalf("waited %v for %s", Timeout, what)
		}
	}
}

const pollInterval = 2 * time.Millisecond

// Succeeds waits until f returns nil. It ends the test after [Timeout], with what and the last
// error in the message.
func Succeeds(tb testing.TB, what string, f func() error) {
	tb.Helper()
	err := f()
	for end := time.Now().Add(Timeout); err != nil; err = f() {
		if time.Now().After(end) {
			tb.Fatalf("timeout: no %s: %v", what, err)
		}
		time.Sleep(pollInterval)
	}
}
