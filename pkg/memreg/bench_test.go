package memreg

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

var succeeded verbs.WorkCompletion

// A doneQP executes every chain at once and completes the signaled requests.
type doneQP struct{}

func (doneQP) PostSend(wr *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	wc := &succeeded
	for ; wr != nil; wr = wr.Next {
		if wr.Signaled {
			wr.Done(wc)
		}
	}
	return nil, nil
}
func (doneQP) PostRecv(*verbs.RecvRequest) (*verbs.RecvRequest, error) { return nil, nil }
func (doneQP) Drain()                                                  {}
func (doneQP) Stats() verbs.QPStats                                    { return verbs.QPStats{} }

// BenchmarkMapUnmap measures the memory registration of a 1 MiB RPC: map, chain, invalidate,
// release. It uses 1 to 128 slots in turn, and then from one goroutine per core. Slots share only
// counters, so the cost does not depend on the number of slots (S2).
func BenchmarkMapUnmap(b *testing.B) {
	mem, err := membuf.Alloc(1 << 20)
	if err != nil {
		b.Fatal(err)
	}
	defer membuf.Free(mem)
	rpc := func(l *List, segs [][]byte, send *verbs.WorkRequest, xid uint32, fenced func(bool)) {
		if _, err := l.Map(segs, true, xid); err != nil {
			b.Error(err)
		}
		head, _ := l.Chain(send)
		doneQP{}.PostSend(head)
		if err := l.Invalidate(doneQP{}, fenced); err != nil {
			b.Error(err)
		}
		l.Fenced()
	}
	fenced := func(bool) {}
	for _, slots := range []int{1, 8, 32, 128} {
		params := Params{Depth: 257, Gaps: true, PageSize: 4096, MaxSegs: 3}
		var stats Counters
		pool := NewPool(&fakePD{}, params, &stats, Hooks{})
		lists := make([]List, slots)
		segs := [][]byte{mem}
		for i := range lists {
			lists[i].Use(pool)
			rpc(&lists[i], segs, &verbs.WorkRequest{Done: func(*verbs.WorkCompletion) {}}, 1, fenced)
		}
		b.Run(fmt.Sprintf("slots=%d", slots), func(b *testing.B) {
			b.ReportAllocs()
			send := &verbs.WorkRequest{Opcode: verbs.OpSend}
			i := 0
			for b.Loop() {
				rpc(&lists[i], segs, send, uint32(i), fenced)
				if i++; i == slots {
					i = 0
				}
			}
		})
		if slots >= 8 {
			b.Run(fmt.Sprintf("slots=%d/parallel", slots), func(b *testing.B) {
				b.ReportAllocs()
				var worker atomic.Int64
				b.RunParallel(func(pb *testing.PB) {
					i := int(worker.Add(1)-1) % slots
					send := &verbs.WorkRequest{Opcode: verbs.OpSend}
					for pb.Next() {
						rpc(&lists[i], segs, send, uint32(i), fenced)
					}
				})
			})
		}
		pool.Destroy()
	}
}
