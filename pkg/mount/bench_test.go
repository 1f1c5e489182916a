package mount

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// serveRead replies to READs with zeros.
func serveRead(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, args, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	reply = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	if nfs3.Proc(h.Proc) != nfs3.ProcRead {
		return reply, nil
	}
	d := sunrpc.NewDecoder(args)
	d.Opaque(nfs3.FHSize)
	d.Uint64()
	n := d.Uint32()
	for _, v := range []uint32{0, 0, n, 0, n} { // NFS3_OK, no attributes, count, not the end, length
		reply = sunrpc.AppendUint32(reply, v)
	}
	return reply[:len(reply)+int(n)], d.Err()
}

// BenchmarkSmallReadBesideBulk measures READs of 4 KiB while other goroutines READ 1 MiB, with
// different numbers of connections. It reports the rate of the bulk READs too.
func BenchmarkSmallReadBesideBulk(b *testing.B) {
	server := startServer(b, serveRead)
	for _, n := range []int{1, 2, 3} {
		b.Run(fmt.Sprintf("nconnect=%d", n), func(b *testing.B) {
			s := connectedTo(b, server, n)
			client := nfs3.NewClient(&s.transports, nfs3.Options{})
			fh, err := nfs3.NewFH([]byte("file"))
			if err != nil {
				b.Fatal(err)
			}
			read := func(buf []byte) {
				var r nfs3.ReadResult
				if err := client.Read(context.Background(), noCred, fh, 0, buf, &r); err != nil {
					b.Error(err)
				}
			}
			var stop atomic.Bool
			var bulk sync.WaitGroup
			var bytes atomic.Int64
			for range 4 {
				bulk.Go(func() {
					for buf := make([]byte, 1<<20); !stop.Load(); bytes.Add(1 << 20) {
						read(buf)
					}
				})
			}
			small := make([]byte, 4096)
			bytes.Store(0)
			for b.Loop() {
				read(small)
			}
			b.ReportMetric(float64(bytes.Load())/1e6/b.Elapsed().Seconds(), "bulk-MB/s")
			stop.Store(true)
			bulk.Wait()
		})
	}
}
