package mountd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// peer starts a TCP server that runs serve for each connection until the test ends. It returns the
// port.
func peer(t *testing.T, serve func(conn net.Conn)) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	var all sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	all.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, conn)
			mu.Unlock()
			all.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return ln.Addr().(*net.TCPAddr).Port
}

// replies starts a server that replies to each call with the result of reply.
func replies(t *testing.T, reply func(xid uint32) []byte) int {
	return peer(t, func(conn net.Conn) {
		for {
			rec, err := rpctcp.ReadRecord(conn, nil, 1<<16)
			if err != nil {
				return
			}
			h, _, _ := sunrpc.ParseCall(rec)
			rpctcp.WriteRecord(conn, reply(h.XID))
		}
	})
}

// results starts a server that replies to each call with success and these results.
func results(t *testing.T, hexResults string) int {
	return replies(t, func(xid uint32) []byte {
		return append(sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success), kit.Unhex(hexResults)...)
	})
}

func args(port int) Args {
	cred := &sunrpc.AuthSys{Stamp: 1, Machine: "me", UID: 2, GID: 3, GIDs: []uint32{4}}
	return Args{Host: "127.0.0.1", Port: port, Export: "/export", Cred: cred, Timeout: 20 * time.Second}
}

// TestMountWireFormat checks the bytes of the call, the decoded reply, and the source port.
func TestMountWireFormat(t *testing.T) {
	const call = `00000000 00000002 000186a5 00000003 00000001
		00000001 0000001c 00000001 00000002 6d650000 00000002 00000003 00000001 00000004
		00000000 00000000
		00000007 2f6578706f727400`
	calls := make(chan []byte, 1)
	sources := make(chan int, 1)
	port := peer(t, func(conn net.Conn) {
		sources <- conn.RemoteAddr().(*net.TCPAddr).Port
		rec, err := rpctcp.ReadRecord(conn, nil, 1<<16)
		if err != nil {
			t.Error(err)
			return
		}
		calls <- rec[4:]
		reply := sunrpc.AppendAcceptedReply(nil, binary.BigEndian.Uint32(rec), sunrpc.Success)
		rpctcp.WriteRecord(conn, append(reply,
			kit.Unhex("00000000 00000005 0102030405000000 00000002 00000001 00000006")...))
	})
	res, err := Mount(t.Context(), args(port))
	if err != nil {
		t.Fatalf("Mount: %v", err)
	}
	fh, _ := nfs3.NewFH([]byte{1, 2, 3, 4, 5})
	if want := (Result{FH: fh, AuthFlavors: []uint32{1, 6}, Port: port}); !reflect.DeepEqual(res, want) {
		t.Errorf("got result %+v, want %+v", res, want)
	}
	if got := <-calls; !bytes.Equal(got, kit.Unhex(call)) {
		t.Errorf("got call\n     %x\nwant %x", got, kit.Unhex(call))
	}
	if source := <-sources; os.Geteuid() == 0 && (source < resvport.Min || source > resvport.Max) {
		t.Errorf("got source port %d, want %d to %d", source, resvport.Min, resvport.Max)
	}
}

func TestCallsWithoutResults(t *testing.T) {
	port := results(t, "")
	if err := Null(t.Context(), args(port)); err != nil {
		t.Errorf("Null: %v", err)
	}
	if err := Unmount(t.Context(), args(port)); err != nil {
		t.Errorf("Unmount: %v", err)
	}
}

// A failure is a server that does not return a file handle, and the expected error.
type failure struct {
	name string
	port int
	kind Kind
	stat Stat
	is   error
	text string
}

// TestErrorResults checks the errors for results of MNT.
func TestErrorResults(t *testing.T) {
	invalid, text := sunrpc.ErrMalformed, "invalid reply: malformed"
	const handle = "00000000 00000004 01020304"
	fh65 := "00000000 00000041" + strings.Repeat("00", 68) + "00000000"
	for _, x := range []failure{
		{"no such export", results(t, "00000002"), NoExport, MNT3ErrNoEnt, syscall.ENOENT, "MNT3ERR_NOENT"},
		{"not a directory", results(t, "00000014"), NoExport, MNT3ErrNotDir, syscall.ENOENT, "MNT3ERR_NOTDIR"},
		{"access denied", results(t, "0000000d"), Refused, MNT3ErrAcces, syscall.EACCES, "MNT3ERR_ACCES"},
		{"not owner", results(t, "00000001"), Refused, MNT3ErrPerm, syscall.EACCES, "MNT3ERR_PERM"},
		{"server fault", results(t, "00002716"), OtherStatus, MNT3ErrServerFault, nil, "MNT3ERR_SERVERFAULT"},
		{"status 77", results(t, "0000004d"), Protocol, 77, nil, "server returned invalid mountstat3 77"},
		{"no results", results(t, ""), Protocol, 0, invalid, text},
		{"empty handle", results(t, "00000000 00000000 00000000"), Protocol, 0, invalid, "empty file handle"},
		{"handle of 65 bytes", results(t, fh65), Protocol, 0, invalid, "file handle: length"},
		{"handle of 4 GiB", results(t, "00000000 ffffffff 00000000"), Protocol, 0, invalid, "file handle: length"},
		{"4 Gi flavors", results(t, handle+"ffffffff 00000001"), Protocol, 0, invalid, "flavors: length"},
		{"truncated flavors", results(t, handle+"00000002 00000001"), Protocol, 0, invalid, text},
	} {
		x.check(t)
	}
}

// TestErrorReplies checks the errors for RPC replies other than success.
func TestErrorReplies(t *testing.T) {
	accepted := func(xid uint32, stat sunrpc.AcceptStat) []byte { return sunrpc.AppendAcceptedReply(nil, xid, stat) }
	denied := replies(t, func(xid uint32) []byte { return sunrpc.AppendDeniedReply(nil, xid, sunrpc.AuthTooWeak) })
	rpcVersion := replies(t, func(xid uint32) []byte { return sunrpc.AppendMismatchReply(nil, xid) })
	noMount := replies(t, func(xid uint32) []byte { return accepted(xid, sunrpc.ProgUnavail) })
	mountVersion := replies(t, func(xid uint32) []byte { return sunrpc.AppendProgMismatchReply(nil, xid, 1, 2) })
	garbage := replies(t, func(xid uint32) []byte { return accepted(xid, sunrpc.GarbageArgs) })
	otherXID := replies(t, func(xid uint32) []byte { return accepted(xid+1, sunrpc.Success) })
	truncated := replies(t, func(xid uint32) []byte { return accepted(xid, sunrpc.Success)[:14] })
	longVerifier := replies(t, func(xid uint32) []byte {
		b := accepted(xid, sunrpc.Success)
		binary.BigEndian.PutUint32(b[16:], 0xffffffff)
		return b
	})
	empty := replies(t, func(uint32) []byte { return nil })
	for _, x := range []failure{
		{"denied credential", denied, Refused, 0, nil, "AUTH_TOOWEAK"},
		{"another RPC version", rpcVersion, Protocol, 0, nil, "RPC_MISMATCH"},
		{"no MOUNT", noMount, NotRegistered, 0, nil, "PROG_UNAVAIL"},
		{"no MOUNT 3", mountVersion, Protocol, 0, nil, "versions 1 to 2"},
		{"garbage arguments", garbage, Protocol, 0, nil, "GARBAGE_ARGS"},
		{"another XID", otherXID, Protocol, 0, sunrpc.ErrMalformed, "XID"},
		{"truncated verifier", truncated, Protocol, 0, sunrpc.ErrMalformed, ""},
		{"verifier of 4 GiB", longVerifier, Protocol, 0, sunrpc.ErrMalformed, ""},
		{"empty record", empty, Protocol, 0, sunrpc.ErrMalformed, ""},
	} {
		x.check(t)
	}
}

// TestServersWithoutRPC checks the errors for servers that do not speak RPC over TCP.
func TestServersWithoutRPC(t *testing.T) {
	sends := func(data string) int {
		return peer(t, func(conn net.Conn) {
			conn.Write([]byte(data))
			rpctcp.ReadRecord(conn, nil, 1<<16) // until the client closes the connection
			rpctcp.ReadRecord(conn, nil, 1<<16)
		})
	}
	emptyFragments := strings.Repeat("\x00\x00\x00\x00", 1000)
	for _, x := range []failure{
		{"HTTP", sends("HTTP/1.1 400 Bad Request\r\n\r\n"), Protocol, 0, rpctcp.ErrRecord, "invalid reply"},
		{"record of 2 GiB", sends("\xff\xff\xff\xff"), Protocol, 0, rpctcp.ErrRecord, ""},
		{"empty fragments", sends(emptyFragments), Protocol, 0, rpctcp.ErrRecord, ""},
		{"random bytes", sends("\x12\x9e\x61\x07\xaf\x08\x77\xfe\x00\x13\x5b\x20"), Protocol, 0, rpctcp.ErrRecord, ""},
		{"closed port", int(kit.ClosedPort(t).Port()), MountdUnreachable, 0, syscall.ECONNREFUSED, "mountport="},
	} {
		x.check(t)
	}
}

// check checks the error of Mount: its fields, its text, and that the result is zero.
func (x *failure) check(t *testing.T) {
	t.Helper()
	res, err := Mount(t.Context(), args(x.port))
	var e *Error
	if !errors.As(err, &e) || e.Kind != x.kind || e.Status != x.stat || x.is != nil && !errors.Is(err, x.is) {
		t.Errorf("%s: got error %v, want kind %v, status %v, cause %v", x.name, err, x.kind, x.stat, x.is)
		return
	}
	if e.Host != "127.0.0.1" || e.Port != x.port || e.Export != "/export" || e.Op != "MNT" {
		t.Errorf("%s: got error fields %+v", x.name, e)
	}
	text := err.Error()
	if !strings.Contains(text, x.text) || !strings.Contains(text, "MNT /export at 127.0.0.1:") ||
		strings.Contains(text, "\n") {
		t.Errorf("%s: got error %q, want %q in it", x.name, text, x.text)
	}
	if !reflect.DeepEqual(res, Result{}) {
		t.Errorf("%s: got result %+v with an error", x.name, res)
	}
}

// TestCallsEndInTime checks that a call ends at its timeout and at the end of its context.
func TestCallsEndInTime(t *testing.T) {
	silent := func(conn net.Conn) {
		rpctcp.ReadRecord(conn, nil, 1<<16)
		rpctcp.ReadRecord(conn, nil, 1<<16) // until the client closes the connection
	}
	slow := func(conn net.Conn) { // sends a reply of 4 KiB byte by byte
		call, err := rpctcp.ReadRecord(conn, nil, 1<<16)
		if err != nil {
			return
		}
		conn.Write(append([]byte("\x80\x00\x10\x00"), call[:4]...))
		for {
			if _, err := conn.Write([]byte{0}); err != nil {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	for name, serve := range map[string]func(net.Conn){"silent server": silent, "slow server": slow} {
		t.Run(name, func(t *testing.T) {
			a := args(peer(t, serve))
			a.Timeout = 100 * time.Millisecond
			_, err := Mount(t.Context(), a)
			var e *Error
			if !errors.As(err, &e) || e.Kind != MountdUnreachable || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("timeout: got error %v, want %v", err, context.DeadlineExceeded)
			}
			a.Timeout = time.Hour
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(50*time.Millisecond, cancel)
			_, err = Mount(ctx, a)
			if !errors.As(err, &e) || e.Kind != Canceled || !errors.Is(err, context.Canceled) {
				t.Errorf("canceled context: got error %v, want %v", err, context.Canceled)
			}
		})
	}
	a := args(0)
	a.PortmapPort, a.Timeout = peer(t, silent), 100*time.Millisecond
	_, err := Mount(t.Context(), a)
	var e *Error
	if !errors.As(err, &e) || e.Kind != PortmapUnreachable || e.Port != a.PortmapPort || e.Export != "/export" {
		t.Errorf("silent port mapper: got error %v, want %v at port %d", err, PortmapUnreachable, a.PortmapPort)
	}
}

func TestPortMapperReplies(t *testing.T) {
	mountPort := results(t, "00000000 00000004 01020304 00000000")
	web := peer(t, func(conn net.Conn) {
		conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
		rpctcp.ReadRecord(conn, nil, 1<<16)
	})
	for _, x := range []struct {
		name string
		port int
		kind Kind
		text string
	}{
		{"registered", results(t, fmt.Sprintf("%08x", mountPort)), 0, ""},
		{"not registered", results(t, "00000000"), NotRegistered, "mountport="},
		{"port 65536", results(t, "00010000"), Protocol, "65536"},
		{"port -1", results(t, "ffffffff"), Protocol, ""},
		{"no port", results(t, ""), Protocol, ""},
		{"closed", int(kit.ClosedPort(t).Port()), PortmapUnreachable, "start rpcbind"},
		{"HTTP", web, Protocol, ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			a := args(0)
			a.PortmapPort = x.port
			res, err := Mount(t.Context(), a)
			var e *Error
			switch {
			case x.kind == 0:
				if err != nil || res.Port != mountPort {
					t.Errorf("Mount: got result %+v, error %v; want port %d", res, err, mountPort)
				}
			case !errors.As(err, &e) || e.Kind != x.kind || !strings.Contains(err.Error(), x.text) ||
				!strings.Contains(err.Error(), "MNT /export at 127.0.0.1:"):
				t.Errorf("Mount: got error %v, want kind %v with %q", err, x.kind, x.text)
			}
			port, err := GetPort(t.Context(), a, 100005, 3)
			if x.kind == 0 && (err != nil || port != mountPort) {
				t.Errorf("GetPort: got port %d, error %v; want %d", port, err, mountPort)
			}
			if x.kind != 0 && (!errors.As(err, &e) || e.Kind != x.kind || e.Op != "GETPORT") {
				t.Errorf("GetPort: got error %v, want kind %v", err, x.kind)
			}
			found, err := FindPort(t.Context(), a)
			if x.kind == 0 && (err != nil || found != mountPort) ||
				x.kind != 0 && (!errors.As(err, &e) || e.Kind != x.kind) {
				t.Errorf("FindPort: got port %d, error %v; want port %d or kind %v", found, err, mountPort, x.kind)
			}
		})
	}
}

// TestExports checks decoded export lists, and the errors for lists that are not valid.
func TestExports(t *testing.T) {
	const a, b, client = "00000001 00000002 2f610000", "00000001 00000001 2f000000", "00000001 00000003 31393200"
	for _, x := range []struct {
		name, reply string
		want        []Export // nil for an error
	}{
		{"no exports", "00000000", []Export{}},
		{"two exports", a + client + client + "00000000" + b + "00000000 00000000",
			[]Export{{"/a", []string{"192", "192"}}, {"/", nil}}},
		{"no end of groups", a + client, nil},
		{"no end of exports", a + "00000000", nil},
		{"path of 4 GiB", "00000001 ffffffff", nil},
		{"path of 1025 bytes", "00000001 00000401" + strings.Repeat("2f", 1028) + "00000000 00000000", nil},
		{"group of 256 bytes", a + "00000001 00000100" + strings.Repeat("61", 256) + "00000000 00000000", nil},
		{"invalid boolean", "00000002", nil},
		{"empty reply", "", nil},
	} {
		got, err := Exports(t.Context(), args(results(t, x.reply)))
		var e *Error
		switch {
		case x.want == nil && (!errors.As(err, &e) || e.Kind != Protocol || e.Op != "EXPORT" || got != nil):
			t.Errorf("%s: got %v, error %v; want kind %v", x.name, got, err, Protocol)
		case x.want != nil && (err != nil || len(got) != len(x.want)):
			t.Errorf("%s: got %v, error %v; want %v", x.name, got, err, x.want)
		case len(x.want) > 0 && !reflect.DeepEqual(got, x.want):
			t.Errorf("%s: got %v, want %v", x.name, got, x.want)
		}
	}
}

func TestInvalidArguments(t *testing.T) {
	for name, change := range map[string]func(*Args){
		"no host":       func(a *Args) { a.Host = "" },
		"relative path": func(a *Args) { a.Export = "export" },
		"empty path":    func(a *Args) { a.Export = "" },
		"long path":     func(a *Args) { a.Export = "/" + strings.Repeat("x", maxPath) },
		"path with NUL": func(a *Args) { a.Export = "/a\x00b" },
		"port 65536":    func(a *Args) { a.Port = 65536 },
		"negative port": func(a *Args) { a.Port = -1 },
		"mapper port":   func(a *Args) { a.PortmapPort = 1 << 20 },
	} {
		a := args(1)
		change(&a)
		var e *Error
		if _, err := Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != Usage || e.Err == nil {
			t.Errorf("%s: got error %v, want kind %v", name, err, Usage)
		}
	}
	a := args(1)
	a.Host = "no-such-host.invalid"
	var e *Error
	if _, err := Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != UnknownHost {
		t.Errorf("unknown host: got error %v, want kind %v", err, UnknownHost)
	}
}

// TestDecodeRecovers checks that a panic of go-nfs-client becomes an error of decode.
func TestDecodeRecovers(t *testing.T) {
	_, err := decode(nil, func(*bytes.Reader) (int, error) { panic("invalid length") })
	if !errors.Is(err, sunrpc.ErrMalformed) || !strings.Contains(err.Error(), "panicked: invalid length") {
		t.Errorf("got error %v, want %v with the panic", err, sunrpc.ErrMalformed)
	}
}
