//go:build !(rdmacore && cgo && linux)

package rdmacore

import (
	"errors"
	"strings"
	"testing"
)

// TestAbsent: a program without the provider says what to do to get it.
func TestAbsent(t *testing.T) {
	_, err := New(Config{})
	var u *UnavailableError
	if !errors.As(err, &u) || !strings.Contains(err.Error(), "libibverbs-dev") ||
		!strings.Contains(err.Error(), "-tags rdmacore") {
		t.Errorf("%v", err)
	}
	if _, err := Devices(); !errors.As(err, &u) {
		t.Errorf("devices: %v", err)
	}
	if Built {
		t.Error("built")
	}
}
