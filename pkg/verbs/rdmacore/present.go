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

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Built reports whether this program contains the provider.
const Built = true

// connectionDevice is the kernel's connection manager for programs.
const connectionDevice = "/dev/infiniband/rdma_cm"

var load = sync.OnceValue(func() error {
	const size = 512
	why := (*C.char)(C.calloc(1, size))
	defer C.free(unsafe.Pointer(why))
	if C.rc_load(why, size) == 0 {
		return nil
	}
	return missingLibrary(C.GoString(why))
})

// missingLibrary is the error of a library that could not be opened, for the loader's reason.
func missingLibrary(why string) error {
	return &UnavailableError{
		Reason: "the RDMA libraries cannot be opened",
		Err:    errors.New(why),
		Advice: "install the packages libibverbs1, librdmacm1 and ibverbs-providers (rdma-core), or use provider=softiwarp",
	}
}

// Available reports why RDMA devices cannot be used: an *UnavailableError, or nil. It opens the
// libraries, no device.
func Available() error {
	if err := load(); err != nil {
		return err
	}
	return openable(connectionDevice)
}

// openable reports why the kernel's connection manager cannot be used.
func openable(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrPermission):
		return &UnavailableError{Reason: "the kernel's RDMA connection manager may not be used", Err: err,
			Advice: "run as root, or give this user access to /dev/infiniband, or use provider=softiwarp"}
	case err != nil:
		return &UnavailableError{Reason: "the kernel has no RDMA connection manager for programs", Err: err,
			Advice: "load the modules rdma_ucm and ib_uverbs and that of the RDMA device, or use provider=softiwarp"}
	}
	return f.Close()
}

// Devices lists the RDMA devices of this machine. It opens each, and they stay open.
func Devices() ([]verbs.DeviceAttrs, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	cfg := Config{}.withDefaults()
	devices.mu.Lock()
	err := openAll(cfg.Logger)
	contexts := slices.Collect(maps.Keys(devices.all))
	devices.mu.Unlock()
	if err != nil {
		return nil, &UnavailableError{Reason: "the RDMA devices cannot be listed",
			Advice: "is there one (\"rdma link\")? Is ibverbs-providers installed?", Err: err}
	}
	var all []verbs.DeviceAttrs
	for _, ctx := range contexts {
		d, err := deviceOf(ctx, cfg)
		var gone *RemovedError
		switch {
		case errors.As(err, &gone):
		case err != nil:
			return all, err
		default:
			all = append(all, d.Attrs())
		}
	}
	slices.SortFunc(all, func(a, b verbs.DeviceAttrs) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// A provider uses the devices of the machine. All providers of a process share them.
type provider struct{ cfg Config }

// New makes a provider, or says with an *UnavailableError why there is none. No device is opened.
func New(cfg Config) (verbs.Provider, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	return &provider{cfg: cfg.withDefaults()}, nil
}

// Name returns "rdmacore".
func (p *provider) Name() string { return Name }

// errnoOf makes an error of what the shim returns, nil of 0.
func errnoOf(ret C.int) error {
	if ret >= 0 {
		return nil
	}
	return syscall.Errno(-ret)
}

// pinError explains why memory could not be registered.
func pinError(device string, n int, err error) error {
	if errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("rdmacore: register %d octets on %s: %w: %w: raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity, ulimit -l)", n, device, verbs.ErrNoResources, err)
	}
	return fmt.Errorf("rdmacore: register %d octets on %s: %w", n, device, err)
}

// waitable returns a descriptor for Go's poller that stands for fd, which from now on does not
// block.
func waitable(fd C.int, name string) (*os.File, error) {
	if err := syscall.SetNonblock(int(fd), true); err != nil {
		return nil, err
	}
	dup, err := syscall.Dup(int(fd))
	if err != nil {
		return nil, err
	}
	syscall.CloseOnExec(dup)
	return os.NewFile(uintptr(dup), name), nil
}
