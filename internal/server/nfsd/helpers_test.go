package nfsd

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// A client calls a Server without a transport.
type client struct {
	*mounts.Client
	s   *Server
	dir string
}

// A caller is an nfs3.Caller that calls a Server directly.
type caller struct {
	s    *Server
	peer netip.AddrPort
	try  bool // by TryServe first
}

// Call repeats a call that comes too early for another search of the export, as a client does.
func (c *caller) Call(ctx context.Context, m *sunrpc.Message) error {
	for {
		err := c.callOnce(ctx, m)
		d := sunrpc.NewDecoder(m.Result)
		if err != nil || c.s.paths == nil || nfs3.Status(d.Uint32()) != nfs3.ErrJukebox || ctx.Err() != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

func (c *caller) callOnce(ctx context.Context, m *sunrpc.Message) error {
	msg := sunrpc.AppendCall(nil, 1, m.Prog, m.Vers, m.Proc, m.Cred)
	msg = append(msg, m.Args...)
	if len(m.ArgData) > 0 {
		msg = sunrpc.AppendFixed(msg, m.ArgData)
	}
	var reply []byte
	ok := false
	if c.try {
		reply, ok = c.s.TryServe(c.peer, msg, nil)
	}
	if !ok {
		var err error
		if reply, err = c.s.ServeRPC(ctx, c.peer, msg, nil); err != nil {
			return err
		}
	}
	_, results, err := sunrpc.ParseReply(reply)
	m.Result, m.ResultDataLen = append(m.Result[:0], results...), -1
	return err
}

var (
	peer = netip.MustParseAddrPort("192.0.2.1:700")
	root = mounts.Credential(0, 0)
	user = mounts.Credential(1000, 1000)
)

// start exports a temporary directory, by default to root without squashing.
func start(t testing.TB, change func(*Config)) *client {
	t.Helper()
	dir := t.TempDir()
	kit.Must(t, os.Chmod(dir, 0o777))
	cfg := Config{Dir: dir, StateDir: t.TempDir(), NoRootSquash: true}
	if change != nil {
		change(&cfg)
	}
	c := restart(t, cfg)
	t.Cleanup(func() { c.s.Close() })
	return c
}

// restart starts a server; the caller closes it.
func restart(t testing.TB, cfg Config) *client {
	t.Helper()
	s, err := New(cfg)
	kit.Must(t, err)
	calls := nfs3.NewClient(&caller{s: s, peer: peer, try: true})
	return &client{Client: &mounts.Client{Client: calls, T: t, Root: s.rootFH, Ctx: context.Background(), Cred: root},
		s: s, dir: cfg.Dir}
}

// both runs a test with handles of the kernel and with handles by inode number.
func both(t *testing.T, f func(t *testing.T, change func(*Config))) {
	t.Run("kernel handles", func(t *testing.T) { f(t, func(*Config) {}) })
	t.Run("inode handles", func(t *testing.T) { f(t, func(c *Config) { c.byInode = true }) })
}

func (c *client) mkdir(cred []byte, dir nfs3.FH, name string, mode uint32) nfs3.FH {
	c.T.Helper()
	var res nfs3.CreateResult
	c.OK(c.Mkdir(c.Ctx, cred, dir, name, &nfs3.SetAttr{HasMode: true, Mode: mode}, &res))
	return res.FH
}

func (c *client) write(cred []byte, fh nfs3.FH, data string) nfs3.WriteResult {
	c.T.Helper()
	var res nfs3.WriteResult
	c.OK(c.Write(c.Ctx, cred, fh, 0, []byte(data), nfs3.Unstable, &res))
	return res
}

func (c *client) read(cred []byte, fh nfs3.FH) string {
	c.T.Helper()
	buf := make([]byte, 100)
	var res nfs3.ReadResult
	c.OK(c.Read(c.Ctx, cred, fh, 0, buf, &res))
	return string(buf[:res.N])
}

func (c *client) getattr(fh nfs3.FH) (a nfs3.Attr) {
	c.T.Helper()
	c.OK(c.GetAttr(c.Ctx, c.Cred, fh, &a))
	return a
}

// path names a file of the export on this host.
func (c *client) path(name string) string { return filepath.Join(c.dir, name) }

func (c *client) stat(name string) syscall.Stat_t {
	c.T.Helper()
	var st syscall.Stat_t
	c.OK(syscall.Lstat(c.path(name), &st))
	return st
}

func asError(err error, e **nfs3.Error) bool { return errors.As(err, e) }
