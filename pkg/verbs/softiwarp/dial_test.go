package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
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
	kit.Must(t, err)
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, unix.TCP_REPAIR_ON); err != nil {
		t.Fatalf("TCP_REPAIR: %v; run the tests as root, because it needs CAP_NET_ADMIN", err)
	}
}

// expectResetAfterReply checks that the peer of a closed connection gets a reset when it replies,
// and no end of the stream before.
func expectResetAfterReply(t *testing.T, c *net.TCPConn) {
	raw, err := c.SyscallConn()
	kit.Must(t, err)
	raw.Control(func(fd uintptr) { _, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_DONTWAIT) })
	if err != unix.EAGAIN {
		t.Errorf("read before the reply: got %v, want an open stream without data", err)
		return
	}
	r := validReply()
	c.Write(r.append(nil))
	c.SetReadDeadline(time.Now().Add(kit.Timeout))
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

// idle reports whether no thread of a process runs.
func idle(t *testing.T, pid int) bool {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	kit.Must(t, err)
	for _, file := range threads {
		stat, err := os.ReadFile(file)
		if err == nil && !bytes.Contains(stat, []byte(") S ")) {
			return false
		}
	}
	return true
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
	kit.Must(t, cmd.Start())
	select {
	case <-requested:
	case <-done:
	}
	// The sender needs one more system call to enter repair mode again.
	kit.Eventually(t, "idle process", func() bool { return idle(t, cmd.Process.Pid) })
	cmd.Process.Kill()
	cmd.Wait()
	close(killed)
	<-done
}

// TestSelfConnectIsRefused connects a socket to itself, as the kernel can do for a port without a
// listener.
func TestSelfConnectIsRefused(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		to := netip.MustParseAddrPort(addr)
		sa, family, err := sockaddr(to)
		kit.Must(t, err)
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		kit.Must(t, err)
		defer unix.Close(fd)
		kit.Must(t, unix.Bind(fd, sa))
		if sa, err = unix.Getsockname(fd); err == nil {
			err = unix.Connect(fd, sa)
		}
		kit.Must(t, err)
		if ok, err := connectResult(fd); ok || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s connected to itself: got %v, %v, want false, ECONNREFUSED", addr, ok, err)
		}
	}
}
