package memreg

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A perIOPD is the protection domain of a device that registers memory for each use.
type perIOPD struct {
	fakePD
	nextKey       uint32
	registered    int
	access        verbs.Access // of the last registration
	registerErr   error
	unregisterErr error
	failOnce      *byte // the first Unregister of this memory fails
}

var errUnregister = errors.New("device is busy")

type perIOMR struct {
	fakeMR
	pd  *perIOPD
	mem []byte
}

func (p *perIOPD) AllocMR(int) (verbs.MR, error) {
	m, err := p.fakePD.AllocMR(1)
	if err != nil {
		return nil, err
	}
	return &perIOMR{fakeMR: *m.(*fakeMR), pd: p}, nil
}

func (m *perIOMR) RKey() verbs.RKey { return m.key }

func (m *perIOMR) Register(access verbs.Access, seg []byte) (verbs.RKey, error) {
	if m.pd.registerErr != nil {
		return 0, m.pd.registerErr
	}
	if m.mem != nil {
		return 0, errors.New("registered twice")
	}
	m.pd.nextKey += 0x1357 // not a key that memreg chooses
	m.pd.registered++
	m.pd.access = access
	m.key, m.mem = verbs.RKey(m.pd.nextKey), seg
	return m.key, nil
}

func (m *perIOMR) Unregister() error {
	if m.pd.unregisterErr != nil {
		return m.pd.unregisterErr
	}
	if m.mem != nil && m.pd.failOnce == unsafe.SliceData(m.mem) {
		m.pd.failOnce = nil
		return errUnregister
	}
	if m.mem != nil {
		m.pd.registered--
		m.mem = nil
	}
	return nil
}

func (m *perIOMR) Dereg() error {
	if err := m.Unregister(); err != nil {
		return err
	}
	return m.fakeMR.Dereg()
}

var perIOParams = Params{Depth: 257, PageSize: 4096, Contiguous: true, PerIO: true, ArenasOnly: true, MaxSegs: 4}

// TestMapRegistersPerIO checks that Map returns the keys of the device, and that Unmap invalidates
// them.
func TestMapRegistersPerIO(t *testing.T) {
	var stats Counters
	pd := &perIOPD{}
	pool := NewPool(pd, perIOParams, &stats, Hooks{})
	defer pool.Destroy()
	var l List
	l.Use(pool)
	mem := pages(t, 4)
	// The first two segments are adjacent. The third needs its own MR, although a page list could
	// hold it.
	n, err := l.Map([][]byte{mem[:4096], mem[4096:8192], mem[12288:]}, true, 7)
	if err != nil || n != 2 || pd.registered != 2 {
		t.Fatalf("Map: got %d MRs, %d registered, %v; want 2, 2", n, pd.registered, err)
	}
	for i, m := range l.Registered() {
		v := m.vmr.(*perIOMR)
		if m.Handle() != uint32(v.key) || m.reg.NewKey != v.key.Key() {
			t.Errorf("handle of MR %d: got %#x, want %#x, the key of the device", i, m.Handle(), v.key)
		}
		if m.Offset() != uint64(uintptr(unsafe.Pointer(&v.mem[0]))) || int(m.Length()) != len(v.mem) {
			t.Errorf("MR %d: got %d bytes at %#x, want %d bytes at %p", i, m.Length(), m.Offset(), len(v.mem),
				&v.mem[0])
		}
	}
	l.Unmap()
	if pd.registered != 0 || len(l.free.mrs) != 2 {
		t.Errorf("after Unmap: got %d registered, %d free; want 0, 2", pd.registered, len(l.free.mrs))
	}
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
}

// TestPerIOFailures checks that a failed registration leaves nothing registered, and that a pool
// with an MR that cannot be destroyed is not usable.
func TestPerIOFailures(t *testing.T) {
	var stats Counters
	pd := &perIOPD{}
	pool := NewPool(pd, perIOParams, &stats, Hooks{})
	var l List
	l.Use(pool)
	mem := pages(t, 4)
	pd.registerErr = errors.New("cannot pin memory")
	if _, err := l.Map([][]byte{mem}, false, 1); !errors.Is(err, pd.registerErr) {
		t.Errorf("Map: got %v, want %v", err, pd.registerErr)
	}
	pd.registerErr = nil
	if len(l.free.mrs) != 1 || len(l.Registered()) != 0 || stats.MapErrors.Load() != 1 {
		t.Errorf("got %d free, %d registered, %d map errors; want 1, 0, 1", len(l.free.mrs), len(l.Registered()),
			stats.MapErrors.Load())
	}
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
	if _, err := l.Map([][]byte{mem}, false, 2); err != nil {
		t.Fatal(err)
	}
	pd.unregisterErr = errors.New("busy")
	if err := l.Unmap(); !errors.Is(err, pd.unregisterErr) {
		t.Errorf("Unmap: got %v, want %v", err, pd.unregisterErr)
	}
	if err := l.Unmap(); err != nil {
		t.Errorf("second Unmap: got %v, want nil", err)
	}
	if len(l.free.mrs) != 0 || stats.MRsOrphaned.Load() != 1 {
		t.Errorf("got %d free, %d orphaned; want 0, 1", len(l.free.mrs), stats.MRsOrphaned.Load())
	}
	if pool.Recover() {
		t.Error("Recover: got a usable pool, want an unusable one: an MR may still be registered")
	}
	pd.unregisterErr = nil
	pool.Destroy()
}

// TestUnmapReportsFailedUnregister has an MR that cannot be unregistered, after a Map that failed
// and after one that did not. Unmap must report it, and all other MRs must become free.
func TestUnmapReportsFailedUnregister(t *testing.T) {
	mem := pages(t, 10)
	for _, failedMap := range []bool{true, false} {
		var stats Counters
		pd := &perIOPD{}
		pool := NewPool(pd, perIOParams, &stats, Hooks{})
		var l List
		l.Use(pool)
		var segs [][]byte
		for i := range perIOParams.MaxSegs {
			segs = append(segs, mem[i*8192:i*8192+4096])
		}
		wantErr := error(nil)
		if failedMap {
			segs, wantErr = append(segs, mem[len(segs)*8192:]), ErrTooManySegments
		}
		pd.failOnce = &segs[1][0]
		if _, err := l.Map(segs, true, 1); !errors.Is(err, wantErr) {
			t.Fatalf("Map: got %v, want %v", err, wantErr)
		}
		if err := l.Unmap(); !errors.Is(err, errUnregister) {
			t.Errorf("failed Map %v: Unmap: got %v, want %v", failedMap, err, errUnregister)
		}
		if pd.registered != 0 || len(l.free.mrs) != 3 || stats.MRsRecycled.Load() != 1 || len(l.Registered()) != 0 {
			t.Errorf("failed Map %v: got %d keys, %d free, %d recycled, %d registered; want 0, 3, 1, 0", failedMap,
				pd.registered, len(l.free.mrs), stats.MRsRecycled.Load(), len(l.Registered()))
		}
		if err := l.Unmap(); err != nil {
			t.Errorf("failed Map %v: second Unmap: got %v, want nil", failedMap, err)
		}
		if err := pool.Check(); err != nil {
			t.Error(err)
		}
		pool.Destroy()
	}
}

func TestMapRejectsForeignMemory(t *testing.T) {
	var stats Counters
	pool := NewPool(&perIOPD{}, perIOParams, &stats, Hooks{})
	defer pool.Destroy()
	var l List
	l.Use(pool)
	if _, err := l.Map([][]byte{pages(t, 1), make([]byte, 100)}, true, 1); !errors.Is(err, ErrForeignMemory) {
		t.Errorf("Map of Go heap memory: got %v, want ErrForeignMemory", err)
	}
}
