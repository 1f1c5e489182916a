package nlmwire

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var sample = Args{Cookie: []byte{1, 2, 3, 4, 5}, Block: true, Exclusive: true, Reclaim: true, State: 7,
	Region: Region{Caller: "host", FH: []byte{0xf1, 0xf2}, OH: []byte("own"), SVID: 0x40000001,
		Span: Span{1 << 32, 10}}}

const (
	sampleCookie = "00000005 0102030405000000"
	sampleRegion = "00000004 686f7374 00000002 f1f20000 00000003 6f776e00 40000001" +
		"0000000100000000 000000000000000a"
)

// The layouts are those of nlm4_lockargs and the other types of XNFS chapter 14.
func TestArgumentBytes(t *testing.T) {
	for _, x := range []struct {
		proc Proc
		want string
		args Args
	}{
		{ProcTest, sampleCookie + "00000001" + sampleRegion,
			Args{Cookie: sample.Cookie, Exclusive: true, Region: sample.Region}},
		{ProcGranted, sampleCookie + "00000001" + sampleRegion,
			Args{Cookie: sample.Cookie, Exclusive: true, Region: sample.Region}},
		{ProcGrantedMsg, sampleCookie + "00000001" + sampleRegion,
			Args{Cookie: sample.Cookie, Exclusive: true, Region: sample.Region}},
		{ProcLock, sampleCookie + "00000001 00000001" + sampleRegion + "00000001 00000007", sample},
		{ProcCancel, sampleCookie + "00000001 00000001" + sampleRegion,
			Args{Cookie: sample.Cookie, Block: true, Exclusive: true, Region: sample.Region}},
		{ProcUnlock, sampleCookie + sampleRegion, Args{Cookie: sample.Cookie, Region: sample.Region}},
	} {
		got := AppendArgs(nil, x.proc, &sample)
		if !bytes.Equal(got, kit.Unhex(x.want)) {
			t.Errorf("%v: got arguments\n     %x\nwant %x", x.proc, got, kit.Unhex(x.want))
		}
		var args Args
		if err := ParseArgs(x.proc, got, &args); err != nil || !reflect.DeepEqual(args, x.args) {
			t.Errorf("%v: got %+v, error %v; want %+v", x.proc, args, err, x.args)
		}
		for n := range got {
			if err := ParseArgs(x.proc, got[:n], &args); !errors.Is(err, sunrpc.ErrMalformed) {
				t.Errorf("%v, first %d bytes: got error %v, want %v", x.proc, n, err, sunrpc.ErrMalformed)
			}
		}
	}
}

func TestResultBytes(t *testing.T) {
	holder := Holder{Exclusive: true, SVID: 9, OH: []byte("oh"), Span: Span{5, 6}}
	for _, x := range []struct {
		proc Proc
		res  Res
		want string
	}{
		{ProcLock, Res{Cookie: []byte{1}, Stat: Blocked}, "00000001 01000000 00000003"},
		{ProcLock, Res{Cookie: []byte{}, Stat: Denied}, "00000000 00000001"},
		{ProcTest, Res{Cookie: []byte{}, Stat: Granted}, "00000000 00000000"},
		{ProcTest, Res{Cookie: []byte{}, Stat: Denied, Holder: holder},
			"00000000 00000001 00000001 00000009 00000002 6f680000 0000000000000005 0000000000000006"},
	} {
		got := AppendRes(nil, x.proc, &x.res)
		if !bytes.Equal(got, kit.Unhex(x.want)) {
			t.Errorf("%v %v: got results\n     %x\nwant %x", x.proc, x.res.Stat, got, kit.Unhex(x.want))
		}
		var res Res
		if err := ParseRes(x.proc, got, &res); err != nil || !reflect.DeepEqual(res, x.res) {
			t.Errorf("%v: got %+v, error %v; want %+v", x.proc, res, err, x.res)
		}
	}
}

func TestInvalidMessages(t *testing.T) {
	for name, err := range map[string]error{
		"status 10":       ParseRes(ProcLock, kit.Unhex("00000000 0000000a"), new(Res)),
		"cookie of 4 GiB": ParseRes(ProcLock, kit.Unhex("ffffffff 00000000"), new(Res)),
		"long cookie":     ParseRes(ProcLock, append(kit.Unhex("00000024"), make([]byte, 40)...), new(Res)),
		"long handle": ParseArgs(ProcUnlock, append(kit.Unhex("00000000 00000000 00000044"), make([]byte, 200)...),
			new(Args)),
		"boolean 2": ParseArgs(ProcTest, append(kit.Unhex("00000000 00000002"), make([]byte, 64)...), new(Args)),
	} {
		if !errors.Is(err, sunrpc.ErrMalformed) {
			t.Errorf("%s: got error %v, want %v", name, err, sunrpc.ErrMalformed)
		}
	}
}

func TestMonitorBytes(t *testing.T) {
	call := MonitorCall{Name: "me", Prog: Program, Vers: Version, Proc: uint32(ProcNotify)}
	id := "00000003 73727600 00000002 6d650000 000186b5 00000004 00000010"
	priv := [PrivSize]byte{15: 0xff}
	want := kit.Unhex(id + "000000000000000000000000000000ff")
	if got := AppendMon(nil, "srv", &call, &priv); !bytes.Equal(got, want) {
		t.Errorf("SM_MON: got %x, want %x", got, want)
	}
	if got := AppendUnmon(nil, "srv", &call); !bytes.Equal(got, kit.Unhex(id)) {
		t.Errorf("SM_UNMON: got %x, want %x", got, kit.Unhex(id))
	}
	if ok, state, err := ParseMonRes(kit.Unhex("00000000 00000009")); !ok || state != 9 || err != nil {
		t.Errorf("results of SM_MON: got %v, %d, error %v", ok, state, err)
	}
	host, state, err := ParseNotify(kit.Unhex("00000003 73727600 0000000b"))
	if host != "srv" || state != 11 || err != nil {
		t.Errorf("SM_NOTIFY: got %q, %d, error %v", host, state, err)
	}
	host, state, got, err := ParseStatus(kit.Unhex("00000003 73727600 0000000b 000000000000000000000000000000ff"))
	if host != "srv" || state != 11 || got != priv || err != nil {
		t.Errorf("callback: got %q, %d, %x, error %v", host, state, got, err)
	}
}

func TestRanges(t *testing.T) {
	for _, x := range []struct{ offset, length, start, end uint64 }{
		{0, 0, 0, maxOffset},
		{5, 1, 5, 5},
		{5, 0, 5, maxOffset},
		{5, 1<<64 - 1, 5, maxOffset},
		{1<<64 - 1, 1<<64 - 1, maxOffset, maxOffset},
		{maxOffset, 1, maxOffset, maxOffset},
	} {
		s := Span{x.offset, x.length}
		if start, end := s.Range(); start != x.start || end != x.end {
			t.Errorf("offset %d, length %d: got %d to %d, want %d to %d", x.offset, x.length, start, end, x.start,
				x.end)
		}
		s.SetRange(x.start, x.end)
		if start, end := s.Range(); start != x.start || end != x.end {
			t.Errorf("%d to %d: changed to %d to %d", x.start, x.end, start, end)
		}
	}
}

func FuzzParseArgs(f *testing.F) {
	for _, proc := range []Proc{ProcTest, ProcLock, ProcCancel, ProcUnlock, ProcGranted} {
		f.Add(uint32(proc), AppendArgs(nil, proc, &sample))
	}
	f.Fuzz(func(t *testing.T, proc uint32, b []byte) {
		var a, again Args
		if ParseArgs(Proc(proc), b, &a) != nil {
			return
		}
		start, end := a.Region.Range()
		if start > end || end > maxOffset {
			t.Fatalf("got range %d to %d", start, end)
		}
		err := ParseArgs(Proc(proc), AppendArgs(nil, Proc(proc), &a), &again)
		if err != nil || !reflect.DeepEqual(a, again) {
			t.Fatalf("got %+v, error %v after encoding %+v", again, err, a)
		}
	})
}

func FuzzParseRes(f *testing.F) {
	f.Add(uint32(ProcTest), kit.Unhex("00000000 00000001 00000001 00000009 00000002 6f680000 0000000000000005"+
		"0000000000000006"))
	f.Add(uint32(ProcLock), kit.Unhex("00000001 01000000 00000003"))
	f.Fuzz(func(t *testing.T, proc uint32, b []byte) {
		var r, again Res
		if ParseRes(Proc(proc), b, &r) != nil {
			return
		}
		err := ParseRes(Proc(proc), AppendRes(nil, Proc(proc), &r), &again)
		if err != nil || !reflect.DeepEqual(r, again) {
			t.Fatalf("got %+v, error %v after encoding %+v", again, err, r)
		}
	})
}

func FuzzParseMonitor(f *testing.F) {
	f.Add(kit.Unhex("00000003 73727600 0000000b 000000000000000000000000000000ff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		host, state, err := ParseNotify(b)
		if host2, state2, _, err2 := ParseStatus(b); err2 == nil && (err != nil || host != host2 || state != state2) {
			t.Fatalf("got %q, %d, error %v and %q, %d", host, state, err, host2, state2)
		}
		_, _, _ = ParseMonRes(b)
	})
}
