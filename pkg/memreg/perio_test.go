package memreg

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// usePD is the protection domain of a device that registers memory for each use.
type usePD struct {
	fakePD
	next       uint32
	registered int
	failReg    error
	failUnreg  error
}

type useMR struct {
	fakeMR
	pd  *usePD
	mem []byte
}

func (p *usePD) AllocMR(int) (verbs.MR, error) {
	m, err := p.fakePD.AllocMR(1)
	if err != nil {
		return nil, err
	}
	return &useMR{fakeMR: *m.(*fakeMR), pd: p}, nil
}

func (m *useMR) RKey() verbs.RKey { return m.key }

func (m *useMR) Register(_ verbs.Access, seg []byte) (verbs.RKey, error) {
	if m.pd.failReg != nil {
		return 0, m.pd.failReg
	}
	if m.mem != nil {
		return 0, errors.New("registered twice")
	}
	m.pd.next += 0x1357 // a key that no consumer would choose
	m.pd.registered++
	m.key, m.mem = verbs.RKey(m.pd.next), seg
	return m.key, nil
}

func (m *useMR) Unregister() error {
	if m.pd.failUnreg != nil {
		return m.pd.failUnreg
	}
	if m.mem != nil {
		m.pd.registered--
		m.mem = nil
	}
	return nil
}

func (m *useMR) Dereg() error {
	if err := m.Unregister(); err != nil {
		return err
	}
	return m.fakeMR.Dereg()
}

var perIOParams = Params{Depth: 257, PageSize: 4096, OnePiece: true, PerIO: true, ArenasOnly: true, MaxSegs: 4}

// TestPerIO: the key of the device is in the segment before anything is posted, and what is not
// posted is invalid again.
func TestPerIO(t *testing.T) {
	var stats Counters
	pd := &usePD{}
	pool := NewPool(pd, perIOParams, &stats, Hooks{})
	defer pool.Destroy()
	var l List
	l.Use(pool)
	mem := pages(t, 4)
	// Two that touch are one piece; the third is another, though a page list could have taken it.
	n, err := l.Map([][]byte{mem[:4096], mem[4096:8192], mem[12288:]}, true, 7)
	if err != nil || n != 2 || pd.registered != 2 {
		t.Fatalf("%d MRs, %d registered, %v; want 2 of each", n, pd.registered, err)
	}
	for i, m := range l.Registered() {
		v := m.vmr.(*useMR)
		if m.Handle() != uint32(v.key) || m.reg.NewKey != v.key.Key() {
			t.Errorf("MR %d: handle %#x, the device's key is %#x", i, m.Handle(), v.key)
		}
		if m.Offset() != uint64(uintptr(unsafe.Pointer(&v.mem[0]))) || int(m.Length()) != len(v.mem) {
			t.Errorf("MR %d: %d octets at %#x registered as %d", i, m.Length(), m.Offset(), len(v.mem))
		}
	}
	l.Unmap()
	if pd.registered != 0 || len(l.free) != 2 {
		t.Errorf("after Unmap %d are registered, %d free", pd.registered, len(l.free))
	}
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
}

// TestPerIOFailures: a registration that fails leaves nothing registered; one that cannot be undone
// is destroyed, or taints the pool.
func TestPerIOFailures(t *testing.T) {
	var stats Counters
	pd := &usePD{}
	pool := NewPool(pd, perIOParams, &stats, Hooks{})
	var l List
	l.Use(pool)
	mem := pages(t, 4)
	pd.failReg = errors.New("no memory can be pinned")
	if _, err := l.Map([][]byte{mem}, false, 1); !errors.Is(err, pd.failReg) {
		t.Errorf("map: %v", err)
	}
	pd.failReg = nil
	if len(l.free) != 1 || len(l.Registered()) != 0 || stats.MapErrors.Load() != 1 {
		t.Errorf("%d free, %d registered, %d map errors; want 1, 0, 1", len(l.free), len(l.Registered()),
			stats.MapErrors.Load())
	}
	if err := pool.Check(); err != nil {
		t.Error(err)
	}
	if _, err := l.Map([][]byte{mem}, false, 2); err != nil {
		t.Fatal(err)
	}
	pd.failUnreg = errors.New("busy")
	l.Unmap()
	if len(l.free) != 0 || stats.Orphaned.Load() != 1 {
		t.Errorf("%d free, %d orphaned; want 0, 1", len(l.free), stats.Orphaned.Load())
	}
	if pool.Recover() {
		t.Error("a pool whose memory may still be reached is usable")
	}
	pd.failUnreg = nil
	pool.Destroy()
}

// TestForeignMemory: what the device cannot reach is refused before anything is registered.
func TestForeignMemory(t *testing.T) {
	var stats Counters
	pool := NewPool(&usePD{}, perIOParams, &stats, Hooks{})
	defer pool.Destroy()
	var l List
	l.Use(pool)
	if _, err := l.Map([][]byte{pages(t, 1), make([]byte, 100)}, true, 1); !errors.Is(err, ErrForeignMemory) {
		t.Errorf("map memory of the Go heap: %v, want ErrForeignMemory", err)
	}
}
