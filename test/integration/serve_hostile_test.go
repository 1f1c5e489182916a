package integration

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const (
	attackerAddr = "127.0.0.2"
	// attackers is more than a server takes from everybody on either port.
	attackers = 700
	// expensiveAttackers is the number of connections where each costs the server much.
	expensiveAttackers = 16
	// serviceTimeout bounds how long a well-behaved client tries during an attack. It is long
	// because test machines are slow.
	serviceTimeout = 3 * time.Minute
	// closeTimeout bounds how long a server keeps a connection that never completes a call.
	closeTimeout = 10 * time.Minute
	// memoryLimit is the default of serve's --message-memory and room for everything else.
	memoryLimit = (512 + 256) << 20
)

// A hostileClient is what one attacker does on a connection. It returns when it has nothing more to
// send; the connection stays open.
type hostileClient struct {
	name string
	rdma bool // on the RDMA port
	// ends: the server must close each connection within closeTimeout.
	ends bool
	// few: the attack is expensive for the server and needs few connections.
	few bool
	act func(c net.Conn, root nfs3.FH) error
}

func send(b ...byte) func(net.Conn, nfs3.FH) error {
	return func(c net.Conn, _ nfs3.FH) error {
		_, err := c.Write(b)
		return err
	}
}

var hostileClients = []hostileClient{
	{name: "silent", ends: true, act: send()},
	{name: "half a record mark", ends: true, act: send(0x80, 0)},
	{name: "half a record", ends: true, act: send(0x80, 0, 0, 100, 0, 0, 0, 1)},
	{name: "half a large record", few: true, ends: true, act: func(c net.Conn, _ nfs3.FH) error {
		_, err := c.Write(append([]byte{0x80, 0x10, 0, 0}, make([]byte, 1<<19)...))
		return err
	}},
	{name: "huge record mark", ends: true, act: send(0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1)},
	{name: "huge last fragment", ends: true, act: send(0, 0, 0, 4, 1, 2, 3, 4, 0xff, 0xff, 0xff, 0xff)},
	{name: "empty fragments without end", ends: true, act: func(c net.Conn, _ nfs3.FH) error {
		for {
			if _, err := c.Write(make([]byte, 4000)); err != nil {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
	}},
	{name: "slow sender", ends: true, act: func(c net.Conn, _ nfs3.FH) error {
		for _, b := range append([]byte{0x80, 0, 0x40, 0}, make([]byte, 0x4000)...) {
			if _, err := c.Write([]byte{b}); err != nil {
				return err
			}
			time.Sleep(500 * time.Millisecond)
		}
		return nil
	}},
	{name: "not RPC", ends: true, act: func(c net.Conn, _ nfs3.FH) error {
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
		return err
	}},
	{name: "idle after a call", act: func(c net.Conn, _ nfs3.FH) error {
		return rpctcp.WriteRecord(c, sunrpc.AppendCall(nil, 1, nfs3.Program, nfs3.Version, 0,
			sunrpc.AppendAuthNone(nil)))
	}},
	{name: "replies are not read", few: true, ends: true, act: readWithoutReceiving},

	{name: "silent", rdma: true, ends: true, act: send()},
	{name: "half an MPA request", rdma: true, ends: true, act: send([]byte("MPA ID Re")...)},
	{name: "MPA request without private data", rdma: true, ends: true, act: send(mpaRequest(400)...)},
	{name: "not MPA", rdma: true, ends: true, act: send(bytes.Repeat([]byte{'x'}, 100)...)},
	{name: "idle after the handshake", rdma: true, act: send(append(mpaRequest(4), 0x40, 1, 0x40, 1)...)},
	{name: "half an FPDU", rdma: true, act: send(append(mpaRequest(4), 0x40, 1, 0x40, 1, 1, 0, 0x41, 0x43, 0, 0)...)},
}

// mpaRequest is an MPA Request frame of revision 2 (RFC 5044 §7.1, RFC 6581 §9) without its n bytes
// of private data.
func mpaRequest(n uint16) []byte {
	b := append([]byte("MPA ID Req Frame"), 0x10, 2)
	return binary.BigEndian.AppendUint16(b, n)
}

// readWithoutReceiving asks for as much data as it can send calls, and reads none.
func readWithoutReceiving(c net.Conn, root nfs3.FH) error {
	_ = c.(*net.TCPConn).SetReadBuffer(4096)
	for xid := uint32(1); ; xid++ {
		call := sunrpc.AppendCall(nil, xid, nfs3.Program, nfs3.Version, uint32(nfs3.ProcReadDirPlus), credential(0, 0))
		call = sunrpc.AppendOpaque(call, root.Bytes())
		call = append(call, make([]byte, 16)...) // cookie and verifier
		call = sunrpc.AppendUint32(sunrpc.AppendUint32(call, 1<<20), 1<<20)
		if err := rpctcp.WriteRecord(c, call); err != nil {
			return err
		}
	}
}

// An attack is many connections of hostile clients from one address.
type attack struct {
	conns []net.Conn
	open  atomic.Int64
	wg    sync.WaitGroup
}

func startAttack(t *testing.T, h *hostileClient, addr string, root nfs3.FH) *attack {
	t.Helper()
	a := &attack{}
	t.Cleanup(func() {
		for _, c := range a.conns {
			c.Close()
		}
		a.wg.Wait()
	})
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(attackerAddr)}, Timeout: serviceTimeout}
	n := attackers
	if h.few {
		n = expensiveAttackers
	}
	for range n {
		c, err := d.Dial("tcp", addr)
		if err != nil {
			t.Fatalf("connect from %s: %v", attackerAddr, err)
		}
		a.conns = append(a.conns, c)
		a.open.Add(1)
		a.wg.Go(func() {
			defer a.open.Add(-1)
			if h.act(c, root) != nil {
				return // the server closed the connection
			}
			_, _ = io.Copy(io.Discard, c)
		})
	}
	return a
}

// below waits until fewer than n connections are open.
func (a *attack) below(n int64, timeout time.Duration) bool {
	for deadline := time.Now().Add(timeout); a.open.Load() >= n; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// serveGoodClient makes calls from another address, over new connections of both transports.
func serveGoodClient(t *testing.T, s *mounts.ServedDir) {
	t.Helper()
	for _, tr := range transports {
		read := func() error {
			c, err := tr.dial(t, s)
			if err != nil {
				return err
			}
			fh, err := c.lookup(credential(0, 0), c.root, "f")
			if err == nil {
				_, err = c.read(credential(0, 0), fh)
			}
			return err
		}
		// A handshake may time out on a slow machine, so that a client tries again.
		err := read()
		for deadline := time.Now().Add(serviceTimeout); err != nil && time.Now().Before(deadline); {
			time.Sleep(100 * time.Millisecond)
			err = read()
		}
		if err != nil {
			t.Errorf("%s: no service within %v: %v", tr.name, serviceTimeout, err)
		}
	}
}

// TestServeHostileClients attacks each port, and checks that other clients are served on both, and
// that the attackers are limited.
func TestServeHostileClients(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	for _, h := range hostileClients {
		port := "TCP"
		if h.rdma {
			port = "RDMA"
		}
		t.Run(port+"/"+strings.ReplaceAll(h.name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			served := mounts.OpenTempDir(t)
			writeFiles(t, served, map[string]string{"f": "content"})
			if h.few { // large replies
				makeEntries(t, served, 3000)
			}
			s := mounts.ServeDir(t, served)
			root := mustDial(t, s).root
			addr := s.TCP
			if h.rdma {
				addr = s.RDMA
			}
			a := startAttack(t, &h, addr, root)
			serveGoodClient(t, s)
			if !h.few && !a.below(attackers, serviceTimeout) {
				t.Errorf("server keeps all %d connections of one address", attackers)
			}
			if rss := residentMemory(t, s.PID()); rss > memoryLimit {
				t.Errorf("server uses %d MiB of memory, want at most %d", rss>>20, memoryLimit>>20)
			}
			if !h.ends {
				return
			}
			if !a.below(1, closeTimeout) {
				t.Errorf("server keeps %d connections after %v", a.open.Load(), closeTimeout)
			}
			serveGoodClient(t, s)
		})
	}
}

func residentMemory(t *testing.T, pid int) (bytes int64) {
	t.Helper()
	status, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscanf(rest, "%d kB", &bytes); err != nil {
		t.Fatalf("VmRSS of process %d: %v", pid, err)
	}
	return bytes << 10
}
