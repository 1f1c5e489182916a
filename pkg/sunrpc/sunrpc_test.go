package sunrpc

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// unhex decodes hexadecimal text with white space.
func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

const (
	noneHex = "00000000 00000000"
	// A credential of root on "host5", groups 0 and 20.
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
			t.Errorf("%s: CallSize is %d, want %d", x.name, n, len(unhex(x.want)))
		}
		h, args, err := ParseCall(append(got[len("before"):], 9, 8, 7, 6))
		if err != nil || h.XID != 0x01020304 || h.Prog != 100003 || h.Vers != 3 || h.Proc != 6 ||
			!bytes.Equal(args, []byte{9, 8, 7, 6}) {
			t.Errorf("%s: parsed %+v, arguments %x, error %v", x.name, h, args, err)
		}
	}
}

func TestAuthSys(t *testing.T) {
	many := make([]uint32, 20)
	for i := range many {
		many[i] = uint32(i)
	}
	for _, x := range []struct {
		name     string
		in, want AuthSys
		size     int
	}{
		{"plain", AuthSys{1, "host", 2, 3, []uint32{4}}, AuthSys{1, "host", 2, 3, []uint32{4}}, 36},
		{"empty", AuthSys{}, AuthSys{}, 28},
		{"too many groups", AuthSys{GIDs: many}, AuthSys{GIDs: many[:16]}, 28 + 64},
		{"name too long", AuthSys{Machine: strings.Repeat("m", 300), GIDs: many},
			AuthSys{Machine: strings.Repeat("m", 255), GIDs: many[:16]}, MaxAuthSysSize},
	} {
		b := AppendAuthSys(nil, &x.in)
		if len(b) != x.size {
			t.Errorf("%s: %d octets, want %d", x.name, len(b), x.size)
		}
		call := AppendCall(nil, 1, 2, 3, 4, b)
		h, _, err := ParseCall(call)
		if err != nil || h.CredFlavor != FlavorSys {
			t.Errorf("%s: flavor %d, error %v", x.name, h.CredFlavor, err)
		}
		got, err := ParseAuthSys(h.Cred)
		if err != nil || !reflect.DeepEqual(got, x.want) {
			t.Errorf("%s: %+v, error %v; want %+v", x.name, got, err, x.want)
		}
	}
}

func TestParseAuthSysRefuses(t *testing.T) {
	for name, body := range map[string]string{
		"empty":                    "",
		"name beyond the end":      "00000063 00000009 686f7374 00000000 00000000 00000000",
		"name of 256":              "00000063 00000100" + strings.Repeat("61", 256) + "00000000 00000000 00000000",
		"17 groups":                "00000063 00000000 00000000 00000000 00000011" + strings.Repeat("00000001", 17),
		"2 groups stated, 1 there": "00000063 00000000 00000000 00000000 00000002 00000001",
		"1 group stated, 2 there":  "00000063 00000000 00000000 00000000 00000001 00000001 00000002",
		"4 Gi groups":              "00000063 00000000 00000000 00000000 ffffffff",
	} {
		if a, err := ParseAuthSys(unhex(body)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, error %v", name, a, err)
		}
	}
}

func TestParseReply(t *testing.T) {
	const head = "0a0b0c0d 00000001 "
	for _, x := range []struct {
		name    string
		in      string
		xid     uint32
		results string
		err     error // of its type and value; ErrMalformed for any that wraps it
		text    string
	}{
		{"success", head + "00000000" + noneHex + "00000000 11223344", 0x0a0b0c0d, "11223344", nil, ""},
		{"no results", head + "00000000" + noneHex + "00000000", 0x0a0b0c0d, "", nil, ""},
		{"verifier of 5", head + "00000000 00000002 00000005 aabbccddee000000 00000000 11223344", 0x0a0b0c0d,
			"11223344", nil, ""},
		{"verifier of 400", head + "00000000 00000006 00000190" + strings.Repeat("aa", 400) + "00000000 11223344",
			0x0a0b0c0d, "11223344", nil, ""},
		{"verifier of 401", head + "00000000 00000006 00000191" + strings.Repeat("aa", 404) + "00000000", 0x0a0b0c0d,
			"", ErrMalformed, ""},
		{"verifier of 4 GiB", head + "00000000 00000006 ffffffff 00000000", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"verifier beyond the end", head + "00000000 00000006 00000020 00000000", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"PROG_UNAVAIL", head + "00000000" + noneHex + "00000001", 0x0a0b0c0d, "", &AcceptError{Stat: ProgUnavail},
			"PROG_UNAVAIL"},
		{"PROG_MISMATCH", head + "00000000" + noneHex + "00000002 00000002 00000004", 0x0a0b0c0d, "",
			&AcceptError{ProgMismatch, 2, 4}, "versions 2 to 4"},
		{"PROG_MISMATCH cut", head + "00000000" + noneHex + "00000002 00000002", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"PROC_UNAVAIL", head + "00000000" + noneHex + "00000003", 0x0a0b0c0d, "", &AcceptError{Stat: ProcUnavail},
			"PROC_UNAVAIL"},
		{"GARBAGE_ARGS", head + "00000000" + noneHex + "00000004", 0x0a0b0c0d, "", &AcceptError{Stat: GarbageArgs},
			"GARBAGE_ARGS"},
		{"SYSTEM_ERR", head + "00000000" + noneHex + "00000005", 0x0a0b0c0d, "", &AcceptError{Stat: SystemErr},
			"SYSTEM_ERR"},
		{"accept_stat 6", head + "00000000" + noneHex + "00000006", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"RPC_MISMATCH", head + "00000001 00000000 00000003 00000005", 0x0a0b0c0d, "",
			&DeniedError{Stat: RPCMismatch, Low: 3, High: 5}, "versions 3 to 5"},
		{"AUTH_ERROR", head + "00000001 00000001 00000005", 0x0a0b0c0d, "",
			&DeniedError{Stat: AuthError, Auth: AuthTooWeak}, "AUTH_TOOWEAK"},
		{"AUTH_ERROR unknown", head + "00000001 00000001 000000ff", 0x0a0b0c0d, "",
			&DeniedError{Stat: AuthError, Auth: 255}, "auth_stat 255"},
		{"AUTH_ERROR cut", head + "00000001 00000001", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"reject_stat 2", head + "00000001 00000002 00000000 00000000", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"reply_stat 2", head + "00000002", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"a call", "0a0b0c0d 00000000 00000002 000186a3 00000003 00000006" + noneHex + noneHex, 0x0a0b0c0d, "",
			ErrMalformed, ""},
		{"msg_type 2", "0a0b0c0d 00000002 00000000" + noneHex + "00000000", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"xid only", "0a0b0c0d", 0x0a0b0c0d, "", ErrMalformed, ""},
		{"nothing", "", 0, "", ErrMalformed, ""},
	} {
		xid, results, err := ParseReply(unhex(x.in))
		if xid != x.xid || !bytes.Equal(results, unhex(x.results)) {
			t.Errorf("%s: xid %#x, results %x", x.name, xid, results)
		}
		switch {
		case x.err == ErrMalformed:
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("%s: error is %v", x.name, err)
			}
		case !reflect.DeepEqual(err, x.err):
			t.Errorf("%s: error is %#v, want %#v", x.name, err, x.err)
		case err != nil && !strings.Contains(err.Error(), x.text):
			t.Errorf("%s: text %q lacks %q", x.name, err, x.text)
		}
	}
}

func TestReplies(t *testing.T) {
	for _, x := range []struct {
		name string
		got  []byte
		want string
	}{
		{"accepted", AppendAcceptedReply(nil, 7, Success), "00000007 00000001 00000000" + noneHex + "00000000"},
		{"garbage", AppendAcceptedReply(nil, 7, GarbageArgs), "00000007 00000001 00000000" + noneHex + "00000004"},
		{"program mismatch", AppendProgMismatchReply(nil, 7, 3, 4), "00000007 00000001 00000000" + noneHex +
			"00000002 00000003 00000004"},
		{"mismatch", AppendMismatchReply(nil, 7), "00000007 00000001 00000001 00000000 00000002 00000002"},
		{"denied", AppendDeniedReply(nil, 7, AuthTooWeak), "00000007 00000001 00000001 00000001 00000005"},
	} {
		if !bytes.Equal(x.got, unhex(x.want)) {
			t.Errorf("%s\n got %x\nwant %x", x.name, x.got, unhex(x.want))
		}
	}
	if n := len(AppendAcceptedReply(nil, 7, Success)); n != AcceptedReplySize {
		t.Errorf("an accepted reply has %d octets, AcceptedReplySize is %d", n, AcceptedReplySize)
	}
}

func TestParseCallRefuses(t *testing.T) {
	good := unhex("01020304 00000000 00000002 000186a3 00000003 00000006" + sysHex + noneHex)
	for n := range good {
		if _, _, err := ParseCall(good[:n]); !errors.Is(err, ErrMalformed) {
			t.Errorf("%d of %d octets: error is %v", n, len(good), err)
		}
	}
	if h, _, err := ParseCall(unhex("01020304 00000001 00000002")); !errors.Is(err, ErrMalformed) ||
		h.XID != 0x01020304 {
		t.Errorf("a reply: %+v, error %v", h, err)
	}
	var denied *DeniedError
	if h, _, err := ParseCall(unhex("01020304 00000000 00000003")); !errors.As(err, &denied) ||
		denied.Stat != RPCMismatch || h.XID != 0x01020304 {
		t.Errorf("RPC version 3: %+v, error %v", h, err)
	}
	long := append(good[:24:24], unhex("00000001 00000191"+strings.Repeat("00", 404)+noneHex)...)
	if _, _, err := ParseCall(long); !errors.Is(err, ErrMalformed) {
		t.Errorf("a credential of 401 octets: error is %v", err)
	}
}

func TestDecoder(t *testing.T) {
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
		t.Errorf("integers %x, %x", a, b)
	}
	if a, b := d.Bool(), d.Bool(); !a || b {
		t.Errorf("booleans %v, %v", a, b)
	}
	if d.Offset() != 20 || d.Remaining() != len(in)-20 || len(d.Rest()) != d.Remaining() {
		t.Errorf("at %d, %d remain", d.Offset(), d.Remaining())
	}
	if a, b, c := d.Opaque(5), d.Opaque(3), d.Fixed(2); string(a) != "abcde" || string(b) != "xyz" ||
		string(c) != "\x09\x09" {
		t.Errorf("opaques %q, %q, %q", a, b, c)
	}
	if d.Err() != nil || d.Remaining() != 0 {
		t.Errorf("error %v, %d remain", d.Err(), d.Remaining())
	}
	if d.Uint32() != 0 || !errors.Is(d.Err(), ErrMalformed) {
		t.Errorf("behind the end: error %v", d.Err())
	}
}

func TestDecoderRefuses(t *testing.T) {
	for _, x := range []struct {
		name string
		in   string
		read func(d *Decoder)
	}{
		{"boolean 2", "00000002", func(d *Decoder) { d.Bool() }},
		{"short word", "000000", func(d *Decoder) { d.Uint32() }},
		{"short hyper", "00000000 000000", func(d *Decoder) { d.Uint64() }},
		{"opaque over its maximum", "00000005 0000000000 000000", func(d *Decoder) { d.Opaque(4) }},
		{"opaque beyond the end", "00000005 00000000", func(d *Decoder) { d.Opaque(400) }},
		{"opaque without its pad", "00000005 0000000000", func(d *Decoder) { d.Opaque(400) }},
		{"opaque of 4 GiB", "ffffffff 00000000", func(d *Decoder) { d.Opaque(1 << 40) }},
		{"negative length", "00000000", func(d *Decoder) { d.Fixed(-1) }},
	} {
		d := NewDecoder(unhex(x.in))
		x.read(&d)
		if !errors.Is(d.Err(), ErrMalformed) {
			t.Errorf("%s: error is %v", x.name, d.Err())
		}
		first := d.Err()
		d.Fail(errors.New("later"))
		if d.Uint32(); d.Err() != first {
			t.Errorf("%s: the first error did not stay", x.name)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	cred := AppendAuthSys(nil, &AuthSys{Machine: "host", GIDs: []uint32{1, 2, 3}})
	sys := AuthSys{Machine: "host", GIDs: []uint32{1, 2, 3}}
	buf := make([]byte, 0, 1024)
	reply := append(AppendAcceptedReply(nil, 1, Success), 1, 2, 3, 4)
	call := AppendCall(nil, 1, 2, 3, 4, cred)
	garbage := []byte{0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 9}
	for name, f := range map[string]func(){
		"AppendCall":            func() { AppendCall(buf, 1, 2, 3, 4, cred) },
		"AppendAuthSys":         func() { AppendAuthSys(buf, &sys) },
		"ParseReply":            func() { ParseReply(reply) },
		"ParseReply of garbage": func() { ParseReply(garbage) },
		"ParseCall":             func() { ParseCall(call) },
		"AppendAcceptedReply":   func() { AppendAcceptedReply(buf, 1, Success) },
		"AppendOpaque":          func() { AppendOpaque(buf, cred) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations, want none", name, n)
		}
	}
}
