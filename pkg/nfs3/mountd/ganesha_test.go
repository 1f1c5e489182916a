package mountd_test

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// TestGanesha makes every call to NFS-Ganesha and to rpcbind. It runs in a separate network
// namespace, in which port 111 is free.
func TestGanesha(t *testing.T) {
	kit.NeedsRoot(t)
	// The thread stays locked, so that the runtime ends it with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("create network namespace: %v; run as root", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("ip link set lo up: %v: %s", err, out)
	}
	s := ganesha.Start(t, t.TempDir(), ganesha.SharedPortmap())
	a := mountd.Args{Host: s.Host, Export: s.Export, Cred: &sunrpc.AuthSys{Machine: "test"}}

	if port, err := mountd.GetPort(t.Context(), a, 100003, 3); err != nil || port != s.NFSPort {
		t.Errorf("GetPort of NFS: got port %d, error %v; want %d", port, err, s.NFSPort)
	}
	var e *mountd.Error
	if port, err := mountd.GetPort(t.Context(), a, 100021, 4); !errors.As(err, &e) || e.Kind != mountd.NotRegistered {
		t.Errorf("GetPort of NLM: got port %d, error %v; want %v", port, err, mountd.NotRegistered)
	}
	res, err := mountd.Mount(t.Context(), a)
	if err != nil || res.FH.IsZero() || res.Port != s.MountPort ||
		!slices.Contains(res.AuthFlavors, uint32(sunrpc.FlavorSys)) {
		t.Errorf("Mount: got %+v, error %v; want port %d and AUTH_SYS", res, err, s.MountPort)
	}
	if err := mountd.Null(t.Context(), a); err != nil {
		t.Errorf("Null: %v", err)
	}
	if list, err := mountd.Exports(t.Context(), a); err != nil ||
		!slices.ContainsFunc(list, func(e mountd.Export) bool { return e.Dir == s.Export }) {
		t.Errorf("Exports: got %v, error %v; want %s", list, err, s.Export)
	}
	if err := mountd.Unmount(t.Context(), a); err != nil {
		t.Errorf("Unmount: %v", err)
	}
	record(t, s, a)
	a.Export = "/no/such/export" // NFS-Ganesha returns the status of an export for other clients
	if _, err := mountd.Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != mountd.Refused ||
		!errors.Is(err, syscall.EACCES) {
		t.Errorf("Mount of an unknown export: got error %v, want %v", err, mountd.Refused)
	}
}

// The corpora of the fuzz targets are replies of real servers. To record them again:
//
//	go test ./pkg/nfs3/mountd -run TestGanesha -update
var update = flag.Bool("update", false, "write the replies of the servers to the corpora of the fuzz targets")

// record makes each call through a tap and checks the replies. It writes the corpora with -update.
func record(t *testing.T, s *ganesha.Server, a mountd.Args) {
	t.Helper()
	corpora := make(map[string]string)
	for name, call := range map[string]func(a mountd.Args) error{
		"null":    func(a mountd.Args) error { return mountd.Null(t.Context(), a) },
		"mnt":     func(a mountd.Args) error { _, err := mountd.Mount(t.Context(), a); return err },
		"umnt":    func(a mountd.Args) error { return mountd.Unmount(t.Context(), a) },
		"refused": func(a mountd.Args) error { a.Export = "/no"; mountd.Mount(t.Context(), a); return nil },
		"getport": func(a mountd.Args) error { _, err := mountd.GetPort(t.Context(), a, nfs3Program, 3); return err },
		"no-port": func(a mountd.Args) error { mountd.GetPort(t.Context(), a, 4711, 3); return nil },
	} {
		own, replies := a, make(chan []byte, 8)
		var wait func()
		switch name {
		case "getport", "no-port":
			own.PortmapPort, wait = tap(t, mountd.PortmapPort, replies)
		default:
			own.Port, wait = tap(t, s.MountPort, replies)
		}
		if err := call(own); err != nil {
			t.Errorf("%s through a tap: %v", name, err)
		}
		wait()
		close(replies)
		n := 0
		for b := range replies {
			n++
			_, results, err := sunrpc.ParseReply(b)
			if err != nil {
				t.Errorf("%s: reply %x: %v", name, b, err)
			}
			corpora["FuzzDecode/server-"+name] = fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", results)
			corpora["FuzzReplies/server-"+name] = fmt.Sprintf("go test fuzz v1\nbool(true)\n[]byte(%q)\n", b)
		}
		if n != 1 {
			t.Errorf("%s: got %d replies, want 1", name, n)
		}
	}
	if !*update || t.Failed() {
		return
	}
	for name, text := range corpora {
		path := filepath.Join("testdata", "fuzz", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

const nfs3Program = 100003

// tap listens on a port, forwards one connection to the port of the server, and sends the replies
// to the channel. It creates both sockets in the network namespace of the test. wait waits for the
// end of the connection.
func tap(t *testing.T, port int, replies chan<- []byte) (tapped int, wait func()) {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, err := net.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		defer ln.Close()
		defer server.Close()
		client, err := ln.Accept()
		if err != nil {
			return
		}
		defer client.Close()
		for {
			call, err := rpctcp.ReadRecord(client, nil, 1<<16)
			if err != nil || rpctcp.WriteRecord(server, call) != nil {
				return
			}
			reply, err := rpctcp.ReadRecord(server, nil, 1<<16)
			if err != nil {
				return
			}
			replies <- reply
			if rpctcp.WriteRecord(client, reply) != nil {
				return
			}
		}
	})
	return ln.Addr().(*net.TCPAddr).Port, func() {
		ln.Close()
		all.Wait()
	}
}
