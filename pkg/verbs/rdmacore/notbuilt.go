//go:build !(rdmacore && cgo && linux)

package rdmacore

import "github.com/nfsrdmad/nfsrdmad/pkg/verbs"

// Built reports whether this program contains the provider.
const Built = false

// Available always returns an *UnavailableError, because this program was built without the
// provider.
func Available() error {
	return &UnavailableError{
		Reason: "program was built without the rdma-core provider",
		Advice: "install libibverbs-dev and librdmacm-dev and run \"make build\", " +
			"or build with cgo and -tags rdmacore, or use provider=softiwarp",
	}
}

// Devices always returns the error of Available.
func Devices() ([]verbs.DeviceAttrs, error) { return nil, Available() }

// New always returns the error of Available.
func New(Config) (verbs.Provider, error) { return nil, Available() }
