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

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("many connects", "hundreds of consecutive connects under load", testManyConnects)

const (
	// manyConnects is for the newest kernel on the host, fewerConnects for the others: their siw is
	// the same. Emulated clients also use fewerConnects.
	manyConnects  = 1000
	fewerConnects = 200
	// freshLife is the minimum lifetime of a connection on which the server has sent nothing. siw
	// may not have handled a younger connection yet.
	freshLife = 50 * time.Millisecond
)

// testManyConnects provokes the race in which siw leaves the first FPDU of a connection unread.
// Every call must complete, and on siw some of them only because of the nudge.
func testManyConnects(t *testing.T, b bench) {
	connects := manyConnects
	if b.kernel != lab.Kernels[0] || b.inGuest {
		connects = fewerConnects
	}
	busyLoop := strings.TrimSpace(b.MustRun("(while :; do :; done) >/dev/null 2>&1 & echo $!"))
	defer b.Run("kill " + busyLoop)
	capture := b.Capture(t, "connects")
	defer interruptThreads()()
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
	t.Logf("%d connects in %v, slowest %v, %d nudges", connects, time.Since(begin).Round(time.Millisecond),
		slowest.Round(time.Millisecond), nudges)
	if nudges == 0 && b.device == lab.SIW {
		t.Error("got no nudge, want at least one")
	}
	all := checkConnections(t, b, capture, 1, false)
	if len(all) != connects {
		t.Errorf("got %d captured connections, want %d", len(all), connects)
	}
	for _, conn := range all {
		if conn.requested == 0 || conn.answered < conn.requested || conn.ended < conn.answered {
			t.Errorf("got an incomplete connection: %s", conn)
		}
	}
}

// interruptThreads repeatedly sends the Go runtime's preemption signal to all threads until stop is
// called, because the signal can interrupt a connect in the kernel.
func interruptThreads() (stop func()) {
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

// connectOnce makes a connection and one call, and closes the connection.
func connectOnce(b bench, t *testing.T) (nudges uint64, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	defer cancel()
	// Without keepalive calls the first call is the only one. A second call would also make siw
	// read.
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
	err = nfs3.NewClient(tr).Null(ctx, sunrpc.AppendAuthNone(nil))
	return tr.Stats().Nudges, time.Since(begin), err
}

// A connection is one connection in a capture. All times are relative to the start of the capture.
type connection struct {
	port    string // the client's
	started time.Duration
	// by the server's TCP; it and the times below are 0 if the event did not happen
	accepted          time.Duration
	requested         time.Duration // the MPA request was sent
	answered          time.Duration // the server's first byte, or its FIN or RST
	ended             time.Duration // the client's FIN or RST
	killedInHandshake bool          // its process was killed during the handshake
}

// mpaRequestKey is the start of every MPA request in hex (RFC 5044 §7.1).
const mpaRequestKey = "4d504120494420526571204672616d65"

// connections returns the start and end times of the connections to the server.
func connections(t *testing.T, b bench, c *lab.Capture) []*connection {
	t.Helper()
	if b.device == lab.RXE {
		return cmConnections(t, b.wire(), c)
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
			conn = &connection{started: at}
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
	slices.SortFunc(all, func(a, b *connection) int { return cmp.Compare(a.started, b.started) })
	return all
}

func (c *connection) String() string {
	return fmt.Sprintf("port %s: started %v, accepted %v, MPA request %v, answered %v, ended by the client %v", c.port,
		c.started, c.accepted, c.requested, c.answered, c.ended)
}

// checkConnections ends a capture and checks that its connections do not harm a stock server. At
// most most connects may be pending at a time. Each connection must send an MPA request, and must
// not end before siw has handled it. killed permits processes that were killed during the
// handshake. It returns the connections.
func checkConnections(t *testing.T, b bench, c *lab.Capture, most int, killed bool) []*connection {
	t.Helper()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	all := connections(t, b, c)
	if b.device == lab.RXE { // rxe survives any end of a connection
		return all
	}
	for i, conn := range all {
		if conn.accepted == 0 {
			continue // it was not established
		}
		early := conn.ended != 0 && (conn.answered == 0 || conn.ended < conn.answered)
		switch {
		case early && killed && b.inGuest:
			// The kernel ends the device's connections of a killed process.
			t.Logf("process killed before the answer: %s", conn)
			conn.killedInHandshake = true
		case early && conn.requested == 0 && killed:
			// Over loopback the SYN-ACK arrives during connect(2), and the process was killed
			// before its next system call.
			t.Logf("process killed between TCP handshake and MPA request: %s", conn)
			conn.killedInHandshake = true
		case early && conn.requested == 0:
			t.Errorf("got no MPA request: %s", conn)
		case early && conn.ended-conn.accepted < freshLife:
			t.Errorf("got a connection that ended too early: %s", conn)
		}
		fresh := 1
		for _, before := range all[:i] {
			if before.accepted != 0 && conn.started-before.started < freshLife &&
				(before.answered == 0 || before.answered > conn.started) {
				fresh++
			}
		}
		if fresh > most {
			t.Errorf("got %d pending connects, the last %s", fresh, conn)
		}
	}
	return all
}
