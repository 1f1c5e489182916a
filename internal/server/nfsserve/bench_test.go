package nfsserve

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// clientEnv holds a load, as JSON, in the environment of the process that generates it. It is
// another process, so that getrusage(2) of this one counts the server alone.
const clientEnv = "NFSSERVE_BENCH_LOAD"

const (
	readSize  = 4096
	replySize = rpctcp.MarkSize + sunrpc.AcceptedReplySize + nfs3.MaxResultRead + readSize
)

// A load is a number of READs of 4 KiB.
type load struct {
	Kind  string // "tcp" or "rdma"
	Addr  string
	FH    string // hexadecimal
	Calls int
	Depth int // calls in flight
	// Period is the least time between two calls over TCP. The processor time of a call depends on
	// whether the server's thread went to sleep before it, so all loads have the same rate.
	Period time.Duration
}

// runLoad is the main function of the load process.
func runLoad(text string) error {
	var l load
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return err
	}
	b, err := hex.DecodeString(l.FH)
	if err != nil {
		return err
	}
	fh, err := nfs3.NewFH(b)
	if err != nil {
		return err
	}
	if l.Kind == "tcp" {
		return l.overTCP(fh)
	}
	return l.overRDMA(fh)
}

// readCall is a READ of 4 KiB at offset 0 as a TCP record.
func readCall(fh nfs3.FH) []byte {
	b := sunrpc.AppendCall(make([]byte, rpctcp.MarkSize), 1, nfs3.Program, nfs3.Version, uint32(nfs3.ProcRead),
		mounts.Credential(0, 0))
	b = sunrpc.AppendUint32(sunrpc.AppendUint64(nfs3.AppendFH(b, &fh), 0), readSize)
	rpctcp.PutMark(b, len(b)-rpctcp.MarkSize)
	return b
}

// overTCP keeps Depth calls in flight on one connection.
func (l *load) overTCP(fh nfs3.FH) error {
	c, err := net.Dial("tcp", l.Addr)
	if err != nil {
		return err
	}
	defer c.Close()
	call, reply := readCall(fh), make([]byte, replySize)
	for range l.Depth {
		if _, err := c.Write(call); err != nil {
			return err
		}
	}
	start := time.Now()
	for i := range l.Calls {
		if _, err := io.ReadFull(c, reply); err != nil {
			return err
		}
		if i < l.Calls-l.Depth {
			for time.Since(start) < time.Duration(i+1)*l.Period { // a sleep takes too long
			}
			if _, err := c.Write(call); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *load) overRDMA(fh nfs3.FH) error {
	x, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: netip.MustParseAddrPort(l.Addr),
		Slots: 16})
	if err != nil {
		return err
	}
	defer x.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := x.Connect(ctx); err != nil {
		return err
	}
	c := nfs3.NewClient(x)
	var wg sync.WaitGroup
	errs := make([]error, l.Depth)
	for i := range l.Depth {
		wg.Go(func() {
			buf, cred := make([]byte, readSize), mounts.Credential(0, 0)
			for range l.Calls / l.Depth {
				var res nfs3.ReadResult
				if errs[i] = c.Read(ctx, cred, fh, 0, buf, &res); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// cpuOf runs a load and returns the processor time of this process and the elapsed time for each
// call.
func cpuOf(b *testing.B, l load) (cpu, period time.Duration) {
	b.Helper()
	text, err := json.Marshal(l)
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), clientEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	startedAt, before := time.Now(), cpuTime()
	if err := cmd.Run(); err != nil {
		b.Fatalf("load %+v: %v", l, err)
	}
	n := time.Duration(l.Calls)
	return (cpuTime() - before) / n, time.Since(startedAt) / n
}

func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// startEcho answers each record with a fixed header and 4 KiB that it preads from a file: the least
// that a READ over TCP costs.
func startEcho(b *testing.B, file string, callSize int) string {
	b.Helper()
	f, err := os.Open(file)
	if err != nil {
		b.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				call, reply := make([]byte, callSize), make([]byte, replySize)
				for {
					if _, err := io.ReadFull(c, call); err != nil {
						return
					}
					if _, err := unix.Pread(int(f.Fd()), reply[replySize-readSize:], 0); err != nil {
						return
					}
					if _, err := c.Write(reply); err != nil {
						return
					}
				}
			})
		}
	})
	b.Cleanup(func() { l.Close(); wg.Wait(); f.Close() })
	return l.Addr().String()
}

// BenchmarkRead4K measures the processor time of the server for a READ of 4 KiB over TCP and over
// RDMA, and that of a plain TCP echo with pread, in one run and at the same rate. The goal is a
// ratio of at most 2.
func BenchmarkRead4K(b *testing.B) {
	s, dir := start(b, nil)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o644); err != nil {
		b.Fatal(err)
	}
	fh := dial(b, s.TCPAddr)
	handle := fh.MustLookup(fh.Root, "file").FH
	echo := startEcho(b, file, len(readCall(handle)))
	for _, depth := range []int{1, 8} {
		b.Run("depth="+strconv.Itoa(depth), func(b *testing.B) {
			l := load{Kind: "tcp", Addr: s.TCPAddr, FH: handle.String(), Calls: 20000, Depth: depth}
			plain := l
			plain.Addr = echo
			rdma := l
			rdma.Kind, rdma.Addr = "rdma", s.RDMAAddr.String()
			var nfs, base, over time.Duration
			rounds := 0
			for b.Loop() {
				cpu, period := cpuOf(b, rdma)
				over += cpu
				l.Period, plain.Period = period, period
				cpu, _ = cpuOf(b, l)
				nfs += cpu
				cpu, _ = cpuOf(b, plain)
				base += cpu
				rounds++
			}
			us := func(d time.Duration) float64 { return float64(d) / float64(rounds) / 1e3 }
			b.ReportMetric(us(nfs), "µs-cpu/tcp-read")
			b.ReportMetric(us(base), "µs-cpu/echo")
			b.ReportMetric(us(over), "µs-cpu/rdma-read")
			b.ReportMetric(float64(nfs)/float64(base), "tcp-ratio")
			b.ReportMetric(float64(over)/float64(base), "rdma-ratio")
		})
	}
}

// loadMain runs the load of the environment, if there is one, and reports whether there was.
func loadMain() (code int, ok bool) {
	text, ok := os.LookupEnv(clientEnv)
	if !ok {
		return 0, false
	}
	if err := runLoad(text); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}
