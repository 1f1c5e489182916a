package nfsserve

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// raw makes an NFS call with these arguments and returns its status and a decoder of what follows.
func (c *client) raw(proc nfs3.Proc, args []byte) (uint32, sunrpc.Decoder) {
	c.T.Helper()
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(proc), Cred: c.Cred, Args: args,
		MaxResult: 2 << 20}
	c.OK(c.rpc.Call(c.Ctx, &m))
	d := sunrpc.NewDecoder(m.Result)
	return d.Uint32(), d
}

func (c *client) args(fh nfs3.FH) []byte { return sunrpc.AppendOpaque(nil, fh.Bytes()) }

// A call may ask for more than a reply can hold: the reply holds part of it, and the next call
// succeeds, too.
func TestCountsBeyondAReply(t *testing.T) {
	s, dir := start(t, nil)
	kit.Must(t, os.WriteFile(filepath.Join(dir, "a"), make([]byte, 3<<20), 0o644))
	const files = 4500
	kit.Must(t, os.Mkdir(filepath.Join(dir, "d"), 0o755))
	for i := range files {
		if err := os.WriteFile(filepath.Join(dir, "d", fmt.Sprintf("%s%05d", strings.Repeat("n", 240), i)), nil,
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	c := dial(t, s.TCPAddr)
	file, sub := c.MustLookup(c.Root, "a").FH, c.MustLookup(c.Root, "d").FH
	readDir := sunrpc.AppendUint32(append(c.args(sub), make([]byte, 16)...), math.MaxUint32)
	for _, tt := range []struct {
		name string
		proc nfs3.Proc
		args []byte
	}{
		{"READ", nfs3.ProcRead, sunrpc.AppendUint32(sunrpc.AppendUint64(c.args(file), 0), 2<<20)},
		{"READ of all", nfs3.ProcRead, sunrpc.AppendUint32(sunrpc.AppendUint64(c.args(file), 0), math.MaxUint32)},
		{"READDIR", nfs3.ProcReadDir, readDir},
		{"READDIRPLUS", nfs3.ProcReadDirPlus, sunrpc.AppendUint32(readDir, math.MaxUint32)},
	} {
		for range 2 {
			st, d := c.raw(tt.proc, tt.args)
			if st != stOK || d.Remaining() > maxRecord || d.Remaining() < 100<<10 {
				t.Fatalf("%s: status %d, %d bytes", tt.name, st, d.Remaining())
			}
			if tt.proc != nfs3.ProcRead {
				continue
			}
			d.Fixed(4 + fattr)
			if count, eof := d.Uint32(), d.Bool(); count != ioSize || eof {
				t.Fatalf("%s: %d bytes, eof %v", tt.name, count, eof)
			}
		}
	}
}

// Offsets and sizes that no file has.
func TestOffsetsBeyondEveryFile(t *testing.T) {
	s, dir := start(t, nil)
	c := dial(t, s.TCPAddr)
	fh := c.MustCreate(c.Cred, c.Root, "file", 0o644)
	var w nfs3.WriteResult
	c.OK(c.Write(c.Ctx, c.Cred, fh, 0, []byte("0123456789"), nfs3.FileSync, &w))
	for _, off := range []uint64{math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64 - 4, math.MaxUint64} {
		st, d := c.raw(nfs3.ProcRead, sunrpc.AppendUint32(sunrpc.AppendUint64(c.args(fh), off), 4096))
		d.Fixed(4 + fattr)
		if count, eof := d.Uint32(), d.Bool(); st != stOK || count != 0 || !eof {
			t.Errorf("READ at %#x: status %d, %d bytes, eof %v", off, st, count, eof)
		}
		c.Want(c.Write(c.Ctx, c.Cred, fh, off, []byte("abc"), nfs3.Unstable, &w), syscall.EFBIG)
	}
	// The error is that of the local file system.
	const last = math.MaxInt64 - 3
	local, err := os.OpenFile(filepath.Join(dir, "local"), os.O_CREATE|os.O_WRONLY, 0o600)
	c.OK(err)
	defer local.Close()
	if _, err := local.WriteAt([]byte("abc"), last); err == nil {
		c.OK(c.Write(c.Ctx, c.Cred, fh, last, []byte("abc"), nfs3.Unstable, &w))
	} else {
		c.Want(c.Write(c.Ctx, c.Cred, fh, last, []byte("abc"), nfs3.Unstable, &w), syscall.EFBIG)
	}
	how := nfs3.CreateHow{Mode: nfs3.Unchecked, Attr: nfs3.SetAttr{HasSize: true, Size: math.MaxUint64}}
	var cr nfs3.CreateResult
	c.Want(c.Create(c.Ctx, c.Cred, c.Root, "file", &how, &cr), syscall.EFBIG)
	c.Want(c.Create(c.Ctx, c.Cred, c.Root, "other", &how, &cr), syscall.EFBIG)
}

// Calls for files and directories fail on pipes, devices and links, and never wait for the other
// end of a pipe.
func TestHandlesOfOtherThings(t *testing.T) {
	s, _ := start(t, nil)
	c := dial(t, s.TCPAddr)
	var cr nfs3.CreateResult
	c.OK(c.Mknod(c.Ctx, c.Cred, c.Root, "pipe", nfs3.NF3FIFO, &nfs3.SetAttr{}, nfs3.Device{}, &cr))
	pipe := cr.FH
	c.OK(c.Symlink(c.Ctx, c.Cred, c.Root, "link", ".", &nfs3.SetAttr{}, &cr))
	link := cr.FH
	c.MustCreate(c.Cred, c.Root, "file", 0o644)
	c.OK(c.Symlink(c.Ctx, c.Cred, c.Root, "tofile", "file", &nfs3.SetAttr{}, &cr))
	tofile := cr.FH
	for name, fh := range map[string]nfs3.FH{"pipe": pipe, "link": link, "link to a file": tofile} {
		for _, tt := range []struct {
			proc nfs3.Proc
			args []byte
			want uint32
		}{
			{nfs3.ProcCommit, make([]byte, 12), stInval},
			{nfs3.ProcReadDir, sunrpc.AppendUint32(make([]byte, 16), 4096), stNotDir},
			{nfs3.ProcReadDirPlus, sunrpc.AppendUint32(sunrpc.AppendUint32(make([]byte, 16), 4096), 4096), stNotDir},
			{nfs3.ProcRead, sunrpc.AppendUint32(make([]byte, 8), 1), stInval},
		} {
			if st, _ := c.raw(tt.proc, append(c.args(fh), tt.args...)); st != tt.want {
				t.Errorf("%v of a %s: status %d, want %d", tt.proc, name, st, tt.want)
			}
		}
	}
	c.OK(c.Remove(c.Ctx, c.Cred, c.Root, "file", new(nfs3.WccData)))
}
