//go:build !(rdmacore && cgo && linux)

package rdmacore

import (
	"errors"
	"strings"
	"testing"
)

// TestNotBuiltErrorNamesBuildSteps checks that the error of a program without the provider names
// the packages and the build tag.
func TestNotBuiltErrorNamesBuildSteps(t *testing.T) {
	_, err := New(Config{})
	var u *UnavailableError
	if !errors.As(err, &u) || !strings.Contains(err.Error(), "libibverbs-dev") ||
		!strings.Contains(err.Error(), "-tags rdmacore") {
		t.Errorf("New: got error %v, want an *UnavailableError that names libibverbs-dev and -tags rdmacore", err)
	}
	if _, err := Devices(); !errors.As(err, &u) {
		t.Errorf("Devices: got error %v, want an *UnavailableError", err)
	}
	if Built {
		t.Error("Built: got true, want false")
	}
}
