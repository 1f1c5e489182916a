package sunrpc

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// unhex decodes hexadecimal digits and ignores white space.
func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

const (
	noneHex = "00000000 00000000"
	// sysHex is an AUTH_SYS credential of root on "host5" with the groups 0 and 20.
	sysHex = "00000001 00000024 00000063 00000005 686f737435000000 00000000 00000000 00000002 00000000 00000014"
)

func TestAppendCall(t *testing.T) {
	none := AppendAuthNone(nil)
	sys := AppendAuthSys(nil, &AuthSys{Stamp: 0x63, Machine: "host5", GIDs: []uint32{0, 20}})
	for _, x := range []struct {
		name string
		cred []byte
		want string
	}{
		{"AUTH_NONE", none, "01020304 00000000 00000002 000186a3 00000003 00000006" + noneHex + noneHex},
		{"AUTH_SYS", sys, "01020304 00000000 00000002 000186a3 00000003 00000006" + sysHex + noneHex},
	} {
		got := AppendCall([]byte("before"), 0x01020304, 100003, 3, 6, x.cred)
		if want := append([]byte("before"), unhex(x.want)...); !bytes.Equal(got, want) {
			t.Errorf("%s\n got %x\nwant %x", x.name, got, want)
		}
		if n := CallSize(x.cred); n != len(unhex(x.want)) {
			t.Errorf("%s: got CallSize %d, want %d", x.name, n, len(unhex(x.want)))
		}
		h, args, err := ParseCall(append(got[len("before"):], 9, 8, 7, 6))
		if err != nil || h.XID != 0x01020304 || h.Prog != 100003 || h.Vers != 3 || h.Proc != 6 ||
			!bytes.Equal(args, []byte{9, 8, 7, 6}) {
			t.Errorf("%s: ParseCall: got header %+v, arguments %x, error %v", x.name, h, args, err)
		}
	}
}

func TestAuthSysIsTruncatedToLimits(t *testing.T) {
	many := make([]uint32, 20)
	for i := range many {
		many[i] = uint32(i)
	}
	m := strings.Repeat("m", 300)
	for _, x := range []struct {
		name     string
		in, want AuthSys
		size     int
	}{
		{"plain", AuthSys{1, "host", 2, 3, []uint32{4}}, AuthSys{1, "host", 2, 3, []uint32{4}}, 36},
		{"empty", AuthSys{}, AuthSys{}, 28},
		{"too many groups", AuthSys{GIDs: many}, AuthSys{GIDs: many[:16]}, 28 + 64},
		{"name too long", AuthSys{Machine: m, GIDs: many}, AuthSys{Machine: m[:255], GIDs: many[:16]}, 28 + 64 + 256},
	} {
		b := AppendAuthSys(nil, &x.in)
		if len(b) != x.size {
			t.Errorf("%s: got %d bytes, want %d", x.name, len(b), x.size)
		}
		call := AppendCall(nil, 1, 2, 3, 4, b)
		h, _, err := ParseCall(call)
		if err != nil || h.CredFlavor != FlavorSys {
			t.Errorf("%s: got flavor %d, error %v; want %d", x.name, h.CredFlavor, err, FlavorSys)
		}
		d := NewDecoder(h.Cred)
		got := AuthSys{d.Uint32(), string(d.Opaque(MaxMachineName)), d.Uint32(), d.Uint32(), nil}
		for range d.Uint32() {
			got.GIDs = append(got.GIDs, d.Uint32())
		}
		if d.Err() != nil || d.Remaining() != 0 || !reflect.DeepEqual(got, x.want) {
			t.Errorf("%s: got %+v, error %v; want %+v", x.name, got, d.Err(), x.want)
		}
		if uid := CredUID(b); uid != x.want.UID {
			t.Errorf("%s: got uid %d, want %d", x.name, uid, x.want.UID)
		}
		for _, other := range [][]byte{nil, b[:16], AppendAuthNone(nil), append([]byte{1}, b[1:]...)} {
			if uid := CredUID(other); uid != Nobody {
				t.Errorf("%s: credential %x: got uid %d, want %d", x.name, other, uid, Nobody)
			}
		}
	}
}

func TestParseReply(t *testing.T) {
	const head = "0a0b0c0d 00000001 "
	const accepted, gss = head + "00000000" + noneHex, head + "00000000 00000006"
	progMismatch := &AcceptError{ProgMismatch, 2, 4}
	rpcMismatch := &DeniedError{Stat: RPCMismatch, Low: 3, High: 5}
	tooWeak := &DeniedError{Stat: AuthError, Auth: AuthTooWeak}
	unknownAuth := &DeniedError{Stat: AuthError, Auth: 255}
	for _, x := range []struct {
		name    string
		in      string
		results string
		err     error // ErrMalformed stands for every error that wraps it
		text    string
	}{
		{"success", accepted + "00000000 11223344", "11223344", nil, ""},
		{"no results", accepted + "00000000", "", nil, ""},
		{"verifier of 5", head + "00000000 00000002 00000005 aabbccddee000000 00000000 11223344", "11223344", nil, ""},
		{"verifier of 400", gss + "00000190" + strings.Repeat("aa", 400) + "00000000 11223344", "11223344", nil, ""},
		{"verifier of 401", gss + "00000191" + strings.Repeat("aa", 404) + "00000000", "", ErrMalformed, ""},
		{"verifier of 4 GiB", head + "00000000 00000006 ffffffff 00000000", "", ErrMalformed, ""},
		{"verifier after the end", head + "00000000 00000006 00000020 00000000", "", ErrMalformed, ""},
		{"PROG_UNAVAIL", accepted + "00000001", "", &AcceptError{Stat: ProgUnavail}, "PROG_UNAVAIL"},
		{"PROG_MISMATCH", accepted + "00000002 00000002 00000004", "", progMismatch, "versions 2 to 4"},
		{"PROG_MISMATCH cut", accepted + "00000002 00000002", "", ErrMalformed, ""},
		{"PROC_UNAVAIL", accepted + "00000003", "", &AcceptError{Stat: ProcUnavail}, "PROC_UNAVAIL"},
		{"GARBAGE_ARGS", accepted + "00000004", "", &AcceptError{Stat: GarbageArgs}, "GARBAGE_ARGS"},
		{"SYSTEM_ERR", accepted + "00000005", "", &AcceptError{Stat: SystemErr}, "SYSTEM_ERR"},
		{"accept_stat 6", accepted + "00000006", "", ErrMalformed, ""},
		{"RPC_MISMATCH", head + "00000001 00000000 00000003 00000005", "", rpcMismatch, "versions 3 to 5"},
		{"RPC_MISMATCH cut", head + "00000001 00000000 00000003", "", ErrMalformed, ""},
		{"AUTH_ERROR", head + "00000001 00000001 00000005", "", tooWeak, "AUTH_TOOWEAK"},
		{"AUTH_ERROR unknown", head + "00000001 00000001 000000ff", "", unknownAuth, "auth_stat 255"},
		{"AUTH_ERROR cut", head + "00000001 00000001", "", ErrMalformed, ""},
		{"reject_stat 2", head + "00000001 00000002 00000000 00000000", "", ErrMalformed, ""},
		{"reply_stat 2", head + "00000002", "", ErrMalformed, ""},
		{"call", "0a0b0c0d 00000000 00000002 000186a3 00000003 00000006" + noneHex + noneHex, "", ErrMalformed, ""},
		{"msg_type 2", "0a0b0c0d 00000002 00000000" + noneHex + "00000000", "", ErrMalformed, ""},
		{"xid only", "0a0b0c0d", "", ErrMalformed, ""},
		{"empty", "", "", ErrMalformed, ""},
	} {
		xid, results, err := ParseReply(unhex(x.in))
		if x.in != "" && xid != 0x0a0b0c0d || !bytes.Equal(results, unhex(x.results)) {
			t.Errorf("%s: got xid %#x, results %x; want 0x0a0b0c0d, %s", x.name, xid, results, x.results)
		}
		switch {
		case x.err == ErrMalformed:
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("%s: got error %v, want %v", x.name, err, ErrMalformed)
			}
		case !reflect.DeepEqual(err, x.err):
			t.Errorf("%s: got error %#v, want %#v", x.name, err, x.err)
		case err != nil && !strings.Contains(err.Error(), x.text):
			t.Errorf("%s: got error %q, want %q in it", x.name, err, x.text)
		}
	}
}

func TestAppendReplies(t *testing.T) {
	const accepted = "00000007 00000001 00000000" + noneHex
	for _, x := range []struct {
		name string
		got  []byte
		want string
	}{
		{"accepted", AppendAcceptedReply(nil, 7, Success), accepted + "00000000"},
		{"garbage", AppendAcceptedReply(nil, 7, GarbageArgs), accepted + "00000004"},
		{"program mismatch", AppendProgMismatchReply(nil, 7, 3, 4), accepted + "00000002 00000003 00000004"},
		{"mismatch", AppendMismatchReply(nil, 7), "00000007 00000001 00000001 00000000 00000002 00000002"},
		{"denied", AppendDeniedReply(nil, 7, AuthTooWeak), "00000007 00000001 00000001 00000001 00000005"},
	} {
		if !bytes.Equal(x.got, unhex(x.want)) {
			t.Errorf("%s\n got %x\nwant %x", x.name, x.got, unhex(x.want))
		}
	}
	if n := len(AppendAcceptedReply(nil, 7, Success)); n != AcceptedReplySize {
		t.Errorf("accepted reply: got %d bytes, want AcceptedReplySize %d", n, AcceptedReplySize)
	}
}

// TestMaxReplyHeader compares MaxReplyHeader with a reply whose verifier has 400 bytes.
func TestMaxReplyHeader(t *testing.T) {
	reply := AppendUint32(AppendUint32(AppendUint32(nil, 7), MsgReply), MsgAccepted)
	reply = AppendOpaque(AppendUint32(reply, FlavorGSS), make([]byte, MaxAuthBody))
	reply = AppendUint32(reply, uint32(Success))
	if _, results, err := ParseReply(reply); err != nil || len(results) != 0 || len(reply) != MaxReplyHeader {
		t.Errorf("got %d bytes, results %x, error %v; want MaxReplyHeader %d", len(reply), results, err, MaxReplyHeader)
	}
}

// TestUnknownStatusIsPrinted checks the texts at the end of each list of names.
func TestUnknownStatusIsPrinted(t *testing.T) {
	for _, x := range []struct{ got, want string }{
		{SystemErr.String(), "SYSTEM_ERR"},
		{AcceptStat(6).String(), "accept_stat 6"},
		{AuthError.String(), "AUTH_ERROR"},
		{RejectStat(2).String(), "reject_stat 2"},
		{GSSCtxProblem.String(), "RPCSEC_GSS_CTXPROBLEM"},
		{AuthStat(15).String(), "auth_stat 15"},
		{(&AcceptError{Stat: 6}).Error(), "RPC: call not executed: accept_stat 6"},
		{(&DeniedError{Stat: 2}).Error(), "RPC: denied: reject_stat 2"},
	} {
		if x.got != x.want {
			t.Errorf("got %q, want %q", x.got, x.want)
		}
	}
}

func TestParseCallRejectsInvalidCalls(t *testing.T) {
	call := unhex("01020304 00000000 00000002 000186a3 00000003 00000006" + sysHex + noneHex)
	for n := range call {
		if _, _, err := ParseCall(call[:n]); !errors.Is(err, ErrMalformed) {
			t.Errorf("first %d of %d bytes: got error %v, want %v", n, len(call), err, ErrMalformed)
		}
	}
	if h, _, err := ParseCall(unhex("01020304 00000001 00000002")); !errors.Is(err, ErrMalformed) ||
		h.XID != 0x01020304 {
		t.Errorf("reply: got header %+v, error %v; want %v", h, err, ErrMalformed)
	}
	var denied *DeniedError
	if h, _, err := ParseCall(unhex("01020304 00000000 00000003")); !errors.As(err, &denied) ||
		denied.Stat != RPCMismatch || h.XID != 0x01020304 {
		t.Errorf("RPC version 3: got header %+v, error %v; want RPC_MISMATCH", h, err)
	}
	long := append(call[:24:24], unhex("00000001 00000191"+strings.Repeat("00", 404)+noneHex)...)
	if _, _, err := ParseCall(long); !errors.Is(err, ErrMalformed) {
		t.Errorf("credential of 401 bytes: got error %v, want %v", err, ErrMalformed)
	}
}

func TestDecoderReadsAppendedItems(t *testing.T) {
	in := AppendUint32(nil, 0xfffefdfc)
	in = AppendUint64(in, 0x0102030405060708)
	in = AppendBool(AppendBool(in, true), false)
	in = AppendOpaque(in, []byte("abcde"))
	in = AppendString(in, "xyz")
	in = AppendFixed(in, []byte{9, 9})
	want := unhex(`fffefdfc 0102030405060708 00000001 00000000 00000005 6162636465000000 00000003 78797a00 09090000`)
	if !bytes.Equal(in, want) {
		t.Fatalf("encoded\n got %x\nwant %x", in, want)
	}
	d := NewDecoder(in)
	if a, b := d.Uint32(), d.Uint64(); a != 0xfffefdfc || b != 0x0102030405060708 {
		t.Errorf("got integers %x, %x", a, b)
	}
	if a, b := d.Bool(), d.Bool(); !a || b {
		t.Errorf("got booleans %v, %v; want true, false", a, b)
	}
	if d.Offset() != 20 || d.Remaining() != len(in)-20 || len(d.Rest()) != d.Remaining() {
		t.Errorf("got offset %d, %d bytes unread; want 20, %d", d.Offset(), d.Remaining(), len(in)-20)
	}
	if a, b, c := d.Opaque(5), d.Opaque(3), d.Fixed(2); string(a) != "abcde" || string(b) != "xyz" ||
		string(c) != "\x09\x09" {
		t.Errorf("got opaques %q, %q, %q", a, b, c)
	}
	if d.Err() != nil || d.Remaining() != 0 {
		t.Errorf("got error %v, %d bytes unread; want none", d.Err(), d.Remaining())
	}
	if d.Uint32() != 0 || !errors.Is(d.Err(), ErrMalformed) {
		t.Errorf("read after the end: got error %v, want %v", d.Err(), ErrMalformed)
	}
}

func TestDecoderKeepsFirstError(t *testing.T) {
	for _, x := range []struct {
		name string
		in   string
		read func(d *Decoder)
	}{
		{"boolean 2", "00000002", func(d *Decoder) { d.Bool() }},
		{"short word", "000000", func(d *Decoder) { d.Uint32() }},
		{"short hyper", "00000000 000000", func(d *Decoder) { d.Uint64() }},
		{"opaque over its maximum", "00000005 0000000000 000000", func(d *Decoder) { d.Opaque(4) }},
		{"opaque after the end", "00000005 00000000", func(d *Decoder) { d.Opaque(400) }},
		{"opaque without its pad", "00000005 0000000000", func(d *Decoder) { d.Opaque(400) }},
		{"opaque of 4 GiB", "ffffffff 00000000", func(d *Decoder) { d.Opaque(1 << 40) }},
		{"negative length", "00000000", func(d *Decoder) { d.Fixed(-1) }},
	} {
		d := NewDecoder(unhex(x.in))
		x.read(&d)
		if !errors.Is(d.Err(), ErrMalformed) {
			t.Errorf("%s: got error %v, want %v", x.name, d.Err(), ErrMalformed)
		}
		first := d.Err()
		d.Fail(errors.New("later"))
		if d.Uint32(); d.Err() != first {
			t.Errorf("%s: got error %v after a second error, want %v", x.name, d.Err(), first)
		}
	}
}

func TestCodecDoesNotAllocate(t *testing.T) {
	cred := AppendAuthSys(nil, &AuthSys{Machine: "host", GIDs: []uint32{1, 2, 3}})
	sys := AuthSys{Machine: "host", GIDs: []uint32{1, 2, 3}}
	buf := make([]byte, 0, 1024)
	reply := append(AppendAcceptedReply(nil, 1, Success), 1, 2, 3, 4)
	call := AppendCall(nil, 1, 2, 3, 4, cred)
	invalid := []byte{0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 9}
	for name, f := range map[string]func(){
		"AppendCall":          func() { AppendCall(buf, 1, 2, 3, 4, cred) },
		"AppendAuthSys":       func() { AppendAuthSys(buf, &sys) },
		"ParseReply":          func() { ParseReply(reply) },
		"ParseReply, invalid": func() { ParseReply(invalid) },
		"ParseCall":           func() { ParseCall(call) },
		"AppendAcceptedReply": func() { AppendAcceptedReply(buf, 1, Success) },
		"AppendOpaque":        func() { AppendOpaque(buf, cred) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: got %v allocations, want none", name, n)
		}
	}
}

// A testKeeper has one kept call, and keeps one.
type testKeeper struct {
	context.Context
	earlier, kept CallID
}

func (k *testKeeper) KeptCall(*Message) (CallID, bool) { return k.earlier, true }

func (k *testKeeper) KeepCall(_ *Message, id CallID) { k.kept = id }

// TestCallKeeperIsTheContext checks contexts with and without a CallKeeper, and a derived one.
func TestCallKeeperIsTheContext(t *testing.T) {
	id := CallID{Conn: 3, XID: 9}
	for _, derived := range []bool{false, true} {
		k := &testKeeper{Context: t.Context(), earlier: id}
		var ctx context.Context = k
		var want CallID
		if derived {
			ctx = context.WithoutCancel(k)
		} else {
			want = id
		}
		got, ok := KeptCall(ctx, &Message{})
		if ok == derived || got != want {
			t.Errorf("KeptCall, derived context %v: got %v, %v; want %v, %v", derived, got, ok, want, !derived)
		}
		if KeepCall(ctx, &Message{}, id); k.kept != want {
			t.Errorf("KeepCall, derived context %v: got %v, want %v", derived, k.kept, want)
		}
	}
}
