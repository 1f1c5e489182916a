//go:build rdmacore && cgo && linux

package rdmacore

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hashicorp/go-hclog"
)

const (
	// pollInterval is the interval at which pollDevices checks that the open devices still exist.
	pollInterval = time.Second
	// slowRemovalDelay is the time after which takeDown logs that a removal is not complete.
	slowRemovalDelay = 10 * time.Second
)

// A deviceContext is an RDMA device that librdmacm has opened in this process. librdmacm opens all
// devices when they are listed. It closes none before they are listed again, and then only those
// that it no longer finds. The hold on the context keeps it open until takeDown releases the hold.
//
//	┌──────┐ missing in sysfs, or removal event of the connection manager ┌──────┐ all objects destroyed ┌──────────┐
//	│ open │ ───────────────────────────────────────────────────────────▶ │ gone │ ────────────────────▶ │ detached │
//	└──────┘                                                              └──────┘                       └──────────┘
type deviceContext struct {
	c     *C.struct_ibv_context
	hold  **C.struct_ibv_context
	name  string
	path  string       // in sysfs; "" if unknown
	inode uint64       // of path
	log   hclog.Logger // of the first user; guarded by devices

	brokenOffsetCQ *C.struct_ibv_cq // only for siw; guarded by devices

	current *device   // for new connections; nil if there is none yet; guarded by devices
	devices []*device // all that may have objects of the context; guarded by devices

	removal sync.Once
	removed chan struct{} // closed when gone is set
	gone    atomic.Bool   // set with useMu held for writing
	// useMu is held for reading during calls that create objects of the context (see acquire).
	useMu sync.RWMutex
}

// devices holds the devices that are open in this process.
var devices struct {
	sync.Mutex
	all         map[*C.struct_ibv_context]*deviceContext
	polling     bool   // the timer of pollDevices is set
	lastRemoved string // name of the last removed device
	lastTime    time.Time
}

// openAll opens all devices of the machine. Caller holds the lock of devices.
func openAll(log hclog.Logger) error {
	var n C.int
	list := C.rc_devices(&n)
	if list == nil {
		return fmt.Errorf("rdmacore: open RDMA devices: %w", syscall.ENODEV)
	}
	defer C.free(unsafe.Pointer(list))
	for _, ctx := range unsafe.Slice(list, int(n)) {
		hold := C.rc_hold_context(ctx)
		if devices.all[ctx] != nil || C.rc_is_detached(ctx) != 0 {
			C.rc_release_hold(hold)
			continue
		}
		o := &deviceContext{c: ctx, hold: hold, name: C.GoString(C.rc_device_name(ctx)),
			path: C.GoString(C.rc_device_path(ctx)), log: log, removed: make(chan struct{})}
		var st syscall.Stat_t
		if syscall.Stat(o.path, &st) == nil {
			o.inode = st.Ino
		} else {
			o.path = ""
		}
		if devices.all == nil {
			devices.all = make(map[*C.struct_ibv_context]*deviceContext)
		}
		devices.all[ctx] = o
	}
	if !devices.polling && len(devices.all) > 0 {
		devices.polling = true
		time.AfterFunc(pollInterval, pollDevices)
	}
	return nil
}

// contextOf returns the deviceContext of a context of librdmacm. Caller holds the lock of devices.
func contextOf(ctx *C.struct_ibv_context, log hclog.Logger) (*deviceContext, error) {
	if C.rc_is_detached(ctx) != 0 {
		openAll(log) // makes librdmacm close the contexts of removed devices
		return nil, &RemovedError{Device: devices.lastRemoved}
	}
	if devices.all[ctx] == nil {
		if err := openAll(log); err != nil {
			return nil, err
		}
	}
	o := devices.all[ctx]
	switch {
	case o == nil:
		return nil, fmt.Errorf("rdmacore: find RDMA device %s: %w", C.GoString(C.rc_device_name(ctx)),
			syscall.ENODEV)
	case o.gone.Load():
		return nil, &RemovedError{Device: o.name}
	case !o.present():
		go o.remove(reasonMissing)
		return nil, &RemovedError{Device: o.name}
	}
	return o, nil
}

// pollDevices finds removed devices. A timer calls it every pollInterval. The kernel removes a soft
// device only after every program has closed it, and does not inform these programs.
func pollDevices() {
	devices.Lock()
	defer devices.Unlock()
	for _, o := range devices.all {
		if !o.gone.Load() && !o.present() {
			go o.remove(reasonMissing)
		}
	}
	devices.polling = len(devices.all) > 0
	if devices.polling {
		time.AfterFunc(pollInterval, pollDevices)
	}
}

// present reports whether the device is still at its place in sysfs.
func (o *deviceContext) present() bool {
	if o.path == "" {
		return true
	}
	var st syscall.Stat_t
	if err := syscall.Stat(o.path, &st); err != nil {
		return !errors.Is(err, syscall.ENOENT)
	}
	return st.Ino == o.inode // another inode is another device with the same name
}

// acquire begins a call that creates objects of the context. It returns an error if the device is
// removed. Otherwise the caller must call release after the call. acquire never waits, because only
// takeDown locks useMu for writing. The caller may therefore hold any lock.
func (o *deviceContext) acquire() error {
	if !o.useMu.TryRLock() {
		return &RemovedError{Device: o.name}
	}
	if o.gone.Load() {
		o.useMu.RUnlock()
		return &RemovedError{Device: o.name}
	}
	return nil
}

func (o *deviceContext) release() { o.useMu.RUnlock() }

// Reasons of a removal, for the log.
const (
	reasonMissing = "device is missing in sysfs"
	reasonEvent   = "removal event of the connection manager"
)

// remove destroys everything that this process has of a removed device, and closes the device. The
// removal of a soft device waits for that. Every wait of remove is bounded, except for a connection
// that the kernel is still making. Consumers keep empty objects, which they must still close. Only
// the first call has an effect.
func (o *deviceContext) remove(reason string) { o.removal.Do(func() { o.takeDown(reason) }) }

// takeDown is remove without the guard against a second call.
func (o *deviceContext) takeDown(reason string) {
	o.useMu.Lock()
	o.gone.Store(true)
	close(o.removed)
	o.useMu.Unlock()
	devices.Lock()
	log := o.log
	devices.Unlock()
	log.Warn("RDMA device was removed; ending its connections", "device", o.name, "reason", reason)
	slow := time.AfterFunc(slowRemovalDelay, func() {
		log.Warn("RDMA device was removed, and its removal waits for connections that the kernel is still making",
			"device", o.name)
	})
	defer slow.Stop()
	began := time.Now()
	devices.Lock()
	devices.lastRemoved, devices.lastTime = o.name, began
	values := slices.Clone(o.devices)
	devices.Unlock()

	var wg sync.WaitGroup
	for _, d := range values {
		for _, q := range snapshot(d, maps.Values(d.objects.qps)) {
			wg.Go(func() { q.takeDown(&RemovedError{Device: o.name}) })
		}
	}
	wg.Wait()
	// A queue pair of one value may use CQs and PDs of another, so this needs separate loops.
	for _, d := range values {
		for _, c := range snapshot(d, maps.Keys(d.objects.cqs)) {
			c.takeDown()
		}
	}
	for _, d := range values {
		d.regions.takeDown(d.log)
	}
	for _, d := range values {
		for _, p := range snapshot(d, maps.Keys(d.objects.pds)) {
			p.takeDown()
		}
		d.stopAsyncReader()
	}

	devices.Lock()
	defer devices.Unlock()
	o.releaseBrokenOffset()
	if err := errnoOf(C.rc_detach_context(o.c)); err != nil {
		log.Error("close removed RDMA device; its removal waits until this process ends",
			"device", o.name, "error", err)
	}
	C.rc_release_hold(o.hold) // librdmacm may close the context from now on
	delete(devices.all, o.c)
	log.Warn("RDMA device was released", "device", o.name, "after", time.Since(began).Round(time.Millisecond).String())
}

// removalHint adds the last removal of a device to an error that says that no device reaches the
// peer.
func removalHint(err error) error {
	devices.Lock()
	defer devices.Unlock()
	if devices.lastRemoved == "" || !errors.Is(err, syscall.ENODEV) {
		return err
	}
	return fmt.Errorf("%w; RDMA device %s was removed at %s", err, devices.lastRemoved,
		devices.lastTime.Format(time.TimeOnly))
}
