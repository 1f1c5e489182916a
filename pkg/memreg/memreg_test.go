package memreg

import (
	"errors"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// device returns the attributes of an imaginary device that exceeds all requirements.
func device(change func(*verbs.DeviceAttrs)) verbs.DeviceAttrs {
	a := verbs.DeviceAttrs{
		Name: "test0", Caps: verbs.CapFastReg | verbs.CapRegisterAny, PageSize: 4096, MaxFastRegPageListLen: 512,
		MaxQPWR: 32768, MaxCQE: 65536, MaxMR: 65536, MaxSendSGE: 6, MaxRecvSGE: 6, MaxSGERd: 1,
	}
	if change != nil {
		change(&a)
	}
	return a
}

// params returns the parameters that Query derives from the depth of an MR, the slots, the work
// requests of one RPC, and the MRs of one chunk.
func params(depth, slots, perRPC, segs int) Params {
	return Params{Depth: depth, PageSize: 4096, Slots: slots, SendWRs: slots*perRPC + 33, WRsPerRPC: perRPC,
		RecvWRs: slots + 40, SendSGEs: 6, MaxSegs: segs, MaxPayload: 1 << 20}
}

func TestQuery(t *testing.T) {
	type attrs = verbs.DeviceAttrs
	caps := func(c verbs.Caps) func(*attrs) { return func(a *attrs) { a.Caps = verbs.CapFastReg | c } }
	pageList := func(n int) func(*attrs) { return func(a *attrs) { a.MaxFastRegPageListLen = n } }
	sendQueue := func(n int) func(*attrs) { return func(a *attrs) { a.MaxQPWR = n } }
	completions := func(n int) func(*attrs) { return func(a *attrs) { a.MaxCQE = n } }
	readSGEs := func(pages, sges int) func(*attrs) {
		return func(a *attrs) { a.MaxFastRegPageListLen, a.MaxSGERd = pages, sges }
	}
	pageSize := func(n int) func(*attrs) { return func(a *attrs) { a.PageSize = n } }
	anyGaps := func(a *attrs) {
		a.Caps |= verbs.CapGaps | verbs.CapChosenIOVA
		a.MaxSendSGE = 64
	}
	// The pad takes one MR, and two chunks of 260 pages take ten.
	fewMRsOf := func(depth, n int) func(*attrs) {
		return func(a *attrs) { a.MaxFastRegPageListLen, a.MaxMR = depth, n }
	}
	fewMRs := func(n int) func(*attrs) { return fewMRsOf(64, n) }
	withGaps := params(257, 4, 7, 3)
	withGaps.Gaps, withGaps.ChosenIOVA, withGaps.SendSGEs = true, true, 19
	threeSGEs := params(257, 128, 7, 3)
	threeSGEs.SendSGEs = 3
	windows := params(257, 128, 7, 3)
	windows.Contiguous, windows.ArenasOnly = true, true
	perIO := windows
	perIO.PerIO = true
	cases := []struct {
		name   string
		change func(*attrs)
		slots  int
		errno  syscall.Errno
		want   Params
	}{
		{"deep MRs: one per payload", nil, 128, 0, params(257, 128, 7, 3)},
		{"depth 256 needs one more", pageList(256), 64, 0, params(256, 64, 9, 4)},
		{"depth 64", pageList(64), 64, 0, params(64, 64, 15, 7)},
		{"read-SGE quirk", readSGEs(512, 32), 64, 0, params(32, 64, 7+2*8, 11)},
		{"read-SGE quirk does not exceed the page list", readSGEs(64, 128), 64, 0, params(64, 64, 15, 7)},
		{"16 read SGEs are no quirk", readSGEs(64, 16), 64, 0, params(64, 64, 15, 7)},
		{"smallest depth", pageList(17), 64, 0, params(17, 64, 7+2*15, 16)},
		{"gaps and chosen address", anyGaps, 4, 0, withGaps},
		{"small send queue limits the slots", sendQueue(33 + 10*7 + 6), 128, 0, params(257, 10, 7, 3)},
		{"small completion queue limits the slots", completions(33 + 40 + 10*8 + 7), 128, 0, params(257, 10, 7, 3)},
		{"few MRs limit the slots", fewMRs(1 + 10*11), 64, 0, params(64, 11, 15, 7)},
		{"depth that divides the pages of a chunk", fewMRsOf(65, 1+10*8), 64, 0, params(65, 10, 13, 6)},
		{"the pad counts", fewMRs(10 * 11), 64, 0, params(64, 10, 15, 7)},
		{"memory windows", caps(verbs.CapMemWindow2B), 128, 0, windows},
		{"registration for each use", caps(verbs.CapPerIOReg), 128, 0, perIO},
		{"no fast registration", func(a *attrs) { a.Caps = 0 }, 128, syscall.EINVAL, Params{}},
		{"no page list", pageList(0), 128, syscall.EINVAL, Params{}},
		{"negative page list", pageList(-1), 128, syscall.EINVAL, Params{}},
		{"no page size", pageSize(0), 128, syscall.EINVAL, Params{}},
		{"negative page size", pageSize(-4096), 128, syscall.EINVAL, Params{}},
		{"page size is no power of two", pageSize(5000), 128, syscall.EINVAL, Params{}},
		{"three send SGEs", func(a *attrs) { a.MaxSendSGE = 3 }, 128, 0, threeSGEs},
		{"two send SGEs", func(a *attrs) { a.MaxSendSGE = 2 }, 128, syscall.ENOMEM, Params{}},
		{"queue for 4 RPCs", sendQueue(33 + 4*7), 128, 0, params(257, 4, 7, 3)},
		{"queue too small for 4 RPCs", sendQueue(33 + 4*7 - 1), 128, syscall.ENOMEM, Params{}},
		{"queue smaller than the reserve", sendQueue(16), 128, syscall.ENOMEM, Params{}},
		{"completion queue too small for 4 RPCs", completions(33 + 40 + 4*8 - 1), 128, syscall.ENOMEM, Params{}},
		{"MRs for 3 RPCs", func(a *attrs) { a.MaxMR = 4 * 4 }, 128, syscall.ENOMEM, Params{}},
		{"16 MRs do not hold a payload", pageList(16), 128, syscall.ENOMEM, Params{}},
		{"16 MRs do not hold a payload, many read SGEs", readSGEs(16, 32), 128, syscall.ENOMEM, Params{}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := Query(device(c.change), c.slots)
			if c.errno != 0 {
				if !errors.Is(err, c.errno) {
					t.Fatalf("Query: got error %v, want %v", err, c.errno)
				}
				return
			}
			if err != nil || got != c.want {
				t.Errorf("Query:\n got %+v, %v\nwant %+v", got, err, c.want)
			}
		})
	}
}

// TestQueryReasons checks that an error says what the device reports and what is needed.
func TestQueryReasons(t *testing.T) {
	for _, c := range []struct {
		change func(*verbs.DeviceAttrs)
		want   string
	}{
		{func(a *verbs.DeviceAttrs) { a.PageSize = 0 }, "page size of 0 bytes, want a power of two"},
		{func(a *verbs.DeviceAttrs) { a.MaxFastRegPageListLen = -1 }, "no fast memory registration"},
		{func(a *verbs.DeviceAttrs) { a.MaxSendSGE = 2 }, "a Send takes 2 SGEs, want at least 3"},
		{func(a *verbs.DeviceAttrs) { a.MaxFastRegPageListLen, a.MaxSGERd = 16, 32 },
			"page list of 16 pages and 32 SGEs in an RDMA Read allow MRs of 16 pages, want at least 17"},
		{func(a *verbs.DeviceAttrs) { a.MaxQPWR = 60 },
			"send queue of 60 work requests has room for 3 RPCs of 7 each, want at least 4"},
		{func(a *verbs.DeviceAttrs) { a.MaxMR = 16 },
			"device of 16 MRs has room for 3 RPCs of 4 each, want at least 4"},
	} {
		_, err := Query(device(c.change), 128)
		want := "RDMA device test0 does not support NFS: " + c.want + "; choose another with device= or provider="
		if err == nil || err.Error() != want {
			t.Errorf("Query:\n got %v\nwant %s", err, want)
		}
	}
}

// A fakePD allocates MRs that do nothing. It serves tests of layout, keys and states.
type fakePD struct {
	index    uint32
	reuse    bool     // the next MR has the index of the last destroyed one
	free     []uint32 // indexes of destroyed MRs
	allocErr error
	deregErr error
	present  int // MRs that are not deregistered
}

type fakeMR struct {
	pd  *fakePD
	key verbs.RKey
}

func (p *fakePD) AllocMR(int) (verbs.MR, error) {
	if p.allocErr != nil {
		return nil, p.allocErr
	}
	p.present++
	if n := len(p.free); p.reuse && n > 0 {
		index := p.free[n-1]
		p.free = p.free[:n-1]
		return &fakeMR{p, verbs.RKey(index << 8)}, nil
	}
	p.index++
	return &fakeMR{p, verbs.RKey(p.index << 8)}, nil
}
func (p *fakePD) RegMR([]byte) (verbs.MR, error) { return nil, verbs.ErrInvalid }
func (p *fakePD) Dealloc() error                 { return nil }
func (m *fakeMR) LKey() uint32                   { return 0 }
func (m *fakeMR) RKey() verbs.RKey               { return m.key }
func (m *fakeMR) Dereg() error {
	if m.pd.deregErr != nil {
		return m.pd.deregErr
	}
	m.pd.present--
	m.pd.free = append(m.pd.free, uint32(m.key)>>8)
	return nil
}

func pages(t *testing.T, n int) []byte {
	t.Helper()
	b, err := membuf.Alloc(n * 4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { membuf.Free(b) })
	return b
}

func TestMapLayout(t *testing.T) {
	mem := pages(t, 300)
	cut := func(off, n int) []byte { return mem[off : off+n : off+n] }
	const page = 4096
	cases := []struct {
		name  string
		depth int
		gaps  bool
		segs  [][]byte
		want  []int // bytes of each MR; nil: ErrTooManySegments
	}{
		{"one page", 4, false, [][]byte{cut(0, page)}, []int{page}},
		{"1 MiB, deep enough", 257, false, [][]byte{cut(0, 256*page)}, []int{256 * page}},
		{"1 MiB at offset 1 takes 257 pages", 257, false, [][]byte{cut(1, 256*page)}, []int{256 * page}},
		{"1 MiB, depth 64", 64, false, [][]byte{cut(0, 256*page)}, []int{64 * page, 64 * page, 64 * page, 64 * page}},
		{"unaligned start loses part of a page", 2, false, [][]byte{cut(100, 3*page)}, []int{2*page - 100, page + 100}},
		{"adjacent segments merge", 2, false, [][]byte{cut(10, 20), cut(30, 40), cut(70, page)}, []int{20 + 40 + page}},
		{"adjacent segments share a page", 1, false, [][]byte{cut(0, 100), cut(100, page-100)}, []int{page}},
		{"page-aligned hole needs no second MR", 4, false, [][]byte{cut(0, page), cut(5*page, page)}, []int{2 * page}},
		{"hole: second segment starts in a page", 4, false, [][]byte{cut(0, page), cut(5*page+8, 8)}, []int{page, 8}},
		{"hole: first segment ends in a page", 4, false, [][]byte{cut(0, 8), cut(5*page, 8)}, []int{8, 8}},
		{"gaps allowed: one MR", 4, true, [][]byte{cut(0, 8), cut(5*page+8, 8), cut(9*page+1, 3)}, []int{19}},
		{"gaps allowed, depth used up", 2, true, [][]byte{cut(0, 8), cut(5*page+8, 8), cut(9*page+1, 3)}, []int{16, 3}},
		{"more MRs than one chunk may have", 1, false, [][]byte{cut(0, 9*page)}, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var stats Counters
			pd := &fakePD{}
			pool := NewPool(pd, Params{Depth: c.depth, Gaps: c.gaps, PageSize: page, MaxSegs: 8}, &stats, Hooks{})
			var l List
			l.Use(pool)
			n, err := l.Map(c.segs, true, 1)
			if c.want == nil {
				if !errors.Is(err, ErrTooManySegments) || len(l.Registered()) != 0 || stats.InState(Valid) != 0 ||
					stats.Free() != stats.Total() {
					t.Errorf("Map: got %v, %d MRs with %d registered, %d VALID, %d of %d free; want an error, all free",
						err, n, len(l.Registered()), stats.InState(Valid), stats.Free(), stats.Total())
				}
			} else if err != nil || n != len(c.want) {
				t.Fatalf("Map: got %d MRs, %v; want %d", n, err, len(c.want))
			}
			for i, m := range l.Registered() {
				if int(m.Length()) != c.want[i] {
					t.Errorf("length of MR %d: got %d bytes, want %d", i, m.Length(), c.want[i])
				}
			}
			l.Unmap()
			if got := stats.InState(Invalid); got != stats.Total() || stats.Free() != got {
				t.Errorf("after Unmap: got %d INVALID and %d free of %d MRs, want all", got, stats.Free(),
					stats.Total())
			}
			if pool.Destroy(); pd.present != 0 || stats.Total() != 0 || stats.Free() != 0 ||
				stats.MRsRecycled.Load() != 0 {
				t.Errorf("after Destroy: got %d MRs on the device, gauges of %d total and %d free, %d recycled; want 0",
					pd.present, stats.Total(), stats.Free(), stats.MRsRecycled.Load())
			}
		})
	}
}

// TestMapCarriesXID maps the same memory many times (S5). No key may follow itself (S4).
func TestMapCarriesXID(t *testing.T) {
	var stats Counters
	pool := NewPool(&fakePD{}, Params{Depth: 4, ChosenIOVA: true, PageSize: 4096, MaxSegs: 3}, &stats, Hooks{})
	var l List
	l.Use(pool)
	mem := pages(t, 1)
	last := uint32(0)
	for range 300 {
		if _, err := l.Map([][]byte{mem}, false, 0xdeadbeef); err != nil {
			t.Fatal(err)
		}
		m := l.Registered()[0]
		if m.Offset()>>32 != 0xdeadbeef {
			t.Fatalf("upper half of address %#x: want XID 0xdeadbeef", m.Offset())
		}
		if m.Handle() == last {
			t.Fatalf("got key %#x twice in a row", last)
		}
		last = m.Handle()
		if m.reg.Access != verbs.AccessRemoteRead {
			t.Fatalf("access to outgoing data: got %b, want remote read", m.reg.Access)
		}
		l.Unmap()
	}
	if stats.MRsAllocated.Load() != 1 {
		t.Errorf("allocated MRs: got %d, want 1", stats.MRsAllocated.Load())
	}
	if n := testing.AllocsPerRun(300, func() {
		if _, err := l.Map([][]byte{mem}, true, 7); err != nil {
			t.Fatal(err)
		}
		l.Unmap()
	}); n != 0 {
		t.Errorf("allocations of Map and Unmap: got %v, want 0", n)
	}
	pool.Destroy()
}

// TestFailedAllocationKeepsMRs checks that a failed Map releases the MRs that it took (S22).
func TestFailedAllocationKeepsMRs(t *testing.T) {
	var stats Counters
	pd := &fakePD{}
	pool := NewPool(pd, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, &stats, Hooks{})
	var l List
	l.Use(pool)
	mem := pages(t, 4)
	if _, err := l.Map([][]byte{mem[:2*4096]}, true, 1); err != nil {
		t.Fatal(err)
	}
	l.Unmap()
	pd.allocErr = syscall.ENOMEM
	if _, err := l.Map([][]byte{mem}, true, 1); !errors.Is(err, syscall.ENOMEM) {
		t.Fatalf("Map: got %v, want ENOMEM", err)
	}
	if len(l.Registered()) != 0 || stats.Free() != 2 || stats.InState(Invalid) != 2 {
		t.Errorf("got %d registered, %d free, %d INVALID; want 0, 2, 2", len(l.Registered()), stats.Free(),
			stats.InState(Invalid))
	}
	pool.Destroy()
}

func TestDestroyCountsFailedMRs(t *testing.T) {
	var stats Counters
	pd := &fakePD{}
	pool := NewPool(pd, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, &stats, Hooks{})
	var l List
	l.Use(pool)
	if _, err := l.Map([][]byte{pages(t, 3)}, true, 1); err != nil {
		t.Fatal(err)
	}
	reg := l.Registered()
	reg[0].regDone(&verbs.WorkCompletion{Status: verbs.StatusWRFlushErr})
	reg[1].invDone(&verbs.WorkCompletion{Status: verbs.StatusWRFlushErr})
	if stats.InState(FlushedFR) != 1 || stats.InState(FlushedLI) != 1 || stats.InState(Valid) != 1 {
		t.Errorf("gauges: got %d FLUSHED_FR, %d FLUSHED_LI, %d VALID; want 1 each", stats.InState(FlushedFR),
			stats.InState(FlushedLI), stats.InState(Valid))
	}
	pd.deregErr = syscall.EBUSY
	if n := pool.Destroy(); n != 3 || stats.MRsOrphaned.Load() != 3 || stats.Total() != 0 {
		t.Errorf("Destroy: got %d, %d orphaned, %d remaining; want 3, 3, 0", n, stats.MRsOrphaned.Load(), stats.Total())
	}
}
