package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// nfsPort is the TCP port of NFS (RFC 1813 §1.1).
	nfsPort = 2049
	// fewCredits is the number of credits below which calls of one mount often wait.
	fewCredits = 4
	// smallRead is the size of READs in bytes below which a mount is slow.
	smallRead = 64 << 10
	// undoTimeout bounds each call that ends what the diagnosis began. It has a separate time,
	// because the diagnosis may have been canceled.
	undoTimeout = 5 * time.Second
)

// A server has the steps of a mount. Each step uses what earlier ones found.
type server struct {
	cfg       *Config
	addr      netip.Addr
	local     netip.Addr // address of this host on the route to the server
	mountArgs mountd.Args
	mountPort int // TCP port of MOUNT; 0 if unknown
	provider  verbs.Provider
	transport *xprt.Transport
	connected error // result of the connection attempt
	client    *nfs3.Client
	cred      []byte
	root      nfs3.FH
	mounted   bool // the server has this host in its list of mounts
	keys      *KeyReport
}

func newServer(cfg *Config) *server {
	machine, _ := os.Hostname() // AUTH_SYS allows an empty machine name
	gids, _ := os.Getgroups()
	sys := sunrpc.AuthSys{Machine: machine, UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	for _, g := range gids {
		sys.GIDs = append(sys.GIDs, uint32(g))
	}
	return &server{cfg: cfg, cred: sunrpc.AppendAuthSys(nil, &sys), mountArgs: mountd.Args{Export: cfg.Spec.Export,
		Port: int(cfg.Options.MountPort), AnySourcePort: cfg.Options.NoResvPort, Timeout: cfg.Timeout,
		Cred: &sunrpc.AuthSys{Machine: machine}}}
}

func (s *server) steps() []step {
	connected := []string{"handshake"}
	return []step{
		{name: "allow-mounts", needed: true, run: s.allowMounts},
		{name: "name", needed: true, run: s.lookup},
		{name: "route", needs: []string{"name"}, needed: true, run: s.route},
		{name: "port-mapper", needs: []string{"route"}, run: s.portMapper},
		{name: "mount-service", needs: []string{"route"}, needed: true, run: s.mountService},
		{name: "exports", needs: []string{"mount-service"}, run: s.exports},
		{name: "nfs-tcp", needs: []string{"route"}, run: s.nfsTCP},
		{name: "provider", needs: []string{"route"}, needed: true, run: s.chooseProvider},
		{name: "rdma-port", needs: []string{"provider"}, needed: true, run: s.connect},
		{name: "handshake", needs: []string{"rdma-port"}, needed: true, run: s.handshake},
		{name: "private-data", needs: connected, run: s.privateData},
		{name: "nfs-null", needs: connected, needed: true, run: s.null},
		{name: "credits", needs: []string{"nfs-null"}, run: s.credits},
		{name: "inline", needs: connected, run: s.inline},
		{name: "mnt", needs: []string{"mount-service"}, needed: true, run: s.mnt},
		{name: "fsinfo", needs: []string{"mnt", "nfs-null"}, needed: true, run: s.fsinfo},
		{name: "getattr", needs: []string{"mnt", "nfs-null"}, needed: true, run: s.getattr},
		{name: "keys", needs: []string{"getattr"}, run: s.sampleKeys},
		{name: "read-write", needs: []string{"getattr"}, needed: s.cfg.Write, run: s.readWrite},
		{name: "lock-service", needs: []string{"route"}, run: s.locks},
	}
}

// close ends what the steps began.
func (s *server) close() {
	if s.mounted {
		ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
		defer cancel()
		args := s.mountArgs
		args.Timeout = undoTimeout
		_ = mountd.Unmount(ctx, args) // it only informs the server (RFC 1813 §5.2.3)
	}
	if s.transport != nil {
		s.transport.Close()
		mount.SettleConnects()
	}
}

// allowMounts checks the source with allow_mounts of the configuration of the daemon.
func (s *server) allowMounts(context.Context) finding {
	if err := s.cfg.ConfigError; err != nil && !errors.Is(err, fs.ErrNotExist) {
		return skip("needs configuration, which failed")
	}
	if err := s.cfg.Allowed.CheckSource(*s.cfg.Spec, &s.cfg.Options); err != nil {
		return fail(err, "")
	}
	if s.cfg.Allowed.RestrictsDirs() {
		return ok("the daemon may mount the source, on the directories in allow_mounts only")
	}
	return ok("the daemon may mount the source")
}

func (s *server) lookup(ctx context.Context) finding {
	var err error
	if s.addr, err = mount.ResolveHost(ctx, s.cfg.Spec.Host); err != nil {
		return fail(err, "")
	}
	s.mountArgs.Host = s.addr.String()
	if s.cfg.Spec.Host == s.addr.String() {
		return ok("%s is an address", s.addr)
	}
	return ok("%s has the address %s", s.cfg.Spec.Host, s.addr)
}

// addresses returns the RDMA addresses of the server.
func (s *server) addresses() []netip.AddrPort {
	return s.cfg.Options.Addresses(netip.AddrPortFrom(s.addr, s.cfg.Options.Port))
}

// route finds the source address for the server. It sends nothing.
func (s *server) route(ctx context.Context) finding {
	addr := s.addresses()[0]
	conn, err := new(net.Dialer).DialContext(ctx, "udp", addr.String())
	if err != nil {
		return fail(err, "check the address, and the routes of this host (ip route get "+addr.Addr().String()+")")
	}
	s.local = conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	conn.Close()
	if i := interfaceOf(s.local); i != nil {
		return ok("from %s on %s, MTU %d", s.local, i.Name, i.MTU)
	}
	return ok("from %s", s.local)
}

// interfaceOf returns the interface that has the address, or nil.
func interfaceOf(a netip.Addr) *net.Interface {
	all, err := net.Interfaces()
	if err != nil {
		return nil
	}
	for i := range all {
		addrs, _ := all[i].Addrs()
		for _, n := range addrs {
			if p, err := netip.ParsePrefix(n.String()); err == nil && p.Addr().Unmap() == a.WithZone("") {
				return &all[i]
			}
		}
	}
	return nil
}

func (s *server) portMapper(ctx context.Context) finding {
	port, err := mountd.GetPort(ctx, s.mountArgs, programMount, versionMount)
	var e *mountd.Error
	switch {
	case err == nil:
		return ok("TCP port %d answers; MOUNT is at port %d", mountd.PortmapPort, port)
	case errors.As(err, &e) && e.Kind == mountd.NotRegistered:
		return warn("start the NFS server with MOUNT version 3 over TCP",
			"TCP port %d answers, but does not know MOUNT version 3", mountd.PortmapPort)
	}
	f := fail(err, "")
	if s.cfg.Options.MountPort != 0 {
		f.remedy = "none needed with mountport="
	}
	return f
}

func (s *server) mountService(ctx context.Context) finding {
	port, err := mountd.FindPort(ctx, s.mountArgs)
	if err != nil {
		return fail(err, "")
	}
	args := s.mountArgs
	args.Port = port
	if err := mountd.Null(ctx, args); err != nil {
		return fail(err, "")
	}
	s.mountPort = port
	return ok("MOUNT version 3 answers at TCP port %d", port)
}

func (s *server) exports(ctx context.Context) finding {
	list, err := mountd.Exports(ctx, s.mountArgs)
	if err != nil {
		return fail(err, "")
	}
	want := path.Clean(s.cfg.Spec.Export)
	var above *mountd.Export // the longest export that contains the directory
	for i := range list {
		dir := path.Clean(list[i].Dir)
		if below(want, dir) && (above == nil || len(dir) > len(path.Clean(above.Dir))) {
			above = &list[i]
		}
	}
	switch {
	case len(list) == 0:
		return warn("add the directory to the exports of the server (Linux: /etc/exports, then exportfs -r)",
			"the server lists no exports to this client")
	case above == nil:
		return warn("use a listed directory, or export it on the server", "%s is not among the exports: %s", want,
			exportNames(list))
	}
	where := "is exported"
	if dir := path.Clean(above.Dir); dir != want {
		where = "is below the export " + dir
	}
	switch admits(above.Groups, s.local) {
	case admitted:
		return ok("%s %s, and includes this client", want, where)
	case excluded:
		return warn("add this client to the export on the server", "%s %s to %s, but not to %s", want, where,
			control.Brief(strings.Join(above.Groups, ", ")), s.local)
	}
	return ok("%s %s to %s; only the server knows whether that includes this client", want, where,
		control.Brief(strings.Join(above.Groups, ", ")))
}

// below reports whether the directory is dir or below it.
func below(directory, dir string) bool {
	return directory == dir || dir == "/" || strings.HasPrefix(directory, dir+"/")
}

func exportNames(list []mountd.Export) string {
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].Dir
	}
	return control.Brief(strings.Join(names, ", "))
}

// An admission says whether an entry of the export list includes this client.
type admission int

const (
	unknownAdmission admission = iota
	admitted
	excluded
)

// admits interprets the clients of an export as Linux and NFS-Ganesha write them. Names and
// netgroups are unknown, because the server resolves them.
func admits(groups []string, client netip.Addr) admission {
	if len(groups) == 0 {
		return admitted
	}
	result := excluded
	for _, g := range groups {
		if g == "*" || g == "(everyone)" || g == "0.0.0.0/0" && client.Is4() {
			return admitted
		}
		a, errAddr := netip.ParseAddr(g)
		p, errPrefix := parseNetwork(g)
		switch {
		case errAddr == nil && a.Unmap() == client, errPrefix == nil && p.Contains(client):
			return admitted
		case errAddr != nil && errPrefix != nil:
			result = unknownAdmission
		}
	}
	return result
}

// parseNetwork parses ADDRESS/BITS and ADDRESS/MASK.
func parseNetwork(s string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p, nil
	}
	addr, mask, _ := strings.Cut(s, "/")
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return netip.Prefix{}, err
	}
	m, err := netip.ParseAddr(mask)
	if err != nil || !m.Is4() {
		return netip.Prefix{}, fmt.Errorf("network %q: invalid mask", s)
	}
	bytes := m.As4()
	bits, size := net.IPMask(bytes[:]).Size()
	if size == 0 {
		return netip.Prefix{}, fmt.Errorf("network %q: invalid mask", s)
	}
	return netip.PrefixFrom(a, bits), nil
}

// nfsTCP makes a NULL call of NFS over TCP. A mount does not need it. Its result tells a server
// without RDMA from a server that is down.
func (s *server) nfsTCP(ctx context.Context) finding {
	port, err := mountd.GetPort(ctx, s.mountArgs, programNFS, versionNFS)
	if err != nil {
		port = nfsPort
	}
	// A TCP connection to the RDMA port would stop the RDMA listener of a stock Linux server.
	if port == int(s.cfg.Options.Port) {
		return skip("port %d is the RDMA port", port)
	}
	err = s.nullOverTCP(ctx, port)
	if errors.Is(err, syscall.ECONNREFUSED) && s.mountPort != 0 { // the server may have one port for all
		if s.nullOverTCP(ctx, s.mountPort) == nil {
			port, err = s.mountPort, nil
		}
	}
	if err != nil {
		return fail(fmt.Errorf("NFS over TCP at port %d: %w", port, err), "none needed if NFS over RDMA works")
	}
	return ok("NFS version 3 answers at TCP port %d", port)
}

func (s *server) nullOverTCP(ctx context.Context, port int) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(s.addr.String(), strconv.Itoa(port)))
	if err != nil {
		return err
	}
	c := rpctcp.New(conn, rpctcp.Options{})
	defer c.Close()
	return nfs3.NewClient(c).Null(ctx, sunrpc.AppendAuthNone(nil))
}

func (s *server) chooseProvider(ctx context.Context) finding {
	p, reason, err := mount.ChooseProvider(ctx, &s.cfg.Options, s.addresses()[0],
		hclog.NewNullLogger())
	if err != nil {
		return fail(err, "")
	}
	s.provider = p
	return ok("%s: %s", p.Name(), strings.TrimSuffix(reason, " (see nfsrdmad doctor)"))
}

// connect makes the RDMA connection. The TCP connection is part of it: one that only probes can
// stop the listener of a stock siw server.
func (s *server) connect(ctx context.Context) finding {
	c := s.cfg.Options.TransportConfig()
	c.Provider, c.Servers = s.provider, xprt.NewAddresses(s.addresses()...)
	c.ConnectTimeout, c.Timeout = s.cfg.Timeout, s.cfg.Timeout
	c.Recovery, c.Retrans = xprt.Soft, 0
	c.KeepAlive, c.IdleTimeout = -1, -1 // all calls are those of the steps
	c.TraceEvents = sampleEvents
	var err error
	if s.transport, err = xprt.New(c); err != nil {
		return fail(err, "")
	}
	s.client = nfs3.NewClient(s.transport)
	s.connected = s.transport.Connect(ctx)
	at := s.transport.Address()
	var e *verbs.ConnError
	switch {
	case s.connected == nil, errors.As(s.connected, &e) && portAnswered(e):
		return ok("%s accepts connections (the time includes the handshake)", at)
	case e == nil: // a resource of this host
		return fail(s.connected, "")
	case errors.Is(e, syscall.ECONNREFUSED), e.Kind == verbs.ConnRejected:
		return fail(e, fmt.Sprintf("start NFS over RDMA on the server (Linux: rdma=y in the section nfsd of "+
			"/etc/nfs.conf, or \"echo rdma %d > /proc/fs/nfsd/portlist\"), set port=, "+
			"or run \"nfsrdmad serve --backend\" in front of a server without RDMA", at.Port()))
	}
	return fail(e, fmt.Sprintf("check that the server is up, and open TCP port %d in the firewalls", at.Port()))
}

// portAnswered reports whether the peer accepted the connection below the RDMA handshake.
func portAnswered(e *verbs.ConnError) bool {
	switch e.Kind {
	case verbs.ConnUnreachable, verbs.ConnLocal:
		return false
	}
	return e.Phase != verbs.PhaseConnect
}

// handshake reports the second part of connect.
func (s *server) handshake(context.Context) finding {
	var e *verbs.ConnError
	if errors.As(s.connected, &e) && e.Kind == verbs.ConnRejected {
		return fail(e, "let the server accept this client (serve --allow), and see the log of the server")
	} else if s.connected != nil {
		return fail(s.connected, "check that port= is the RDMA port of the server, and see the log of the server")
	}
	l := s.transport.Link()
	name := "MPA (iWARP)"
	if l.Device.Transport == verbs.TransportIB {
		name = "connection manager"
	}
	return ok("%s handshake with device %s", name, l.Device.Name)
}

// privateData reports what the server announced (RFC 8797).
func (s *server) privateData(context.Context) finding {
	l := s.transport.Link()
	switch {
	case !l.PeerFound:
		return warn("none needed; a server with RFC 8797 allows larger messages without chunks",
			"the server sends no private data (RFC 8797); thresholds are %d bytes, and this side invalidates all keys",
			l.Peer.SendSize)
	case !l.Peer.RemoteInv:
		return ok("the server sends up to %d and receives up to %d bytes inline; it does not invalidate keys",
			l.Peer.SendSize, l.Peer.RecvSize)
	}
	return ok("the server sends up to %d and receives up to %d bytes inline, and invalidates keys", l.Peer.SendSize,
		l.Peer.RecvSize)
}

func (s *server) null(ctx context.Context) finding {
	if err := s.client.Null(ctx, sunrpc.AppendAuthNone(nil)); err != nil {
		return s.callFailed(err, "check that an NFS version 3 server listens at this RDMA port")
	}
	return ok("NFS version 3 answers over RDMA")
}

// callFailed returns the finding for a call over RDMA. It adds why the connection ended.
func (s *server) callFailed(err error, remedy string) finding {
	f := fail(err, remedy)
	if errors.Is(err, context.DeadlineExceeded) {
		f.text = fmt.Sprintf("no reply within %v", s.cfg.Timeout)
	}
	if last := s.transport.Stats().LastError; last != "" && !strings.Contains(f.text, last) {
		f.text += " (" + last + ")"
	}
	return f
}

func (s *server) credits(context.Context) finding {
	n := s.transport.Stats().Credits
	if slots := s.cfg.Options.Slots; n < uint64(min(fewCredits, slots)) {
		return warn("allow more credits on the server (Linux: /proc/sys/sunrpc/svc_rdma/max_requests)",
			"the server grants %d of %d credits; calls wait for each other", n, slots)
	}
	return ok("the server grants %d of %d credits", n, s.cfg.Options.Slots)
}

func (s *server) inline(context.Context) finding {
	l := s.transport.Link()
	text := fmt.Sprintf("calls up to %d bytes, replies up to %d bytes without chunks", l.InlineSend, l.InlineRecv)
	if min(l.InlineSend, l.InlineRecv) < min(s.cfg.Options.InlineBytes, xprt.DefaultInlineBytes) {
		return warn("raise the inline threshold of the server", "%s; this side allows %d", text,
			s.cfg.Options.InlineBytes)
	}
	return ok("%s", text)
}

func (s *server) mnt(ctx context.Context) finding {
	res, err := mountd.Mount(ctx, s.mountArgs)
	if s.mounted = err == nil; s.mounted {
		err = mount.CheckFlavors(s.cfg.Spec.Export, res)
	}
	if err != nil {
		return fail(err, "")
	}
	s.root = res.FH
	return ok("the server returned the handle of %s, %d bytes, for AUTH_SYS", s.cfg.Spec.Export, len(res.FH.Bytes()))
}

func (s *server) fsinfo(ctx context.Context) finding {
	var info nfs3.FSInfoResult
	if err := s.client.FSInfo(ctx, s.cred, s.root, &info); err != nil {
		return s.callFailed(err, "check the export on the server")
	}
	text := fmt.Sprintf("READ up to %d, WRITE up to %d bytes", info.ReadMax, info.WriteMax)
	if min(info.ReadMax, info.WriteMax) < smallRead {
		return warn("raise the sizes on the server", "%s; bulk data is slow", text)
	}
	return ok("%s", text)
}

func (s *server) getattr(ctx context.Context) finding {
	var a nfs3.Attr
	if err := s.client.GetAttr(ctx, s.cred, s.root, &a); err != nil {
		return s.callFailed(err, "check the export on the server")
	}
	if a.Type != nfs3.NF3DIR {
		return fail(errors.New("the root of the export is not a directory"), "export a directory")
	}
	return ok("the root is a directory, mode %04o, uid %d, gid %d", a.Mode&0o7777, a.UID, a.GID)
}

func (s *server) locks(ctx context.Context) finding {
	if s.cfg.Options.LocksAreLocal() {
		return skip("all locks are local to this host (local_lock=all)")
	}
	at := netip.AddrPortFrom(s.addr, s.cfg.Options.Port)
	info := control.MountInfo{Options: s.cfg.Options.String(), Server: at.String()}
	if err := mount.CheckLocks(ctx, &info); err != nil {
		return fail(err, "")
	}
	return ok("NLM version 4 answers")
}
