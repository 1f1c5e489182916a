package rdmacore

import (
	"fmt"

	"github.com/hashicorp/go-hclog"
)

// Name is the provider's name.
const Name = "rdmacore"

// Config configures a provider. The zero value is ready for use.
type Config struct {
	// Device is the name of the only RDMA device to use, as "rdma link" shows it. A connection
	// whose route uses another device then fails. If Device is empty, every device may be used.
	Device string
	// Logger gets the events of devices and connections. nil means no log.
	Logger hclog.Logger
}

// An UnavailableError reports why this process cannot use RDMA devices. Advice says what to do
// about it, as an imperative.
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
	return s + "; " + e.Advice
}

// Unwrap returns the cause, or nil.
func (e *UnavailableError) Unwrap() error { return e.Err }
