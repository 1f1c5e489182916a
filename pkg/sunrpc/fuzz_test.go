package sunrpc

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/vmware/go-nfs-client/nfs/rpc"

	goxdr "github.com/rasky/go-xdr/xdr2"
)

// The oracle is an independent implementation: the RPC types of go-nfs-client and its XDR package.

// oracleLimit limits the memory of the oracle, which allocates the length in the message.
const oracleLimit = 4096

type oracleCall struct {
	XID, MsgType uint32
	rpc.Header
}

type oracleAuthSys struct {
	Stamp    uint32
	Machine  string
	UID, GID uint32
	GIDs     []uint32
}

type oracleAccepted struct {
	XID, MsgType, ReplyStat uint32
	Verf                    rpc.Auth
	AcceptStat              uint32
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := goxdr.Marshal(&b, v); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func FuzzParseReply(f *testing.F) {
	f.Add(AppendAcceptedReply(nil, 1, Success))
	f.Add(append(AppendAcceptedReply(nil, 1, Success), 0, 0, 0, 5))
	f.Add(AppendProgMismatchReply(nil, 2, 3, 4))
	f.Add(AppendMismatchReply(nil, 3))
	f.Add(AppendDeniedReply(nil, 4, AuthTooWeak))
	f.Add(unhex("0a0b0c0d 00000001 00000000 00000002 00000005 aabbccddee000000 00000000 11223344"))
	f.Fuzz(func(t *testing.T, b []byte) {
		xid, results, err := ParseReply(b)
		if err != nil {
			var accept *AcceptError
			var denied *DeniedError
			if results != nil || err.Error() == "" || !errors.Is(err, ErrMalformed) && !errors.As(err, &accept) &&
				!errors.As(err, &denied) {
				t.Fatalf("got results %x with error %v", results, err)
			}
		}
		var want oracleAccepted
		n, oracleErr := goxdr.UnmarshalLimited(bytes.NewReader(b), &want, oracleLimit)
		if err != nil {
			if oracleErr == nil && want.MsgType == MsgReply && want.ReplyStat == MsgAccepted &&
				want.AcceptStat == uint32(Success) && len(want.Verf.Body) <= MaxAuthBody {
				t.Fatalf("got error %v, want %+v", err, want)
			}
			return
		}
		err = oracleErr
		if err != nil || want.XID != xid || want.MsgType != MsgReply || want.ReplyStat != MsgAccepted ||
			want.AcceptStat != uint32(Success) {
			t.Fatalf("got no error; oracle: %+v, error %v", want, err)
		}
		if !bytes.Equal(results, b[n:]) {
			t.Fatalf("got results at offset %d, want %d", len(b)-len(results), n)
		}
	})
}

func FuzzParseCall(f *testing.F) {
	f.Add(AppendCall(nil, 1, 100003, 3, 6, AppendAuthNone(nil)))
	f.Add(append(AppendCall(nil, 1, 100003, 3, 6, AppendAuthSys(nil, &AuthSys{Machine: "m", GIDs: []uint32{1, 2}})),
		1, 2, 3, 4))
	f.Add(unhex("01020304 00000000 00000003"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, args, err := ParseCall(b)
		if err != nil {
			return
		}
		var want oracleCall
		n, err := goxdr.UnmarshalLimited(bytes.NewReader(b), &want, oracleLimit)
		if err != nil || want.MsgType != MsgCall || want.Rpcvers != RPCVersion {
			t.Fatalf("got no error; oracle: %+v, error %v", want, err)
		}
		got := CallHeader{want.XID, want.Prog, want.Vers, want.Proc, want.Cred.Flavor, want.Cred.Body,
			want.Verf.Flavor, want.Verf.Body}
		if !reflect.DeepEqual(normal(h), normal(got)) || !bytes.Equal(args, b[n:]) {
			t.Fatalf("got header %+v, want %+v", h, got)
		}
	})
}

// normal replaces nil slices by empty slices.
func normal(h CallHeader) CallHeader {
	h.Cred, h.Verf = append([]byte{}, h.Cred...), append([]byte{}, h.Verf...)
	return h
}

func FuzzAppendCall(f *testing.F) {
	f.Add(uint32(1), uint32(100003), uint32(3), uint32(6), uint32(9), "machine", uint32(1000), uint32(100),
		[]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, xid, prog, vers, proc, stamp uint32, machine string, uid, gid uint32, groups []byte) {
		a := AuthSys{Stamp: stamp, Machine: machine, UID: uid, GID: gid}
		for _, g := range groups {
			a.GIDs = append(a.GIDs, uint32(g)<<uint(g%25))
		}
		limited := oracleAuthSys(a)
		limited.Machine = machine[:min(len(machine), MaxMachineName)]
		limited.GIDs = a.GIDs[:min(len(a.GIDs), MaxGIDs)]
		body := marshal(t, &limited)
		want := marshal(t, &oracleCall{xid, MsgCall, rpc.Header{Rpcvers: RPCVersion, Prog: prog, Vers: vers, Proc: proc,
			Cred: rpc.Auth{Flavor: FlavorSys, Body: body}, Verf: rpc.AuthNull}})
		got := AppendCall(nil, xid, prog, vers, proc, AppendAuthSys(nil, &a))
		if !bytes.Equal(got, want) {
			t.Fatalf("call\n got %x\nwant %x", got, want)
		}
	})
}
