package nfs3

import (
	"context"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// unhex decodes hexadecimal digits and ignores white space.
func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

// canned is a Caller that returns a fixed reply and records the call.
type canned struct {
	result []byte // XDR of the results
	place  []byte // stored in ResultData unless nil
	err    error

	proc      uint32
	args      []byte
	data      []byte
	dataPos   int
	maxResult int
	calls     int
}

func (c *canned) Call(_ context.Context, m *sunrpc.Message) error {
	c.calls++
	c.proc, c.dataPos, c.maxResult = m.Proc, m.ArgDataPos, m.MaxResult
	c.args = append(c.args[:0], m.Args...)
	c.data = append(c.data[:0], m.ArgData...)
	m.Result = append(m.Result[:0], c.result...)
	m.ResultDataLen = -1
	if c.place != nil {
		m.ResultDataLen = copy(m.ResultData, c.place)
	}
	return c.err
}

// Items on the wire: fhHex is a handle of 5 bytes, attrHex the attributes of a regular file.
const (
	fhHex  = "00000005 0102030405 000000"
	fh2Hex = "00000004 aabbccdd"

	attrHex = `00000001 000001a4 00000002 000003e8 00000064
		0000000000000005 0000000000001000 00000008 00000009
		0000000000000011 0000000000000022
		00000001 00000002 00000003 00000004 00000005 00000006`
	dirAttrHex = `00000002 000041ed 00000003 00000000 00000000
		0000000000001000 0000000000002000 00000000 00000000
		0000000000000011 0000000000000023
		0000000b 0000000c 0000000d 0000000e 0000000f 00000010`

	postHex    = "00000001" + attrHex
	postDirHex = "00000001" + dirAttrHex
	noneHex    = "00000000"
	wccHex     = "00000001 0000000000000fff 0000000d 0000000e 0000000f 00000001" + postDirHex
	wccNoneHex = noneHex + noneHex
	okHex      = "00000000"
	verfHex    = "f0f1f2f3f4f5f6f7"
)

var (
	fh1 = mustFH(1, 2, 3, 4, 5)
	fh2 = mustFH(0xaa, 0xbb, 0xcc, 0xdd)

	attr1 = Attr{Type: NF3REG, Mode: 0o644, Nlink: 2, UID: 1000, GID: 100, Size: 5, Used: 4096, Rdev: Device{Major: 8,
		Minor: 9},
		FSID: 0x11, FileID: 0x22, Atime: Time3{Sec: 1, Nsec: 2}, Mtime: Time3{Sec: 3, Nsec: 4}, Ctime: Time3{Sec: 5,
			Nsec: 6}}
	// The server sends the bits of the file type in the mode of this directory.
	dirAttr1 = Attr{Type: NF3DIR, Mode: 0o755, Nlink: 3, Size: 4096, Used: 8192, FSID: 0x11, FileID: 0x23,
		Atime: Time3{Sec: 11, Nsec: 12}, Mtime: Time3{Sec: 13, Nsec: 14}, Ctime: Time3{Sec: 15, Nsec: 16}}
	post1    = PostOpAttr{Present: true, Attr: attr1}
	postDir1 = PostOpAttr{Present: true, Attr: dirAttr1}
	wcc1     = WccData{HasBefore: true, Before: WccAttr{Size: 0xfff, Mtime: Time3{Sec: 13, Nsec: 14},
		Ctime: Time3{Sec: 15, Nsec: 1}},
		HasAfter: true, After: dirAttr1}
	verf1 = Verifier{0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7}
)

func mustFH(b ...byte) FH {
	h, err := NewFH(b)
	if err != nil {
		panic(err)
	}
	return h
}

// An exchange is one call of a method with the bytes that it sends and the bytes of the reply.
type exchange struct {
	name string
	call func(ctx context.Context, c *Client) (any, error)

	proc      Proc
	args      string
	data      string // ArgData
	maxResult int

	reply string
	place string // placed in ResultData; "-" means no data
	want  any

	err       Status // status of an expected *Error
	malformed bool   // expect ErrMalformed
}

// entries collects the entries of a directory.
type entries struct {
	Res  ReadDirResult
	List []DirEntry
}

func (e *entries) add(d *DirEntry) bool {
	c := *d
	c.Name = append([]byte(nil), d.Name...)
	e.List = append(e.List, c)
	return true
}

var cred = sunrpc.AppendAuthNone(nil)

// call1 returns a call of a method with a result of type T.
func call1[T any](f func(ctx context.Context, c *Client, res *T) error) func(context.Context, *Client) (any, error) {
	return func(ctx context.Context, c *Client) (any, error) {
		var res T
		err := f(ctx, c, &res)
		return res, err
	}
}

// withBuf is a result with its data.
type withBuf[T any] struct {
	Res  T
	Data string
}

var getattr = call1(func(ctx context.Context, c *Client, r *Attr) error { return c.GetAttr(ctx, cred, fh1, r) })

var lookup = call1(func(ctx context.Context, c *Client, r *LookupResult) error {
	return c.Lookup(ctx, cred, fh1, "ab", r)
})

func read(size int) func(context.Context, *Client) (any, error) {
	return func(ctx context.Context, c *Client) (any, error) {
		var w withBuf[ReadResult]
		buf := make([]byte, size)
		err := c.Read(ctx, cred, fh1, 0x100000002, buf, &w.Res)
		if err == nil {
			w.Data = string(buf[:w.Res.N])
		}
		return w, err
	}
}

func readLink(size int) func(context.Context, *Client) (any, error) {
	return func(ctx context.Context, c *Client) (any, error) {
		var w withBuf[ReadLinkResult]
		buf := make([]byte, size)
		err := c.ReadLink(ctx, cred, fh1, buf, &w.Res)
		if err == nil {
			w.Data = string(buf[:w.Res.N])
		}
		return w, err
	}
}

func write(data string) func(context.Context, *Client) (any, error) {
	return call1(func(ctx context.Context, c *Client, r *WriteResult) error {
		return c.Write(ctx, cred, fh1, 0x100000002, []byte(data), DataSync, r)
	})
}

func readDir(ctx context.Context, c *Client) (any, error) {
	var e entries
	err := c.ReadDir(ctx, cred, fh1, 7, verf1, 4096, &e.Res, e.add)
	return e, err
}

func readDirPlus(ctx context.Context, c *Client) (any, error) {
	var e entries
	err := c.ReadDirPlus(ctx, cred, fh1, 7, verf1, 1024, 4096, &e.Res, e.add)
	return e, err
}

func (x *exchange) run(t *testing.T) {
	caller := &canned{result: unhex(x.reply)}
	switch x.place {
	case "":
	case "-":
		caller.place = []byte{}
	default:
		caller.place = []byte(x.place)
	}
	got, err := x.call(t.Context(), NewClient(caller))
	var nfsErr *Error
	switch {
	case x.malformed:
		if !errors.Is(err, ErrMalformed) || Errno(err) != syscall.EIO {
			t.Errorf("got error %v with errno %v, want %v and EIO", err, Errno(err), ErrMalformed)
		}
	case x.err != OK:
		if !errors.As(err, &nfsErr) || nfsErr.Status != x.err || nfsErr.Op != operation(x.proc) ||
			Errno(err) != x.err.Errno() {
			t.Errorf("got error %v, want status %v of %v", err, x.err, x.proc)
		}
	case err != nil:
		t.Errorf("got error %v", err)
	}
	if x.want != nil && !reflect.DeepEqual(got, x.want) {
		t.Errorf("result\n got %+v\nwant %+v", got, x.want)
	}
	if caller.proc != uint32(x.proc) || caller.calls != 1 {
		t.Errorf("got %d calls, last of procedure %d; want one call of %d", caller.calls, caller.proc, x.proc)
	}
	if x.args != "" && hex.EncodeToString(caller.args) != hex.EncodeToString(unhex(x.args)) {
		t.Errorf("arguments\n got %x\nwant %x", caller.args, unhex(x.args))
	}
	if !x.malformed && string(caller.data) != x.data || x.data != "" && caller.dataPos != len(caller.args) {
		t.Errorf("got data %q at offset %d, want %q at %d", caller.data, caller.dataPos, x.data, len(caller.args))
	}
	if x.maxResult != 0 && caller.maxResult != x.maxResult {
		t.Errorf("got MaxResult %d, want %d", caller.maxResult, x.maxResult)
	}
	if x.err == OK && !x.malformed && len(caller.result) > caller.maxResult+sunrpc.Pad4(len("some data")) {
		t.Errorf("reply of the test has %d bytes, MaxResult is %d", len(caller.result), caller.maxResult)
	}
}

func TestExchanges(t *testing.T) {
	seen := make(map[Proc]bool)
	for _, x := range exchanges {
		seen[x.proc] = true
		t.Run(x.name, x.run)
	}
	for p := range Proc(NumProcs) {
		if !seen[p] {
			t.Errorf("no exchange for %v", p)
		}
	}
}

// TestTruncatedReplies truncates every valid reply at every byte. The call must fail, unless only
// the pad after the data is missing.
func TestTruncatedReplies(t *testing.T) {
	for _, x := range exchanges {
		if x.malformed || x.err != OK || x.proc == ProcNull {
			continue
		}
		whole := unhex(x.reply)
		for n := range whole {
			caller := &canned{result: whole[:n]}
			if x.place != "" {
				caller.place = []byte(strings.TrimPrefix(x.place, "-"))
			}
			got, err := x.call(t.Context(), NewClient(caller))
			if errors.Is(err, ErrMalformed) || err == nil && len(whole)-n < 4 && reflect.DeepEqual(got, x.want) {
				continue
			}
			t.Errorf("%s: first %d of %d bytes: got error %v, want %v", x.name, n, len(whole), err, ErrMalformed)
		}
	}
}
