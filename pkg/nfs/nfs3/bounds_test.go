package nfs3

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Parts of the largest results (RFC 1813 §2.5, §2.6). They do not use the constants under test.
var (
	bigFH     = "00000040" + strings.Repeat("ab", 64)
	bigPost   = "00000001" + attrHex
	bigPostFH = "00000001" + bigFH
	bigWcc    = "00000001 0000000000000001 00000001 00000002 00000003 00000004 00000001" + attrHex
)

// TestLargestResultsMatchMaxResult decodes the largest successful and the largest failed result of
// each procedure. The successful result must have the size MaxResult (RFC 8267 §3). The failed
// result must not be larger.
func TestLargestResultsMatchMaxResult(t *testing.T) {
	all := calls{ctx: t.Context(), buf: make([]byte, 8), dirCount: 36, maxCount: 36 + 88 + 72,
		each: func(*DirEntry) bool { return true }}
	const dirEntry = "00000001 0000000000000001 00000004 61616161 0000000000000001"
	const status = "00000000"
	for _, x := range []struct {
		p          Proc
		good, fail string // after the status
		data       int    // bytes of data in good, which MaxResult excludes
	}{
		{ProcGetAttr, attrHex, "", 0},
		{ProcSetAttr, bigWcc, bigWcc, 0},
		{ProcLookup, bigFH + bigPost + bigPost, bigPost, 0},
		{ProcAccess, bigPost + "0000003f", bigPost, 0},
		{ProcReadLink, bigPost + "00000008 6161616161616161", bigPost, 8},
		{ProcRead, bigPost + "00000008 00000001 00000008 6161616161616161", bigPost, 8},
		{ProcWrite, bigWcc + "00000008 00000002" + verfHex, bigWcc, 0},
		{ProcCreate, bigPostFH + bigPost + bigWcc, bigWcc, 0},
		{ProcMkdir, bigPostFH + bigPost + bigWcc, bigWcc, 0},
		{ProcSymlink, bigPostFH + bigPost + bigWcc, bigWcc, 0},
		{ProcMknod, bigPostFH + bigPost + bigWcc, bigWcc, 0},
		{ProcRemove, bigWcc, bigWcc, 0},
		{ProcRmdir, bigWcc, bigWcc, 0},
		{ProcRename, bigWcc + bigWcc, bigWcc + bigWcc, 0},
		{ProcLink, bigPost + bigWcc, bigPost + bigWcc, 0},
		// The count limits the entries and the end of the list, as in the Linux server. The other
		// items are not part of the count.
		{ProcReadDir, bigPost + verfHex + dirEntry + "00000000 00000001", bigPost, 0},
		{ProcReadDirPlus, bigPost + verfHex + dirEntry + bigPost + bigPostFH + "00000000 00000001", bigPost, 0},
		{ProcFSStat, bigPost + strings.Repeat("01", 52), bigPost, 0},
		{ProcFSInfo, bigPost + strings.Repeat("01", 48), bigPost, 0},
		{ProcPathConf, bigPost + "00007fff 000000ff 00000001 00000001 00000001 00000001", bigPost, 0},
		{ProcCommit, bigWcc + verfHex, bigWcc, 0},
	} {
		caller := &canned{result: unhex(status + x.good)}
		if err := all.call(NewClient(caller), x.p); err != nil {
			t.Errorf("%v: %v", x.p, err)
		}
		if n := len(caller.result) - x.data; n != caller.maxResult || caller.proc != uint32(x.p) {
			t.Errorf("%v: largest result has %d bytes, MaxResult is %d", x.p, n, caller.maxResult)
		}
		caller.result = unhex("00000005" + x.fail)
		var nfsErr *Error
		if err := all.call(NewClient(caller), x.p); !errors.As(err, &nfsErr) || nfsErr.Status != ErrIO ||
			len(caller.result) > caller.maxResult {
			t.Errorf("%v: failed result of %d bytes: got error %v, MaxResult %d", x.p, len(caller.result), err,
				caller.maxResult)
		}
	}
}

// TestDecodersIgnorePad sends a pad that is not zero. RFC 4506 §4.9 requires zero from senders, but
// some servers send other bytes.
func TestDecodersIgnorePad(t *testing.T) {
	ctx := t.Context()
	for name, x := range map[string]struct {
		reply string
		call  func(c *Client) bool
	}{
		"handle": {okHex + "00000005 0102030405 ffffff" + noneHex + noneHex, func(c *Client) bool {
			var res LookupResult
			return c.Lookup(ctx, cred, fh1, "n", &res) == nil && res.FH == fh1
		}},
		"names": {okHex + noneHex + verfHex +
			"00000001 0000000000000022 00000001 61eeeeee 0000000000000002" +
			"00000001 0000000000000023 00000002 6162ffff 0000000000000003 00000000 00000001", func(c *Client) bool {
			names := ""
			var res ReadDirResult
			err := c.ReadDir(ctx, cred, fh1, 0, verf1, 4096, &res,
				func(e *DirEntry) bool { names += string(e.Name) + "/"; return true })
			return err == nil && names == "a/ab/" && res.EOF
		}},
		"data": {okHex + noneHex + "00000005 00000001 00000005 68656c6c6f eeeeee", func(c *Client) bool {
			var res ReadResult
			buf := []byte("........")
			return c.Read(ctx, cred, fh1, 0, buf, &res) == nil && string(buf) == "hello..." && res.N == 5
		}},
		"path": {okHex + noneHex + "00000003 2f61620a", func(c *Client) bool {
			var res ReadLinkResult
			buf := []byte("....")
			return c.ReadLink(ctx, cred, fh1, buf, &res) == nil && string(buf) == "/ab." && res.N == 3
		}},
	} {
		if !x.call(NewClient(&canned{result: unhex(x.reply)})) {
			t.Errorf("%s: got a wrong result for a reply with a nonzero pad", name)
		}
	}
}

// TestDirectoryOfMaximumSize decodes a listing of MaxDirCount bytes. ReadDir must deliver all
// entries, or none when the end of the list is invalid. It must not allocate memory for the
// entries.
func TestDirectoryOfMaximumSize(t *testing.T) {
	head := unhex(okHex + noneHex + verfHex)
	entry := unhex("00000001 0000000000000022 00000001 61000000 0000000000000002")
	end := unhex("00000000 00000001")
	fits := (MaxDirCount - len(head) - len(end)) / len(entry)
	reply := bytes.Clone(head)
	for range fits {
		reply = append(reply, entry...)
	}
	for _, x := range []struct {
		name string
		end  []byte
		want int
	}{
		{"complete", end, fits},
		{"truncated after an entry", nil, 0},
		{"truncated in an entry", entry[:7], 0},
		{"eof of 2", []byte{0, 0, 0, 0, 0, 0, 0, 2}, 0},
	} {
		result := append(reply[:len(reply):len(reply)], x.end...)
		c := NewClient(callerFunc(func(_ context.Context, m *sunrpc.Message) error {
			m.Result, m.ResultDataLen = result, -1
			return nil
		}))
		n := 0
		var res ReadDirResult
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := c.ReadDir(t.Context(), cred, fh1, 0, verf1, 4096, &res, func(*DirEntry) bool { n++; return true })
		runtime.ReadMemStats(&after)
		if n != x.want || (err == nil) != (x.want > 0) || err != nil && !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: got %d entries, error %v; want %d entries", x.name, n, err, x.want)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 256<<10 {
			t.Errorf("%s: allocated %d bytes, want at most %d", x.name, grown, 256<<10)
		}
	}
}
