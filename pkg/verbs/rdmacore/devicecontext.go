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
	// pollInterval is how often it is looked whether the devices that are open are still there.
	pollInterval = time.Second
	// slowRelease is after how long it is said that a removed device is still in use here.
	slowRelease = 10 * time.Second
)

// A deviceContext is an RDMA device that librdmacm has opened in this process: it opens all when
// they are listed, and by itself closes none before it is listed again, if then. Each is held, so
// that only takeDown decides when the context goes.
//
//	┌──────┐ its place in sysfs is gone, or the connection manager says so ┌──────┐ nothing of it is left ┌─────────┐
//	│ open │ ────────────────────────────────────────────────────────────▶ │ gone │ ────────────────────▶ │ cut off │
//	└──────┘                                                               └──────┘                       └─────────┘
type deviceContext struct {
	c     *C.struct_ibv_context
	hold  **C.struct_ibv_context
	name  string
	path  string       // in sysfs, "" where there is none
	inode uint64       // of path
	log   hclog.Logger // of the first who used it; guarded by devices.mu

	brokenOffsetCQ *C.struct_ibv_cq // of siw; guarded by devices.mu

	current *device   // for new connections, nil: none yet; guarded by devices.mu
	values  []*device // all that may have something of the context; guarded by devices.mu

	removal sync.Once
	removed chan struct{} // closed when gone is set
	gone    atomic.Bool   // set with life held for writing
	// held for reading around calls that make something of the context: see use
	life sync.RWMutex
}

// devices are all that are open in this process.
var devices struct {
	mu      sync.Mutex
	all     map[*C.struct_ibv_context]*deviceContext // guarded by mu, as all below
	polling bool                                     // a timer runs
	// what the last removed one was called, and
	lastRemoved string
	lastTime    time.Time
}

// openAll opens the devices that there are. Caller holds devices.mu.
func openAll(log hclog.Logger) error {
	var n C.int
	list := C.rc_devices(&n)
	if list == nil {
		return fmt.Errorf("rdmacore: open the RDMA devices of this machine: %w", syscall.ENODEV)
	}
	defer C.free(unsafe.Pointer(list))
	for _, ctx := range unsafe.Slice(list, int(n)) {
		hold := C.rc_hold_of(ctx)
		if devices.all[ctx] != nil || C.rc_is_cut_off(ctx) != 0 {
			C.rc_let_go(hold)
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

// contextOf is the deviceContext of a context that librdmacm gave. Caller holds devices.mu.
func contextOf(ctx *C.struct_ibv_context, log hclog.Logger) (*deviceContext, error) {
	if C.rc_is_cut_off(ctx) != 0 {
		openAll(log) // librdmacm lets go of what it does not find any more
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
		return nil, fmt.Errorf("rdmacore: RDMA device %s disappeared: %w", C.GoString(C.rc_device_name(ctx)),
			syscall.ENODEV)
	case o.gone.Load():
		return nil, &RemovedError{Device: o.name}
	case !o.present():
		go o.remove(reasonMissing)
		return nil, &RemovedError{Device: o.name}
	}
	return o, nil
}

// pollDevices is the timer's: a kernel that removes a soft device waits for the programs that have
// it open, and tells them nothing.
func pollDevices() {
	devices.mu.Lock()
	defer devices.mu.Unlock()
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

// present reports whether the device is where it was.
func (o *deviceContext) present() bool {
	if o.path == "" {
		return true
	}
	var st syscall.Stat_t
	if err := syscall.Stat(o.path, &st); err != nil {
		return !errors.Is(err, syscall.ENOENT)
	}
	return st.Ino == o.inode // else another has its place
}

// use begins a call that makes something of the context, unless the device is gone; done ends it.
// It never waits: only takeDown locks life for writing, so whoever calls may hold any lock.
func (o *deviceContext) use() error {
	if !o.life.TryRLock() {
		return &RemovedError{Device: o.name}
	}
	if o.gone.Load() {
		o.life.RUnlock()
		return &RemovedError{Device: o.name}
	}
	return nil
}

func (o *deviceContext) done() { o.life.RUnlock() }

// How the removal of a device was learned of.
const (
	reasonMissing = "it is not where it was in sysfs"
	reasonEvent   = "the connection manager said so"
)

// remove takes everything down that this process has of a device that goes away, and gives the
// kernel back what it has open of it, which a soft device's removal waits for. Every wait of it
// ends: queue pairs are destroyed with what is posted on them, but for one that the kernel is just
// connecting. What consumers have of it are empty shells then, for them to close.
func (o *deviceContext) remove(why string) { o.removal.Do(func() { o.takeDown(why) }) }

func (o *deviceContext) takeDown(why string) {
	o.life.Lock()
	o.gone.Store(true)
	close(o.removed)
	o.life.Unlock()
	devices.mu.Lock()
	log := o.log
	devices.mu.Unlock()
	log.Warn("RDMA device was removed: its connections end", "device", o.name, "reason", why)
	slow := time.AfterFunc(slowRelease, func() {
		log.Warn("RDMA device was removed, and its removal waits for connections that the kernel is still making",
			"device", o.name)
	})
	defer slow.Stop()
	began := time.Now()
	devices.mu.Lock()
	devices.lastRemoved, devices.lastTime = o.name, began
	values := slices.Clone(o.values)
	devices.mu.Unlock()

	var wg sync.WaitGroup
	for _, d := range values {
		for _, q := range collect(d, maps.Values(d.qps)) {
			wg.Go(func() { q.takeDown(&RemovedError{Device: o.name}) })
		}
	}
	wg.Wait()
	for _, d := range values { // a queue pair of one may use what another has
		for _, c := range collect(d, maps.Keys(d.cqs)) {
			c.takeDown()
		}
	}
	for _, d := range values {
		d.regions.takeDown(d.log)
	}
	for _, d := range values {
		for _, p := range collect(d, maps.Keys(d.pds)) {
			p.takeDown()
		}
		d.unwatch()
	}

	devices.mu.Lock()
	defer devices.mu.Unlock()
	o.releaseBrokenOffset()
	if err := errnoOf(C.rc_cut_off(o.c)); err != nil {
		log.Error("RDMA device was removed, and could not be closed: its removal waits until this process ends",
			"device", o.name, "error", err)
	}
	C.rc_let_go(o.hold) // librdmacm closes the context when it misses the device, which may be now
	delete(devices.all, o.c)
	log.Warn("RDMA device was released", "device", o.name, "after", time.Since(began).Round(time.Millisecond).String())
}

// removalHint tells of a device that was removed, after an error that says that no device leads to
// a peer.
func removalHint(err error) error {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if devices.lastRemoved == "" || !errors.Is(err, syscall.ENODEV) {
		return err
	}
	return fmt.Errorf("%w: RDMA device %s was removed at %s", err, devices.lastRemoved,
		devices.lastTime.Format(time.TimeOnly))
}
