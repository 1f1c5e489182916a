package xprt

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A pinningDevice must pin memory before a FastReg can use it, as a device with memory windows.
// After failures attempts to pin memory have failed, the next one succeeds.
type pinningDevice struct {
	failures atomic.Int64
	pinned   atomic.Bool
}

func (d *pinningDevice) pin() error {
	if d.failures.Add(-1) >= 0 {
		return fmt.Errorf("pin memory: %w", syscall.ENOMEM)
	}
	d.pinned.Store(true)
	return nil
}

func (d *pinningDevice) hooks() qpHooks {
	return qpHooks{post: func(first *verbs.WorkRequest, _ int) (int, error) {
		if first.Opcode == verbs.OpFastReg && !d.pinned.Load() {
			return 0, d.pin()
		}
		return 0, nil
	}}
}

func pinning(failures int64) (*pinningDevice, *hookedProvider) {
	d := &pinningDevice{}
	d.failures.Store(failures)
	return d, hooked(&hookedProvider{open: d.hooks, prepare: func([]byte) error { return d.pin() }})
}

// TestMemoryThatCannotBePinnedDelaysOneCall has a device that cannot pin the memory of a call at
// first. The call must be retried later. The connection and the other calls must not be affected.
func TestMemoryThatCannotBePinnedDelaysOneCall(t *testing.T) {
	const failures = 4
	for _, withFaults := range []bool{false, true} {
		d, p := pinning(failures)
		tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) {
			if c.Provider = p; withFaults {
				c.Provider = faults.New(p, faulty(t, "").Plan(), nil)
			}
		})
		buf := make([]byte, 100000)
		ended := make(chan error, 1)
		go func() {
			var r nfs3.ReadResult
			ended <- nfs3.NewClient(tr).Read(testContext(t), noCred, testFH(t), 3, buf, &r)
		}()
		kit.Eventually(t, "failed attempt to pin memory", func() bool { return d.failures.Load() < failures })
		if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Errorf("call without memory to pin: %v", err)
		}
		if err := <-ended; err != nil || !bytes.Equal(buf, fill(3, len(buf))) {
			t.Errorf("READ: got %v, or wrong data", err)
		}
		s := tr.Stats()
		if s.Connects != 1 || s.Timeouts != 0 || s.FailedMarshal != failures || s.MapErrors != failures ||
			s.MRsFree != s.MRsTotal {
			t.Errorf("with faults %v: got %d connects, %d timeouts, %d failed marshals, %d map errors, "+
				"%d of %d MRs free; want 1, 0, %d, %d, all", withFaults, s.Connects, s.Timeouts, s.FailedMarshal,
				s.MapErrors, s.MRsFree, s.MRsTotal, failures, failures)
		}
	}
}

// TestFailedMarshalReleasesMRs has a call with two chunks. Memory is short for the second one. The
// call must give the MRs of the first one back and be retried (docs/features.md S19).
func TestFailedMarshalReleasesMRs(t *testing.T) {
	var attempts atomic.Int64
	p := hooked(&hookedProvider{prepare: func([]byte) error {
		if attempts.Add(1) == 2 {
			return syscall.ENOMEM
		}
		return nil
	}})
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) { c.Provider = p })
	m := echo(1, fill(3, 100000), 100000)
	if err := tr.Call(testContext(t), m); err != nil || !bytes.Equal(m.Result, m.Args) {
		t.Errorf("Call: got %v, or wrong data", err)
	}
	s := tr.Stats()
	if s.FailedMarshal != 1 || s.MRsAllocated != 2 || s.MRsFree != 2 || s.LocalInvNeeded != 2 {
		t.Errorf("got %d failed marshals, %d MRs, %d of them free, %d LOCAL_INVs; want 1, 2, 2, 2", s.FailedMarshal,
			s.MRsAllocated, s.MRsFree, s.LocalInvNeeded)
	}
}
