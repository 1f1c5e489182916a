package xprt

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// BenchmarkRPC measures whole RPCs to a server in the same process.
func BenchmarkRPC(b *testing.B) {
	tr := dial(b, serve(b, svcrdma.Config{Handler: &service{}, RemoteInv: true}), nil)
	head := sunrpc.AppendUint64(sunrpc.AppendOpaque(nil, []byte("the file")), 0)
	read := func(n int) sunrpc.Message {
		return sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 6, Cred: noCred,
			Args:       sunrpc.AppendUint32(bytes.Clone(head), uint32(n)),
			ResultData: make([]byte, n), MaxResult: 104}
	}
	write := func(n int) sunrpc.Message {
		args := sunrpc.AppendUint32(bytes.Clone(head), uint32(n))
		args = sunrpc.AppendUint32(sunrpc.AppendUint32(args, 2), uint32(n))
		return sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 7, Cred: noCred, Args: args, ArgDataPos: len(args),
			ArgData: fill(0, n), MaxResult: 136}
	}
	for _, c := range []struct {
		name string
		n    int
		m    sunrpc.Message
	}{
		{"NULL", 0, sunrpc.Message{Prog: nfsProg, Vers: 3, Cred: noCred}},
		{"READ_4KiB", 4096, read(4096)},
		{"READ_1MiB", 1 << 20, read(1 << 20)},
		{"WRITE_4KiB", 4096, write(4096)},
		{"WRITE_1MiB", 1 << 20, write(1 << 20)},
	} {
		b.Run(c.name, func(b *testing.B) {
			m := c.m
			m.Result = make([]byte, 0, 8192)
			b.SetBytes(int64(c.n))
			b.ReportAllocs()
			for b.Loop() {
				if err := tr.Call(context.Background(), &m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTrace measures the cost of the ring of trace events: the same calls without and with it.
func BenchmarkTrace(b *testing.B) {
	for _, events := range []int{0, DefaultTraceEvents} {
		tr := dial(b, serve(b, svcrdma.Config{Handler: &service{}, RemoteInv: true}),
			func(c *Config) { c.TraceEvents = events })
		b.Run(fmt.Sprintf("NULL/events=%d", events), func(b *testing.B) {
			m := sunrpc.Message{Prog: nfsProg, Vers: 3, Cred: noCred, Result: make([]byte, 0, 8192)}
			b.ReportAllocs()
			for b.Loop() {
				if err := tr.Call(context.Background(), &m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
