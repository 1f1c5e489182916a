package rdmacore

import (
	"fmt"

	"github.com/hashicorp/go-hclog"
)

// Name is the provider's name.
const Name = "rdmacore"

// Config is what a provider is made from. The zero value is ready for use.
type Config struct {
	// Device, if not empty, is the only device to be used, by the name that "rdma link" shows. A
	// route that goes through another one is an error.
	Device string
	// Logger gets what happens to devices and connections. nil: none.
	Logger hclog.Logger
}

// An UnavailableError says why this process cannot use RDMA devices, and what to do about it.
type UnavailableError struct {
	Reason string
	Advice string
	Err    error // may be nil
}

func (e *UnavailableError) Error() string {
	s := "rdmacore: " + e.Reason
	if e.Err != nil {
		s = fmt.Sprintf("%s: %v", s, e.Err)
	}
	return s + ": " + e.Advice
}

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }
