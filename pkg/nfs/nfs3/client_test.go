package nfs3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestInvalidArgumentsAreNotSent checks the status of calls with invalid arguments.
func TestInvalidArgumentsAreNotSent(t *testing.T) {
	long, target := strings.Repeat("n", MaxName+1), strings.Repeat("t", MaxPath+1)
	var wcc WccData
	var made CreateResult
	var look LookupResult
	var ren RenameResult
	var lnk LinkResult
	var set SetAttr
	var dev Device
	ctx, caller := t.Context(), new(canned)
	c := NewClient(caller)
	for _, x := range []struct {
		name string
		want Status
		call func() error
	}{
		{"empty name", ErrInval, func() error { return c.Lookup(ctx, cred, fh1, "", &look) }},
		{"name with slash", ErrInval, func() error { return c.Remove(ctx, cred, fh1, "a/b", &wcc) }},
		{"name with NUL", ErrInval, func() error { return c.Rmdir(ctx, cred, fh1, "a\x00b", &wcc) }},
		{"long name", ErrNameTooLong, func() error { return c.Lookup(ctx, cred, fh1, long, &look) }},
		{"long second name", ErrNameTooLong, func() error { return c.Rename(ctx, cred, fh1, "a", fh2, long, &ren) }},
		{"link to a long name", ErrNameTooLong, func() error { return c.Link(ctx, cred, fh1, fh2, long, &lnk) }},
		{"long target", ErrNameTooLong, func() error { return c.Symlink(ctx, cred, fh1, "l", target, &set, &made) }},
		{"empty target", ErrInval, func() error { return c.Symlink(ctx, cred, fh1, "l", "", &set, &made) }},
		{"create mode 3", ErrInval, func() error { return c.Create(ctx, cred, fh1, "f", &CreateHow{Mode: 3}, &made) }},
		{"MKNOD of a file", ErrBadType, func() error { return c.Mknod(ctx, cred, fh1, "f", NF3REG, &set, dev, &made) }},
	} {
		*caller = canned{}
		err := x.call()
		var nfsErr *Error
		if !errors.As(err, &nfsErr) || nfsErr.Status != x.want || nfsErr.What == "" {
			t.Errorf("%s: got error %v, want %v with a reason", x.name, err, x.want)
		}
		if caller.calls != 0 {
			t.Errorf("%s: got %d calls, want none", x.name, caller.calls)
		}
	}
}

// TestLargestArgumentsFitMaxArgs encodes the two procedures with the largest arguments.
func TestLargestArgumentsFitMaxArgs(t *testing.T) {
	fh := mustFH(make([]byte, FHSize)...)
	name := strings.Repeat("n", MaxName)
	all := SetAttr{HasMode: true, HasUID: true, HasGID: true, HasSize: true, AtimeHow: SetToClientTime,
		MtimeHow: SetToClientTime}
	caller := &canned{result: unhex(okHex + wccHex + wccHex)}
	c := NewClient(caller)
	if err := c.Rename(t.Context(), cred, fh, name, fh, name, new(RenameResult)); err != nil {
		t.Error(err)
	}
	rename := len(caller.args)
	caller.result = unhex(okHex + noneHex + noneHex + wccHex)
	if err := c.Mknod(t.Context(), cred, fh, name, NF3BLK, &all, Device{}, new(CreateResult)); err != nil {
		t.Error(err)
	}
	for what, n := range map[string]int{"RENAME": rename, "MKNOD": len(caller.args)} {
		if n > maxArgs || n < 300 {
			t.Errorf("%s: got arguments of %d bytes, want 300 to %d", what, n, maxArgs)
		}
	}
}

func TestTransportErrorIsWrapped(t *testing.T) {
	c := NewClient(&canned{err: fmt.Errorf("wrapped: %w", syscall.ECONNRESET)})
	err := c.GetAttr(t.Context(), cred, fh1, new(Attr))
	if !errors.Is(err, syscall.ECONNRESET) || !strings.Contains(err.Error(), "GETATTR") {
		t.Errorf("got error %v, want ECONNRESET of GETATTR", err)
	}
}

func TestErrno(t *testing.T) {
	for _, x := range []struct {
		err  error
		want syscall.Errno
	}{
		{nil, 0},
		{statusError(ProcLookup, ErrNoEnt), syscall.ENOENT},
		{fmt.Errorf("x: %w", statusError(ProcWrite, ErrDQuot)), syscall.EDQUOT},
		{statusError(ProcRead, 12345), syscall.EIO},
		{statusError(ProcRead, ErrBadHandle), syscall.ESTALE},
		{malformed(ProcRead, errFileType), syscall.EIO},
		{fmt.Errorf("x: %w", context.Canceled), syscall.EINTR},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), syscall.ETIMEDOUT},
		{&sunrpc.DeniedError{Stat: sunrpc.AuthError, Auth: sunrpc.AuthTooWeak}, syscall.EACCES},
		{&sunrpc.DeniedError{Stat: sunrpc.RPCMismatch}, syscall.EIO},
		{&sunrpc.AcceptError{Stat: sunrpc.ProcUnavail}, syscall.EOPNOTSUPP},
		{&sunrpc.AcceptError{Stat: sunrpc.GarbageArgs}, syscall.EIO},
	} {
		if got := Errno(x.err); got != x.want {
			t.Errorf("%v: got errno %v, want %v", x.err, got, x.want)
		}
	}
	if err := statusError(ProcRmdir, ErrNotEmpty); !errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, ErrMalformed) {
		t.Errorf("got error %v, want ENOTEMPTY", err)
	}
	want := "NFSv3 RMDIR: directory not empty (NFS3ERR_NOTEMPTY)"
	if got := statusError(ProcRmdir, ErrNotEmpty).Error(); got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	want = "NFSv3 READ: server returned invalid status 77"
	if got := statusError(ProcRead, 77).Error(); got != want {
		t.Errorf("text %q, want %q", got, want)
	}
}

func TestFH(t *testing.T) {
	if _, err := NewFH(make([]byte, FHSize+1)); !errors.Is(err, ErrMalformed) {
		t.Errorf("65 bytes: got error %v, want %v", err, ErrMalformed)
	}
	// A handle must differ from the same handle with a zero appended.
	if mustFH(1, 2) == mustFH(1, 2, 0) {
		t.Error("handles of different lengths compare equal")
	}
	m := map[FH]int{mustFH(1, 2): 1, mustFH(1, 2, 0): 2}
	if m[mustFH(1, 2)] != 1 || m[mustFH(1, 2, 0)] != 2 || m[FH{}] != 0 {
		t.Errorf("got map %v", m)
	}
	h := mustFH(0xab, 0xcd)
	if h.String() != "abcd" || h.Len() != 2 || h.IsZero() || string(h.Bytes()) != "\xab\xcd" {
		t.Errorf("got handle %v, want abcd", h)
	}
	// The second handle is shorter than the first.
	d := reader{sunrpc.NewDecoder(unhex(fhHex + fh2Hex))}
	d.fh(&h)
	d.fh(&h)
	if h != fh2 {
		t.Errorf("got handle %v, want %v", h, fh2)
	}
}

func TestTime(t *testing.T) {
	for _, x := range []struct {
		in   time.Time
		want Time3
	}{
		{time.Unix(5, 6), Time3{Sec: 5, Nsec: 6}},
		{time.Unix(-1, 0), Time3{}},
		{time.Unix(1<<32, 7), Time3{Sec: 1<<32 - 1}},
	} {
		if got := nfs.TimeOf(x.in); got != x.want {
			t.Errorf("TimeOf(%v): got %v, want %v", x.in, got, x.want)
		}
	}
	if got := (Time3{Sec: 5, Nsec: 6}).Time(); !got.Equal(time.Unix(5, 6)) {
		t.Errorf("got time %v, want %v", got, time.Unix(5, 6))
	}
}

// TestReadDirStopsDelivery stops after three entries. The result must still describe the complete
// reply.
func TestReadDirStopsDelivery(t *testing.T) {
	reply := okHex + noneHex + verfHex
	for range 5 {
		reply += entryHex
	}
	c := NewClient(&canned{result: unhex(reply + "00000000 00000001")})
	var res ReadDirResult
	n := 0
	err := c.ReadDir(t.Context(), cred, fh1, 0, Verifier{}, 1<<30, &res, func(*DirEntry) bool { n++; return n < 3 })
	if err != nil || n != 3 || res.Entries != 5 || !res.EOF {
		t.Errorf("got %d entries, result %+v, error %v; want 3 of 5 entries", n, res, err)
	}
}

// TestConcurrentCallsKeepBuffersApart shares one Client between goroutines.
func TestConcurrentCallsKeepBuffersApart(t *testing.T) {
	c := NewClient(callerFunc(func(_ context.Context, m *sunrpc.Message) error {
		// The path in the reply is the handle in the call.
		m.Result = append(m.Result[:0], unhex(okHex+noneHex)...)
		m.Result = append(m.Result, m.Args...)
		return nil
	}))
	var wg sync.WaitGroup
	for i := range byte(8) {
		wg.Go(func() {
			fh := mustFH(i+1, i+1, i+1, i+1, i+1)
			var res ReadLinkResult
			buf := make([]byte, 64)
			for range 500 {
				if err := c.ReadLink(t.Context(), cred, fh, buf, &res); err != nil ||
					string(buf[:res.N]) != string(fh.Bytes()) {
					t.Errorf("got path %x, error %v; want path %v", buf[:res.N], err, fh)
					return
				}
			}
		})
	}
	wg.Wait()
}

type callerFunc func(ctx context.Context, m *sunrpc.Message) error

func (f callerFunc) Call(ctx context.Context, m *sunrpc.Message) error { return f(ctx, m) }

// echo is a Caller that returns a fixed reply and does not allocate.
type echo struct {
	result []byte
	place  []byte
}

func (e *echo) Call(_ context.Context, m *sunrpc.Message) error {
	m.Result = append(m.Result[:0], e.result...)
	m.ResultDataLen = -1
	if e.place != nil {
		m.ResultDataLen = copy(m.ResultData, e.place)
		for _, p := range m.ResultPieces {
			m.ResultDataLen += copy(p, e.place[m.ResultDataLen:])
		}
	}
	return nil
}

// An allocCase is a call of TestCallsDoNotAllocate and its reply.
type allocCase struct {
	p     Proc
	reply string
	place []byte // data that the transport places
	want  error
}

// allocCases returns a successful call of every procedure, and a LOOKUP of a missing name. data is
// the data of a READ.
func allocCases(data []byte) []allocCase {
	made1 := okHex + "00000001" + fh2Hex + postHex + wccHex
	dirReply := okHex + postDirHex + verfHex
	for range 60 {
		dirReply += entryHex + postHex + "00000001" + fh2Hex
	}
	dirReply += "00000000 00000000"
	return []allocCase{
		{ProcNull, "", nil, nil},
		{ProcGetAttr, okHex + attrHex, nil, nil},
		{ProcSetAttr, okHex + wccHex, nil, nil},
		{ProcLookup, okHex + fh2Hex + postHex + postDirHex, nil, nil},
		{ProcLookup, "00000002" + postDirHex, nil, statusErrors[ProcLookup][ErrNoEnt]},
		{ProcAccess, okHex + postHex + "0000003f", nil, nil},
		{ProcReadLink, okHex + postHex + "00000004 61616161", nil, nil},
		{ProcRead, okHex + postHex + "00020000 00000000 00020000", data, nil},
		{ProcRead, okHex + postHex + "00000008 00000001 00000008 6161616161616161", nil, nil},
		{ProcWrite, okHex + wccHex + "00020000 00000002" + verfHex, nil, nil},
		{ProcCreate, made1, nil, nil},
		{ProcMkdir, made1, nil, nil},
		{ProcSymlink, made1, nil, nil},
		{ProcMknod, made1, nil, nil},
		{ProcRemove, okHex + wccHex, nil, nil},
		{ProcRmdir, okHex + wccHex, nil, nil},
		{ProcRename, okHex + wccHex + wccHex, nil, nil},
		{ProcLink, okHex + postHex + wccHex, nil, nil},
		{ProcReadDir, okHex + noneHex + verfHex + entryHex + "00000000 00000001", nil, nil},
		{ProcReadDirPlus, dirReply, nil, nil},
		{ProcFSStat, okHex + noneHex + strings.Repeat("01", 52), nil, nil},
		{ProcFSInfo, okHex + noneHex + strings.Repeat("01", 48), nil, nil},
		{ProcPathConf, okHex + noneHex + strings.Repeat("00000001", 6), nil, nil},
		{ProcCommit, okHex + wccHex + verfHex, nil, nil},
	}
}

// TestCallsDoNotAllocate checks every procedure.
func TestCallsDoNotAllocate(t *testing.T) {
	kit.CountsAllocations(t)
	entryBytes := 0
	each := func(e *DirEntry) bool { entryBytes += len(e.Name); return true }
	all := calls{ctx: t.Context(), buf: make([]byte, 128<<10), dirCount: 8192, maxCount: 32768, each: each,
		set: SetAttr{HasMode: true, HasSize: true, MtimeHow: SetToClientTime}, how: CreateHow{Mode: Guarded}}
	for _, x := range allocCases(make([]byte, len(all.buf))) {
		caller := &echo{result: unhex(x.reply), place: x.place}
		c := NewClient(caller)
		got := x.want
		allocs := testing.AllocsPerRun(200, func() {
			if err := all.call(c, x.p); err != x.want {
				got = err
			}
		})
		if got != x.want {
			t.Errorf("%v: got %v, want %v", x.p, got, x.want)
		}
		if allocs != 0 {
			t.Errorf("%v: got %v allocations per call, want none", x.p, allocs)
		}
	}
	if entryBytes == 0 {
		t.Error("got no directory entry")
	}
}

// TestReadPieces reads into memory in several pieces, with data in the reply and data that the
// transport places.
func TestReadPieces(t *testing.T) {
	const data = "0123456789"
	for _, sizes := range [][]int{{12}, {1, 1, 10}, {4, 6, 4}, {11, 1}} {
		for _, placed := range []bool{false, true} {
			caller := &echo{result: unhex(okHex + postHex + "0000000a 00000001 0000000a" +
				"30313233 34353637 38390000")}
			if placed {
				caller = &echo{result: unhex(okHex + postHex + "0000000a 00000001 0000000a"), place: []byte(data)}
			}
			var pieces [][]byte
			for _, n := range sizes {
				pieces = append(pieces, make([]byte, n))
			}
			var res ReadResult
			err := NewClient(caller).ReadPieces(t.Context(), cred, fh1, 0, pieces, &res)
			got := bytes.Join(pieces, nil)
			if err != nil || res.N != len(data) || string(got[:min(res.N, len(got))]) != data {
				t.Errorf("pieces of %v bytes, placed %t: got %v, %d bytes, %q; want %q", sizes, placed, err, res.N, got,
					data)
			}
			pieces[len(pieces)-1] = pieces[len(pieces)-1][:1]
			if room := len(bytes.Join(pieces, nil)); room >= len(data) {
				continue
			}
			err = NewClient(caller).ReadPieces(t.Context(), cred, fh1, 0, pieces, &res)
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("pieces of %v bytes, the last of 1: got %v, want a malformed reply", sizes, err)
			}
		}
	}
}
