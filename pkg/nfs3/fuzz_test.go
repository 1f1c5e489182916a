package nfs3

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// fuzzCaller returns a fixed reply and a fixed ResultDataLen.
type fuzzCaller struct {
	result []byte
	placed int // -1: none
}

func (c *fuzzCaller) Call(_ context.Context, m *sunrpc.Message) error {
	m.Result = append(m.Result[:0], c.result...)
	m.ResultDataLen = -1
	if len(m.ResultData) > 0 {
		m.ResultDataLen = c.placed
	}
	return nil
}

// FuzzNFSReply passes any bytes as a reply to a procedure. The call must not panic, must return a
// documented error or valid results, and must allocate in proportion to the reply.
func FuzzNFSReply(f *testing.F) {
	for _, x := range exchanges {
		f.Add(uint8(x.proc), int16(-1), unhex(x.reply))
		if x.place != "" {
			f.Add(uint8(x.proc), int16(len(x.place)), unhex(x.reply))
		}
	}
	f.Fuzz(func(t *testing.T, proc uint8, placed int16, reply []byte) {
		c := NewClient(&fuzzCaller{reply, int(placed)}, Options{})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := callAny(t, c, Proc(proc)%NumProcs, len(reply))
		runtime.ReadMemStats(&after)
		var nfsErr *Error
		if err != nil && !errors.As(err, &nfsErr) && !errors.Is(err, ErrMalformed) {
			t.Fatalf("got undocumented error %v", err)
		}
		if err != nil && (err.Error() == "" || Errno(err) == 0) {
			t.Fatalf("got error %q with errno %d", err, Errno(err))
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 256<<10+4*uint64(len(reply)) {
			t.Fatalf("allocated %d bytes for a reply of %d", grown, len(reply))
		}
	})
}

// callAny calls the procedure and checks that its results are in range.
func callAny(t *testing.T, c *Client, p Proc, size int) error {
	ctx := context.Background()
	buf := make([]byte, 300)
	switch p {
	case ProcNull:
		return c.Null(ctx, cred)
	case ProcGetAttr:
		var res Attr
		err := c.GetAttr(ctx, cred, fh1, &res)
		checkAttr(t, &res, err == nil)
		return err
	case ProcSetAttr:
		return c.SetAttr(ctx, cred, fh1, &SetAttr{}, nil, new(WccData))
	case ProcLookup:
		var res LookupResult
		err := c.Lookup(ctx, cred, fh1, "n", &res)
		if err == nil && res.FH.IsZero() {
			t.Fatal("LOOKUP: got success without a handle")
		}
		return err
	case ProcAccess:
		return c.Access(ctx, cred, fh1, 0x3f, new(AccessResult))
	case ProcReadLink:
		var res ReadLinkResult
		err := c.ReadLink(ctx, cred, fh1, buf, &res)
		if err == nil && (res.N < 0 || res.N > len(buf)) {
			t.Fatalf("READLINK: got %d bytes, buffer has %d", res.N, len(buf))
		}
		return err
	case ProcRead:
		var res ReadResult
		err := c.Read(ctx, cred, fh1, 0, buf, &res)
		if err == nil && (res.N < 0 || res.N > len(buf)) {
			t.Fatalf("READ: got %d bytes, buffer has %d", res.N, len(buf))
		}
		return err
	case ProcWrite:
		var res WriteResult
		err := c.Write(ctx, cred, fh1, 0, buf, Unstable, &res)
		if err == nil && (res.Count == 0 || res.Count > uint32(len(buf)) || res.Committed > FileSync) {
			t.Fatalf("WRITE: got invalid result %+v", res)
		}
		return err
	case ProcCreate:
		return c.Create(ctx, cred, fh1, "n", &CreateHow{}, new(CreateResult))
	case ProcMkdir:
		return c.Mkdir(ctx, cred, fh1, "n", &SetAttr{}, new(CreateResult))
	case ProcSymlink:
		return c.Symlink(ctx, cred, fh1, "n", "t", &SetAttr{}, new(CreateResult))
	case ProcMknod:
		return c.Mknod(ctx, cred, fh1, "n", NF3FIFO, &SetAttr{}, Device{}, new(CreateResult))
	case ProcRemove:
		return c.Remove(ctx, cred, fh1, "n", new(WccData))
	case ProcRmdir:
		return c.Rmdir(ctx, cred, fh1, "n", new(WccData))
	case ProcRename:
		return c.Rename(ctx, cred, fh1, "n", fh2, "m", new(RenameResult))
	case ProcLink:
		return c.Link(ctx, cred, fh1, fh2, "m", new(LinkResult))
	case ProcReadDir, ProcReadDirPlus:
		return callReadDir(ctx, t, c, p, size)
	case ProcFSStat:
		return c.FSStat(ctx, cred, fh1, new(FSStatResult))
	case ProcFSInfo:
		return c.FSInfo(ctx, cred, fh1, new(FSInfoResult))
	case ProcPathConf:
		return c.PathConf(ctx, cred, fh1, new(PathConfResult))
	default:
		return c.Commit(ctx, cred, fh1, 0, 0, new(CommitResult))
	}
}

// callReadDir lists a directory and checks the entries. A failed call must deliver none.
func callReadDir(ctx context.Context, t *testing.T, c *Client, p Proc, size int) (err error) {
	var res ReadDirResult
	delivered := 0
	each := func(e *DirEntry) bool {
		delivered++
		if !validName(e.Name) || len(e.Name) > MaxName || e.FH.Len() > FHSize || e.HasFH && e.FH.IsZero() {
			t.Fatalf("got invalid entry %+v", e)
		}
		checkAttr(t, &e.Attr.Attr, e.Attr.Present)
		return true
	}
	if p == ProcReadDir {
		err = c.ReadDir(ctx, cred, fh1, 0, Verifier{}, 4096, &res, each)
	} else {
		err = c.ReadDirPlus(ctx, cred, fh1, 0, Verifier{}, 4096, 4096, &res, each)
	}
	if err != nil && delivered != 0 || err == nil && delivered != res.Entries || delivered > size/20 {
		t.Fatalf("%v: delivered %d entries, counted %d in %d bytes, error %v", p, delivered, res.Entries, size, err)
	}
	return err
}

func checkAttr(t *testing.T, a *Attr, present bool) {
	if present && (a.Type < NF3REG || a.Type > NF3FIFO || a.Mode&^ModeMask != 0) {
		t.Fatalf("got invalid attributes %+v", a)
	}
}
