//go:build rdmacore && cgo && linux

package rdmacore

/*
#cgo CFLAGS: -Wall -Wextra
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Built reports whether this program contains the provider.
const Built = true

// connectionDevice is the kernel's connection manager for user programs.
const connectionDevice = "/dev/infiniband/rdma_cm"

// loadLibraries opens the libraries. Every call returns the result of the first one.
var loadLibraries = sync.OnceValue(func() error {
	const size = 512
	reason := (*C.char)(C.calloc(1, size))
	defer C.free(unsafe.Pointer(reason))
	if C.rc_load(reason, size) == 0 {
		return nil
	}
	return missingLibrary(C.GoString(reason))
})

// missingLibrary returns the error for a library that the loader could not open.
func missingLibrary(reason string) error {
	return &UnavailableError{
		Reason: "open RDMA libraries",
		Err:    errors.New(reason),
		Advice: "install libibverbs1, librdmacm1 and ibverbs-providers (rdma-core), or use provider=softiwarp",
	}
}

// Available returns nil if this process can use RDMA devices, and an *UnavailableError otherwise.
// It opens the libraries but no device.
func Available() error {
	if err := loadLibraries(); err != nil {
		return err
	}
	return checkConnectionManager(connectionDevice)
}

// checkConnectionManager returns an error if this process cannot use the kernel's connection
// manager.
func checkConnectionManager(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrPermission):
		return &UnavailableError{Reason: "no permission for the kernel's RDMA connection manager", Err: err,
			Advice: "run as root, give this user access to /dev/infiniband, or use provider=softiwarp"}
	case err != nil:
		return &UnavailableError{Reason: "the kernel's RDMA connection manager is missing", Err: err,
			Advice: "load rdma_ucm, ib_uverbs and the module of the RDMA device, or use provider=softiwarp"}
	}
	return f.Close()
}

// Devices returns the attributes of the RDMA devices of this machine, sorted by name. It opens each
// device, and they stay open.
func Devices() ([]verbs.DeviceAttrs, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	cfg := Config{}.withDefaults()
	devices.Lock()
	err := openAll(cfg.Logger)
	contexts := slices.Collect(maps.Keys(devices.all))
	devices.Unlock()
	if err != nil {
		return nil, &UnavailableError{Reason: "list RDMA devices", Err: err,
			Advice: "check that \"rdma link\" shows a device and that ibverbs-providers is installed"}
	}
	var all []verbs.DeviceAttrs
	for _, ctx := range contexts {
		d, err := deviceOf(ctx, cfg)
		var removed *RemovedError
		switch {
		case errors.As(err, &removed):
		case err != nil:
			return all, err
		default:
			all = append(all, d.Attrs())
		}
	}
	slices.SortFunc(all, func(a, b verbs.DeviceAttrs) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// A provider uses the RDMA devices of the machine. All providers of a process share them.
type provider struct{ cfg Config }

// New makes a provider. It returns an *UnavailableError if this process cannot use RDMA devices.
// New opens no device.
func New(cfg Config) (verbs.Provider, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	return &provider{cfg: cfg.withDefaults()}, nil
}

// Name returns "rdmacore".
func (p *provider) Name() string { return Name }

// withDefaults returns c with a logger.
func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return c
}

// errnoOf returns the error for a result of the shim, which is a negative errno or a success.
func errnoOf(ret C.int) error {
	if ret >= 0 {
		return nil
	}
	return syscall.Errno(-ret)
}

// registrationError returns the error for n bytes that could not be registered.
func registrationError(device string, n int, err error) error {
	if errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("rdmacore: register %d bytes on %s: %w: %w; "+
			"raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity, ulimit -l)", n, device, verbs.ErrNoResources, err)
	}
	return fmt.Errorf("rdmacore: register %d bytes on %s: %w", n, device, err)
}

// pollableFile sets fd to non-blocking mode and returns a duplicate of it for Go's poller.
func pollableFile(fd C.int, name string) (*os.File, error) {
	if err := syscall.SetNonblock(int(fd), true); err != nil {
		return nil, err
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(dup), name), nil
}
