package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// Kinds of calls.
const (
	kindEcho = "echo" // a request and a reply of fixed sizes to the role "echo"
	kindRDMA = "rdma" // READ or WRITE over RDMA
	kindTCP  = "tcp"  // READ or WRITE over TCP
)

// callTimeout bounds the calls of one measurement, besides their time limit.
const callTimeout = time.Minute

// calls is a measurement of calls to a server from another process.
type calls struct {
	Workload string
	Kind     string
	Addr     string // of the server
	Depth    int    // calls in flight

	Out, Back int // bytes of a request and a reply of kindEcho

	MountHost string // MOUNT service and export, for the other kinds
	MountPort int
	Export    string
	File      string
	Write     bool // WRITE, and one COMMIT at the end; otherwise READ
	Block     int  // bytes of each call
	Size      int64

	Time  time.Duration // of the measurement
	Watch bench.Processes
}

// run makes the calls and writes a bench.Sample as JSON.
func (c *calls) run(w io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.Time+callTimeout)
	defer cancel()
	load := c.nfs
	if c.Kind == kindEcho {
		load = c.echo
	}
	s, err := load(ctx)
	if err != nil {
		return fmt.Errorf("%s, %s to %s: %w", c.Workload, c.Kind, c.Addr, err)
	}
	s.Workload, s.Callers = c.Workload, c.Depth
	return json.NewEncoder(w).Encode(s)
}

// measure calls f, which returns the number of calls, and measures the watched processes.
func (c *calls) measure(f func(end time.Time) (int, error)) (s bench.Sample, err error) {
	watch := bench.Processes{"client": os.Getpid()}
	for name, pid := range c.Watch {
		watch[name] = pid
	}
	before, err := watch.Usage()
	if err != nil {
		return s, err
	}
	begin := time.Now()
	if s.Calls, err = f(begin.Add(c.Time)); err != nil {
		return s, err
	}
	s.Seconds = time.Since(begin).Seconds()
	after, err := watch.Usage()
	s.Processes = after.Since(before)
	s.Bytes = int64(s.Calls) * int64(c.Block)
	return s, err
}

// serveEcho replies to requests on TCP. The client sends the sizes first.
func serveEcho() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println("ready", l.Addr())
	go exitWithInput()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			var sizes [2]uint32
			if binary.Read(conn, binary.BigEndian, &sizes) != nil {
				return
			}
			in, out := make([]byte, sizes[0]), make([]byte, sizes[1])
			for {
				if _, err := io.ReadFull(conn, in); err != nil {
					return
				}
				if _, err := conn.Write(out); err != nil {
					return
				}
			}
		}()
	}
}

// echo keeps Depth requests in flight on one connection.
func (c *calls) echo(ctx context.Context) (s bench.Sample, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", c.Addr)
	if err != nil {
		return s, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := errors.Join(conn.SetDeadline(deadline),
		binary.Write(conn, binary.BigEndian, [2]uint32{uint32(c.Out), uint32(c.Back)})); err != nil {
		return s, err
	}
	out, in := make([]byte, c.Out), make([]byte, c.Back)
	return c.measure(func(end time.Time) (n int, err error) {
		for range c.Depth {
			if _, err := conn.Write(out); err != nil {
				return n, err
			}
		}
		for pending := c.Depth; pending > 0; n++ {
			if _, err := io.ReadFull(conn, in); err != nil {
				return n, err
			}
			if time.Now().After(end) {
				pending--
				continue
			}
			if _, err := conn.Write(out); err != nil {
				return n, err
			}
		}
		return n, nil
	})
}

// dial connects to the server. The caller calls end.
func (c *calls) dial(ctx context.Context) (client *nfs3.Client, end func() error, err error) {
	if c.Kind == kindTCP {
		t, err := rpctcp.Dial(ctx, c.Addr, rpctcp.Options{})
		if err != nil {
			return nil, nil, err
		}
		return nfs3.NewClient(t), t.Close, nil
	}
	x, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: netip.MustParseAddrPort(c.Addr)})
	if err != nil {
		return nil, nil, err
	}
	if err := x.Connect(ctx); err != nil {
		return nil, nil, errors.Join(err, x.Close())
	}
	return nfs3.NewClient(x), x.Close, nil
}

// nfs keeps Depth READs or WRITEs in flight on one connection.
func (c *calls) nfs(ctx context.Context) (s bench.Sample, err error) {
	root, err := mountd.Mount(ctx, mountd.Args{Host: c.MountHost, Port: c.MountPort, Export: c.Export,
		Cred: &sunrpc.AuthSys{Machine: "bench"}})
	if err != nil {
		return s, err
	}
	client, end, err := c.dial(ctx)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, end()) }()
	cred := mounts.Credential(0, 0)
	var file nfs3.LookupResult
	if err := client.Lookup(ctx, cred, root.FH, c.File, &file); err != nil {
		return s, fmt.Errorf("look up %s: %w", c.File, err)
	}
	return c.measure(func(end time.Time) (int, error) {
		var next atomic.Int64
		var wg sync.WaitGroup
		errs := make([]error, c.Depth)
		for i := range c.Depth {
			wg.Go(func() { errs[i] = c.caller(ctx, client, cred, file.FH, &next, end) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil || !c.Write {
			return int(next.Load()), err
		}
		var res nfs3.CommitResult
		return int(next.Load()), client.Commit(ctx, cred, file.FH, 0, 0, &res)
	})
}

// caller makes one call after the other until the time is over. next counts the calls of all
// callers; the blocks of the file follow each other.
func (c *calls) caller(ctx context.Context, client *nfs3.Client, cred []byte, fh nfs3.FH, next *atomic.Int64,
	end time.Time) error {
	buf := make([]byte, c.Block)
	blocks := c.Size / int64(c.Block)
	for {
		off := uint64(((next.Add(1) - 1) % blocks) * int64(c.Block))
		n := 0
		var err error
		if c.Write {
			var res nfs3.WriteResult
			err = client.Write(ctx, cred, fh, off, buf, nfs3.Unstable, &res)
			n = int(res.Count)
		} else {
			var res nfs3.ReadResult
			err = client.Read(ctx, cred, fh, off, buf, &res)
			n = res.N
		}
		if err == nil && n != c.Block {
			err = fmt.Errorf("got %d bytes at %d, want %d", n, off, c.Block)
		}
		if err != nil || time.Now().After(end) {
			return err
		}
	}
}
