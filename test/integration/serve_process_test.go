package integration

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

const mountProgram = 100005 // RFC 1813 §5.1

// A rawClient is an NFSv3 client without caches, over TCP or RDMA.
type rawClient struct {
	*nfs3.Client
	t      testing.TB
	caller nfs3.Caller
	ctx    context.Context
	root   nfs3.FH
}

// dialTCP connects to addr and mounts "/". An error of the connection or of MNT is returned.
func dialTCP(t testing.TB, addr string) (*rawClient, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), mounts.ProcessTimeout)
	t.Cleanup(cancel)
	r, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { r.Close() })
	return newRawClient(ctx, t, r)
}

// dialRDMA is dialTCP for the RDMA port. It sends MNT over RDMA, too.
func dialRDMA(t testing.TB, addr string) (*rawClient, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), mounts.ProcessTimeout)
	t.Cleanup(cancel)
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: netip.MustParseAddrPort(addr),
		Recovery: xprt.Soft, Timeout: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { tr.Close() })
	if err := tr.Connect(ctx); err != nil {
		return nil, err
	}
	return newRawClient(ctx, t, tr)
}

func newRawClient(ctx context.Context, t testing.TB, caller nfs3.Caller) (*rawClient, error) {
	c := &rawClient{Client: nfs3.NewClient(caller, nfs3.Options{}), t: t, caller: caller, ctx: ctx}
	var err error
	c.root, err = c.mnt("/")
	return c, err
}

// mnt sends MNT (RFC 1813 §5.2.1) on the client's own connection. A status other than MNT3_OK is a
// syscall.Errno.
func (c *rawClient) mnt(path string) (nfs3.FH, error) {
	m := sunrpc.Message{Prog: mountProgram, Vers: 3, Proc: 1, Cred: credential(0, 0),
		Args: sunrpc.AppendString(nil, path), MaxResult: 256, Result: make([]byte, 0, 256)}
	if err := c.caller.Call(c.ctx, &m); err != nil {
		return nfs3.FH{}, fmt.Errorf("MNT: %w", err)
	}
	d := sunrpc.NewDecoder(m.Result)
	if st := d.Uint32(); st != 0 {
		return nfs3.FH{}, fmt.Errorf("MNT: %w", syscall.Errno(st))
	}
	fh, err := nfs3.NewFH(d.Opaque(nfs3.FHSize))
	return fh, errors.Join(err, d.Err())
}

// transports are the two ways to a served directory.
var transports = []struct {
	name string
	dial func(t testing.TB, s *mounts.ServedDir) (*rawClient, error)
}{
	{"TCP", func(t testing.TB, s *mounts.ServedDir) (*rawClient, error) { return dialTCP(t, s.TCP) }},
	{"RDMA", func(t testing.TB, s *mounts.ServedDir) (*rawClient, error) { return dialRDMA(t, s.RDMA) }},
}

// mustDial returns a client over TCP that has the root handle.
func mustDial(t testing.TB, s *mounts.ServedDir) *rawClient {
	t.Helper()
	c, err := dialTCP(t, s.TCP)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func credential(uid, gid uint32, gids ...uint32) []byte {
	return sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test", UID: uid, GID: gid, GIDs: gids})
}

func (c *rawClient) lookup(cred []byte, dir nfs3.FH, name string) (nfs3.FH, error) {
	var res nfs3.LookupResult
	err := c.Lookup(c.ctx, cred, dir, name, &res)
	return res.FH, err
}

// lookupRaw is lookup for names that nfs3 refuses to send.
func (c *rawClient) lookupRaw(dir nfs3.FH, name string) (nfs3.FH, error) {
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcLookup), Cred: credential(0, 0),
		Args: sunrpc.AppendString(sunrpc.AppendOpaque(nil, dir.Bytes()), name), MaxResult: 512, Result: make([]byte,
			0, 512)}
	if err := c.caller.Call(c.ctx, &m); err != nil {
		return nfs3.FH{}, err
	}
	d := sunrpc.NewDecoder(m.Result)
	if st := d.Uint32(); st != 0 {
		return nfs3.FH{}, syscall.Errno(st)
	}
	return nfs3.NewFH(d.Opaque(nfs3.FHSize))
}

// mustLookup finds a name of the root directory as root.
func (c *rawClient) mustLookup(name string) nfs3.FH {
	c.t.Helper()
	fh, err := c.lookup(credential(0, 0), c.root, name)
	if err != nil {
		c.t.Fatalf("LOOKUP %s: %v", name, err)
	}
	return fh
}

func (c *rawClient) create(cred []byte, dir nfs3.FH, name string, mode uint32) (nfs3.FH, error) {
	var res nfs3.CreateResult
	err := c.Create(c.ctx, cred, dir, name,
		&nfs3.CreateHow{Mode: nfs3.Guarded, Attr: nfs3.SetAttr{HasMode: true, Mode: mode}}, &res)
	return res.FH, err
}

func (c *rawClient) read(cred []byte, fh nfs3.FH) (string, error) {
	buf := make([]byte, 4096)
	var res nfs3.ReadResult
	err := c.Read(c.ctx, cred, fh, 0, buf, &res)
	return string(buf[:res.N]), err
}

// writeFiles makes files of dir with their contents, and the directories they need.
func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
