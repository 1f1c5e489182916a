package mountd

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

func TestMain(m *testing.M) { testutil.Main(m) }

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

// peer is a TCP server whose connections behave as serve says, for the length of the test. It
// returns its port.
func peer(t *testing.T, serve func(conn net.Conn)) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
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

// replies answers each call with what reply makes of its XID.
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

// results answers each call with success and these octets.
func results(t *testing.T, hexResults string) int {
	return replies(t, func(xid uint32) []byte {
		return append(sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success), unhex(hexResults)...)
	})
}

func closedPort(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

func args(port int) Args {
	return Args{Host: "127.0.0.1", Port: port, Export: "/export", Cred: &sunrpc.AuthSys{Stamp: 1, Machine: "me",
		UID: 2, GID: 3, GIDs: []uint32{4}},
		Timeout: 20 * time.Second}
}

// TestMountOnTheWire looks at the octets both ways, and at the port that the call comes from.
func TestMountOnTheWire(t *testing.T) {
	const call = `00000000 00000002 000186a5 00000003 00000001
		00000001 0000001c 00000001 00000002 6d650000 00000002 00000003 00000001 00000004
		00000000 00000000
		00000007 2f6578706f727400`
	calls := make(chan []byte, 1)
	froms := make(chan int, 1)
	port := peer(t, func(conn net.Conn) {
		froms <- conn.RemoteAddr().(*net.TCPAddr).Port
		rec, err := rpctcp.ReadRecord(conn, nil, 1<<16)
		if err != nil {
			t.Error(err)
			return
		}
		calls <- rec[4:]
		reply := sunrpc.AppendAcceptedReply(nil, binary.BigEndian.Uint32(rec), sunrpc.Success)
		rpctcp.WriteRecord(conn, append(reply,
			unhex("00000000 00000005 0102030405000000 00000002 00000001 00000006")...))
	})
	res, err := Mount(t.Context(), args(port))
	fh, _ := nfs3.NewFH([]byte{1, 2, 3, 4, 5})
	if err != nil || res.FH != fh || !reflect.DeepEqual(res.AuthFlavors, []uint32{1, 6}) || res.Port != port {
		t.Errorf("result %+v, error %v", res, err)
	}
	if err != nil {
		return
	}
	got, from := <-calls, <-froms
	if hex.EncodeToString(got) != hex.EncodeToString(unhex(call)) {
		t.Errorf("call\n got %x\nwant %x", got, unhex(call))
	}
	if os.Geteuid() == 0 && (from < minReserved || from > maxReserved) {
		t.Errorf("the call came from port %d, which is not reserved", from)
	}
}

func TestLists(t *testing.T) {
	port := results(t, `00000001 00000002 2f610000 00000001 00000004 68312f38 00000001 00000002 68320000 00000000
		00000001 00000002 2f620000 00000000 00000000`)
	exports, err := Exports(t.Context(), args(port))
	if want := []Export{{"/a", []string{"h1/8", "h2"}}, {"/b", nil}}; err != nil || !reflect.DeepEqual(exports, want) {
		t.Errorf("exports %q, error %v", exports, err)
	}
	port = results(t, "00000001 00000002 68310000 00000002 2f610000 00000000")
	mounts, err := Dump(t.Context(), args(port))
	if want := []Entry{{"h1", "/a"}}; err != nil || !reflect.DeepEqual(mounts, want) {
		t.Errorf("mounts %q, error %v", mounts, err)
	}
	port = results(t, "")
	if err := Null(t.Context(), args(port)); err != nil {
		t.Error(err)
	}
	if err := Unmount(t.Context(), args(port)); err != nil {
		t.Error(err)
	}
}

// TestBadServers are servers that refuse, fail and lie: each is an error of its kind, in bounded
// time, and the text says whom and what.
func TestBadServers(t *testing.T) {
	success := func(body string) func(t *testing.T) int {
		return func(t *testing.T) int { return results(t, body) }
	}
	reply := func(f func(xid uint32) []byte) func(t *testing.T) int {
		return func(t *testing.T) int { return replies(t, f) }
	}
	raw := func(send string) func(t *testing.T) int {
		return func(t *testing.T) int {
			return peer(t, func(conn net.Conn) {
				conn.Write([]byte(send))
				rpctcp.ReadRecord(conn, nil, 1<<16) // lets the client end it
				rpctcp.ReadRecord(conn, nil, 1<<16)
			})
		}
	}
	for _, x := range []struct {
		name string
		port func(t *testing.T) int
		kind Kind
		stat Stat
		is   error
		text string
	}{
		{"no such export", success("00000002"), NoExport, MNT3ErrNoEnt, syscall.ENOENT, "MNT3ERR_NOENT"},
		{"not a directory", success("00000014"), NoExport, MNT3ErrNotDir, syscall.ENOENT, "MNT3ERR_NOTDIR"},
		{"refused", success("0000000d"), Refused, MNT3ErrAcces, syscall.EACCES, "MNT3ERR_ACCES"},
		{"not owner", success("00000001"), Refused, MNT3ErrPerm, syscall.EACCES, "MNT3ERR_PERM"},
		{"server fault", success("00002716"), OtherStatus, MNT3ErrServerFault, nil, "MNT3ERR_SERVERFAULT"},
		{"status 77", success("0000004d"), Protocol, 77, nil, "mountstat3 77, which MOUNT version 3 does not have"},
		{"no results", success(""), Protocol, 0, sunrpc.ErrMalformed, "speak the protocol"},
		{"empty handle", success("00000000 00000000 00000000"), Protocol, 0, sunrpc.ErrMalformed, "empty file handle"},
		{"handle of 65", success("00000000 00000041" + strings.Repeat("00", 68) + "00000000"), Protocol, 0,
			sunrpc.ErrMalformed, ""},
		{"handle of 4 GiB", success("00000000 ffffffff 00000000"), Protocol, 0, sunrpc.ErrMalformed, ""},
		{"4 Gi flavors", success("00000000 00000004 01020304 ffffffff 00000001"), Protocol, 0, sunrpc.ErrMalformed,
			"flavors"},
		{"flavors cut", success("00000000 00000004 01020304 00000002 00000001"), Protocol, 0, sunrpc.ErrMalformed, ""},
		{"credential refused", reply(func(xid uint32) []byte {
			return sunrpc.AppendDeniedReply(nil, xid,
				sunrpc.AuthTooWeak)
		}), Refused, 0, nil, "AUTH_TOOWEAK"},
		{"another RPC version", reply(func(xid uint32) []byte { return sunrpc.AppendMismatchReply(nil, xid) }),
			Protocol, 0, nil, "RPC_MISMATCH"},
		{"no MOUNT", reply(func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid,
				sunrpc.ProgUnavail)
		}), NotRegistered, 0, nil, "PROG_UNAVAIL"},
		{"no MOUNT 3", reply(func(xid uint32) []byte { return sunrpc.AppendProgMismatchReply(nil, xid, 1, 2) }),
			Protocol, 0, nil, "versions 1 to 2"},
		{"garbage arguments", reply(func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid,
				sunrpc.GarbageArgs)
		}), Protocol, 0, nil, "GARBAGE_ARGS"},
		{"another XID", reply(func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid+1,
				sunrpc.Success)
		}), Protocol, 0, sunrpc.ErrMalformed, "XID"},
		{"cut in the verifier", reply(func(xid uint32) []byte {
			return sunrpc.AppendAcceptedReply(nil, xid,
				sunrpc.Success)[:14]
		}), Protocol, 0, sunrpc.ErrMalformed, ""},
		{"verifier of 4 GiB", reply(func(xid uint32) []byte {
			b := sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success)
			binary.BigEndian.PutUint32(b[16:], 0xffffffff)
			return b
		}), Protocol, 0, sunrpc.ErrMalformed, ""},
		{"empty record", reply(func(uint32) []byte { return nil }), Protocol, 0, sunrpc.ErrMalformed, ""},
		{"HTTP", raw("HTTP/1.1 400 Bad Request\r\n\r\n"), Protocol, 0, rpctcp.ErrRecord, "speak the protocol"},
		{"record of 2 GiB", raw("\xff\xff\xff\xff"), Protocol, 0, rpctcp.ErrRecord, ""},
		{"fragments for ever", raw(strings.Repeat("\x00\x00\x00\x00", 1000)), Protocol, 0, rpctcp.ErrRecord, ""},
		{"random octets", raw("\x12\x9e\x61\x07\xaf\x08\x77\xfe\x00\x13\x5b\x20"), Protocol, 0, rpctcp.ErrRecord, ""},
		{"closed port", closedPort, MountdUnreachable, 0, syscall.ECONNREFUSED, "mountport="},
	} {
		t.Run(x.name, func(t *testing.T) {
			port := x.port(t)
			res, err := Mount(t.Context(), args(port))
			var e *Error
			if !errors.As(err, &e) || e.Kind != x.kind || e.Status != x.stat || x.is != nil && !errors.Is(err, x.is) {
				t.Fatalf("result %+v, error %#v (%v)", res, err, err)
			}
			if e.Host != "127.0.0.1" || e.Port != port || e.Export != "/export" || e.Op != "MNT" {
				t.Errorf("error is about %s of %s at %s port %d", e.Op, e.Export, e.Host, e.Port)
			}
			text := err.Error()
			if !strings.Contains(text, x.text) || !strings.Contains(text, "MNT /export at 127.0.0.1:") ||
				strings.Contains(text, "\n") {
				t.Errorf("text %q lacks %q", text, x.text)
			}
			if !reflect.DeepEqual(res, Result{}) {
				t.Errorf("result %+v beside an error", res)
			}
		})
	}
}

// TestHanging servers are left in time, whether the time is the call's own or its context ends.
func TestHanging(t *testing.T) {
	hang := func(conn net.Conn) {
		rpctcp.ReadRecord(conn, nil, 1<<16)
		rpctcp.ReadRecord(conn, nil, 1<<16) // until the client closes
	}
	drip := func(conn net.Conn) { // sends a reply of 4 KiB byte by byte
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
	for name, serve := range map[string]func(net.Conn){"hangs": hang, "drips": drip} {
		t.Run(name, func(t *testing.T) {
			a := args(peer(t, serve))
			a.Timeout = 100 * time.Millisecond
			_, err := Mount(t.Context(), a)
			var e *Error
			if !errors.As(err, &e) || e.Kind != MountdUnreachable || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("in time: error is %v", err)
			}
			a.Timeout = time.Hour
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(50*time.Millisecond, cancel)
			_, err = Mount(ctx, a)
			if !errors.As(err, &e) || e.Kind != Canceled || !errors.Is(err, context.Canceled) {
				t.Errorf("canceled: error is %v", err)
			}
		})
	}
	a := args(0)
	a.PortmapPort, a.Timeout = peer(t, hang), 100*time.Millisecond
	_, err := Mount(t.Context(), a)
	var e *Error
	if !errors.As(err, &e) || e.Kind != PortmapUnreachable || e.Port != a.PortmapPort || e.Export != "/export" {
		t.Errorf("a port mapper that hangs: %v", err)
	}
}

func TestPortMapper(t *testing.T) {
	mountPort := results(t, "00000000 00000004 01020304 00000000")
	for _, x := range []struct {
		name string
		port int
		kind Kind
		text string
	}{
		{"registered", results(t, hex.EncodeToString(binary.BigEndian.AppendUint32(nil, uint32(mountPort)))), 0, ""},
		{"not registered", results(t, "00000000"), NotRegistered, "mountport="},
		{"port 65536", results(t, "00010000"), Protocol, "65536"},
		{"port -1", results(t, "ffffffff"), Protocol, ""},
		{"no port", results(t, ""), Protocol, ""},
		{"closed", closedPort(t), PortmapUnreachable, "start rpcbind"},
		{"HTTP", peer(t, func(conn net.Conn) {
			conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			rpctcp.ReadRecord(conn, nil, 1<<16)
		}), Protocol, ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			a := args(0)
			a.PortmapPort = x.port
			res, err := Mount(t.Context(), a)
			var e *Error
			switch {
			case x.kind == 0:
				if err != nil || res.Port != mountPort {
					t.Errorf("result %+v, error %v", res, err)
				}
			case !errors.As(err, &e) || e.Kind != x.kind || !strings.Contains(err.Error(), x.text) ||
				!strings.Contains(err.Error(), "MNT /export at 127.0.0.1:"):
				t.Errorf("error is %v", err)
			}
			port, err := GetPort(t.Context(), a, 100005, 3)
			if x.kind == 0 && (err != nil || port != mountPort) {
				t.Errorf("port %d, error %v", port, err)
			}
			if x.kind != 0 && (!errors.As(err, &e) || e.Kind != x.kind || e.Op != "GETPORT") {
				t.Errorf("GETPORT: error is %v", err)
			}
		})
	}
}

func TestBadArguments(t *testing.T) {
	for name, change := range map[string]func(*Args){
		"no host":       func(a *Args) { a.Host = "" },
		"relative path": func(a *Args) { a.Export = "export" },
		"empty path":    func(a *Args) { a.Export = "" },
		"long path":     func(a *Args) { a.Export = "/" + strings.Repeat("x", maxPath) },
		"path with NUL": func(a *Args) { a.Export = "/a\x00b" },
		"port 65536":    func(a *Args) { a.Port = 65536 },
		"negative port": func(a *Args) { a.Port = -1 },
		"mapper's port": func(a *Args) { a.PortmapPort = 1 << 20 },
	} {
		a := args(1)
		change(&a)
		var e *Error
		if _, err := Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != Usage || e.Err == nil {
			t.Errorf("%s: error is %v", name, err)
		}
	}
	a := args(1)
	a.Host = "no-such-host.invalid"
	var e *Error
	if _, err := Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != UnknownHost {
		t.Errorf("unknown host: error is %v", err)
	}
}

// TestDecodeRecovers checks that a panic of go-nfs-client becomes an error.
func TestDecodeRecovers(t *testing.T) {
	_, err := decode(nil, func(*bytes.Reader) (int, error) { panic("invalid length") })
	if !errors.Is(err, sunrpc.ErrMalformed) || !strings.Contains(err.Error(), "panicked: invalid length") {
		t.Errorf("got error %v, want %v with the panic", err, sunrpc.ErrMalformed)
	}
}
