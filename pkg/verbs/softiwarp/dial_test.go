package softiwarp

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// needTCPRepair fails the test when this process may not use TCP_REPAIR.
func needTCPRepair(t *testing.T) {
	t.Helper()
	kit.NeedsRoot(t)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_ON); err != nil {
		t.Fatalf("TCP_REPAIR: %v; run the tests as root, because it needs CAP_NET_ADMIN", err)
	}
}

// expectResetAfterReply checks that the peer of a closed connection gets a reset when it replies,
// and no end of the stream before.
func expectResetAfterReply(t *testing.T, c *net.TCPConn) {
	c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read before the reply: got %v, want a timeout", err)
		return
	}
	r := validReply()
	c.Write(r.append(nil))
	c.SetReadDeadline(time.Now().Add(testTimeout))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after the reply: got %v, want ECONNRESET", err)
	}
}

// TestCanceledConnectStaysOpen cancels a connect, or lets it time out. Connect must return at
// once, but the peer must receive the request, and no end of the stream before it replies.
func TestCanceledConnectStaysOpen(t *testing.T) {
	needTCPRepair(t)
	for _, c := range []struct {
		name string
		cfg  Config
		kind verbs.ConnErrorKind
	}{
		{"canceled", defaultConfig, verbs.ConnLocal},
		{"no reply", Config{ReplyTimeout: 50 * time.Millisecond}, verbs.ConnTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			released, done := make(chan struct{}), make(chan struct{})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			addr := serveOnce(t, func(conn *net.TCPConn) {
				defer close(done)
				if f := readRequestFrame(conn); f.rev != mpaRev2 {
					t.Errorf("request: got %+v, want revision 2", f)
				}
				if c.kind == verbs.ConnLocal {
					cancel()
				}
				<-released
				expectResetAfterReply(t, conn)
			})
			v, err := connectEndpoint(t, ctx, c.cfg, addr, endpointParam)
			var ce *verbs.ConnError
			if !errors.As(err, &ce) || ce.Kind != c.kind {
				t.Errorf("error: got %v, want one of kind %v", err, c.kind)
			}
			v.id.Close()
			Settle(testContext(t))
			close(released)
			<-done
		})
	}
}

// connectEnv is an environment variable. The test binary connects to the address in it until it is
// killed.
const connectEnv = "SOFTIWARP_TEST_CONNECT"

// connectUntilKilled runs in the process that TestKilledConnectStaysOpen kills.
func connectUntilKilled(to string) {
	check := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	id, err := New(Config{}).Resolve(context.Background(), netip.MustParseAddrPort(to))
	check(err)
	pd, err := id.Device().AllocPD()
	check(err)
	cq, err := id.Device().CreateCQ(2)
	check(err)
	_, err = id.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1})
	check(err)
	check(id.Connect(context.Background(), endpointParam))
	panic("connected before the test killed this process")
}

// TestKilledConnectStaysOpen kills a process that has sent its request and has no reply.
func TestKilledConnectStaysOpen(t *testing.T) {
	kit.NeedsRoot(t)
	needTCPRepair(t)
	requested, killed, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	addr := serveOnce(t, func(c *net.TCPConn) {
		defer close(done)
		readRequestFrame(c)
		close(requested)
		<-killed
		expectResetAfterReply(t, c)
	})
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), connectEnv+"="+addr.String())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-requested:
	case <-done:
	}
	// the sender needs one more system call to enter repair mode again
	time.Sleep(10 * time.Millisecond)
	cmd.Process.Kill()
	cmd.Wait()
	close(killed)
	<-done
}

// TestLostSYNIsResent checks that the kernel retransmits a lost SYN in repair mode, and that the
// connection then works.
func TestLostSYNIsResent(t *testing.T) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(loopback))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { unix.Listen(int(fd), 0) }) // a backlog of one connection
	first, err := net.DialTimeout("tcp", l.Addr().String(), testTimeout)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	served := make(chan error, 1)
	go func() {
		time.Sleep(300 * time.Millisecond) // the SYN is dropped because the backlog is full
		c, err := l.AcceptTCP()
		if err != nil {
			served <- err
			return
		}
		defer c.Close()
		if c, err = l.AcceptTCP(); err != nil {
			served <- err
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(testTimeout))
		readRequestFrame(c)
		r := validReply()
		_, err = c.Write(r.append(nil))
		served <- err
		c.Read(make([]byte, 1))
	}()
	v, err := connectEndpoint(t, testContext(t), defaultConfig, addrPort(l.Addr()), endpointParam)
	if err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	v.id.Close()
}

// TestSelfConnectIsRefused connects a socket to itself, as the kernel can do for a port without a
// listener.
func TestSelfConnectIsRefused(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		to := netip.MustParseAddrPort(addr)
		sa, family, err := sockaddr(to)
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, sa); err != nil {
			t.Fatal(err)
		}
		if sa, err = unix.Getsockname(fd); err == nil {
			err = unix.Connect(fd, sa)
		}
		if err != nil {
			t.Fatal(err)
		}
		if ok, err := connectResult(fd); ok || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s connected to itself: got %v, %v, want false, ECONNREFUSED", addr, ok, err)
		}
	}
}
