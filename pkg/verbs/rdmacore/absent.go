//go:build !(rdmacore && cgo && linux)

package rdmacore

import "github.com/nfsrdmad/nfsrdmad/pkg/verbs"

// Built reports whether this program contains the provider.
const Built = false

// Available reports why RDMA devices cannot be used: an *UnavailableError, or nil.
func Available() error {
	return &UnavailableError{
		Reason: "this program was built without the rdma-core provider",
		Advice: "build it with cgo, the packages libibverbs-dev and librdmacm-dev, and -tags rdmacore (\"make build\" does so where they are there), or use provider=softiwarp",
	}
}

// Devices lists the RDMA devices of this machine.
func Devices() ([]verbs.DeviceAttrs, error) { return nil, Available() }

// New makes a provider, or says why there is none.
func New(Config) (verbs.Provider, error) { return nil, Available() }
