package knfsd

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("many connects", "connects by the hundred under load, one after the other", testManyConnects)

const (
	// manyConnects are made to the newest kernel, fewerConnects to others: siw is the same.
	// Emulated clients make no more either.
	manyConnects  = 1000
	fewerConnects = 200
	// freshLife is the least that a connection lives to which the server has said nothing: siw may
	// not have looked at it before.
	freshLife = 50 * time.Millisecond
)

// testManyConnects looks for the connect whose first FPDU siw leaves in its socket: each call is
// answered, and the nudge is what made it so.
func testManyConnects(t *testing.T, b bench) {
	connects := manyConnects
	if b.kernel != lab.Kernels[0] || b.inGuest {
		connects = fewerConnects
	}
	burner := strings.TrimSpace(b.MustRun("(while :; do :; done) >/dev/null 2>&1 & echo $!"))
	defer b.Run("kill " + burner)
	capture := b.Capture(t, "connects")
	defer pester()()
	var nudges uint64
	var slowest time.Duration
	begin := time.Now()
	for i := range connects {
		n, took, err := connectOnce(b, t)
		if err != nil {
			t.Fatalf("connect %d: %v", i, err)
		}
		nudges += n
		slowest = max(slowest, took)
	}
	t.Logf("%d connects in %v, the slowest %v, %d nudges", connects, time.Since(begin).Round(time.Millisecond),
		slowest.Round(time.Millisecond), nudges)
	if nudges == 0 && b.device == lab.SIW {
		t.Error("no nudge was needed: the race was not met")
	}
	all := gentle(t, b, capture, 1, false)
	if len(all) != connects {
		t.Errorf("%d connections were captured, want %d", len(all), connects)
	}
	for _, conn := range all {
		if conn.requested == 0 || conn.answered < conn.requested || conn.ended < conn.answered {
			t.Errorf("not a whole connection: %s", conn)
		}
	}
}

// pester sends the signal that the Go runtime uses for its own purposes to all threads, again and
// again until it is told to stop: a kernel that connects may be interrupted by it.
func pester() (stop func()) {
	over := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for {
			tasks, _ := os.ReadDir("/proc/self/task")
			for _, task := range tasks {
				if tid, err := strconv.Atoi(task.Name()); err == nil {
					unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
				}
			}
			select {
			case <-over:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	return func() {
		close(over)
		work.Wait()
	}
}

// connectOnce makes a connection and one call, and ends it.
func connectOnce(b bench, t *testing.T) (nudges uint64, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	// Without liveness calls the first call is the only one: a second would wake the server, too.
	tr, err := xprt.New(xprt.Config{Provider: b.newProvider(t), Addr: b.RDMA, Slots: 4, KeepAlive: -1,
		NudgeAfter: 20 * time.Millisecond})
	if err != nil {
		return 0, 0, err
	}
	defer tr.Close()
	begin := time.Now()
	if err := tr.Connect(ctx); err != nil {
		return 0, 0, err
	}
	err = nfs3.NewClient(tr, nfs3.Options{}).Null(ctx, sunrpc.AppendAuthNone(nil))
	return tr.Stats().Nudges, time.Since(begin), err
}

// A connection is what a capture tells of one, in times since its begin.
type connection struct {
	port  string // the client's
	begun time.Duration
	// by the server's end of TCP; the others are 0 if it never happened, too
	accepted  time.Duration
	requested time.Duration // the MPA request was sent
	answered  time.Duration // the server's first octet, or its end
	ended     time.Duration // the client's FIN or RST
	unlucky   bool          // its process was killed in the handshake
}

// mpaRequestKey begins every MPA request (RFC 5044 §7.1), in hex.
const mpaRequestKey = "4d504120494420526571204672616d65"

// connections reads the beginnings and the ends of connections to the server.
func connections(t *testing.T, b bench, c *lab.Capture) []*connection {
	t.Helper()
	if b.device == lab.RXE {
		return managed(t, b.wire(), c)
	}
	port := strconv.Itoa(int(b.RDMA.Port()))
	byStream := make(map[string]*connection)
	var all []*connection
	for _, f := range frames(t, c, "tcp.port == "+port, "tcp.stream", "frame.time_relative", "tcp.srcport",
		"tcp.flags.syn", "tcp.flags.fin", "tcp.flags.reset", "tcp.len", "tcp.payload") {
		value := func(i int) string {
			if len(f[i]) == 0 {
				return ""
			}
			return f[i][0]
		}
		set := func(i int) bool { return value(i) == "1" || value(i) == "True" }
		seconds, err := strconv.ParseFloat(value(1), 64)
		if err != nil {
			t.Fatal(err)
		}
		at := time.Duration(seconds * float64(time.Second))
		conn := byStream[value(0)]
		if conn == nil {
			conn = &connection{begun: at}
			byStream[value(0)] = conn
			all = append(all, conn)
		}
		first := func(when *time.Duration, happened bool) {
			if happened && *when == 0 {
				*when = max(at, 1)
			}
		}
		over, data := set(4) || set(5), value(6) != "0"
		if value(2) == port {
			first(&conn.accepted, set(3))
			first(&conn.answered, data || over)
			continue
		}
		conn.port = value(2)
		first(&conn.requested, strings.HasPrefix(value(7), mpaRequestKey))
		first(&conn.ended, over)
	}
	slices.SortFunc(all, func(a, b *connection) int { return cmp.Compare(a.begun, b.begun) })
	return all
}

func (c *connection) String() string {
	return fmt.Sprintf("from port %s: begun %v, accepted %v, MPA request %v, answered %v, ended by us %v", c.port,
		c.begun, c.accepted, c.requested, c.answered, c.ended)
}

// gentle holds all connections of a capture, which it ends and returns, to what a stock server
// survives: no more than most are made at a time, each says what it wants, and none ends before siw
// has looked at it. killed allows for processes that were killed in the handshake.
func gentle(t *testing.T, b bench, c *lab.Capture, most int, killed bool) []*connection {
	t.Helper()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	all := connections(t, b, c)
	if b.device == lab.RXE { // which survives anything
		return all
	}
	for i, conn := range all {
		if conn.accepted == 0 {
			continue // it never came to be
		}
		early := conn.ended != 0 && (conn.answered == 0 || conn.ended < conn.answered)
		switch {
		case early && killed && b.inGuest:
			// A device's connections are the kernel's, which ends those of a killed process.
			t.Logf("killed before the answer: %s", conn)
			conn.unlucky = true
		case early && conn.requested == 0 && killed:
			// The SYN-ACK came within connect(2), as it does over loopback, and the process was
			// killed before its next system call.
			t.Logf("killed between the handshake and the request: %s", conn)
			conn.unlucky = true
		case early && conn.requested == 0:
			t.Errorf("no MPA request: %s", conn)
		case early && conn.ended-conn.accepted < freshLife:
			t.Errorf("ended too early: %s", conn)
		}
		fresh := 1
		for _, before := range all[:i] {
			if before.accepted != 0 && conn.begun-before.begun < freshLife &&
				(before.answered == 0 || before.answered > conn.begun) {
				fresh++
			}
		}
		if fresh > most {
			t.Errorf("%d at a time, the last %s", fresh, conn)
		}
	}
	return all
}
