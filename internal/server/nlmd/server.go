package nlmd

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/rangelock"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// DefaultGrace is the default of Config.Grace.
const DefaultGrace = 45 * time.Second

// Limits, for which a client gets NLM4_DENIED_NOLOCKS. A user of a client gets at most half of the
// locks of the client: see fair.Limit.
const (
	maxLocks       = 1 << 16
	maxClientLocks = maxLocks / 4 // of one client address
)

// Config configures a Server. Check is necessary.
type Config struct {
	// Check returns whether the caller may lock the file. A file must have only one handle.
	Check func(h *sunrpc.CallHeader, fh *nfs3.FH) nlmwire.Stat
	// StateFile exists from the first lock until a Close without locks; "" for no grace period.
	StateFile string
	// Grace is the time after a restart for reclaims; 0 means DefaultGrace.
	Grace  time.Duration
	Logger hclog.Logger
}

// An owner is a lock owner of a client.
type owner struct {
	addr   netip.Addr
	caller string
	svid   uint32
	oh     string
}

type lock = rangelock.Lock[owner]

// A holder is an owner that has locks.
type holder struct {
	uid   uint32 // of the user who set the first lock
	locks int
}

// A Server holds the locks of one export. Its methods may be called concurrently.
type Server struct {
	cfg   Config
	log   hclog.Logger
	until time.Time // end of the grace period

	mu      sync.Mutex // guards the fields below
	files   map[nfs3.FH]*rangelock.Table[owner]
	holders map[owner]*holder
	clients map[netip.Addr]*fair.Limit // locks by user
	locks   int
	held    bool // StateFile exists
}

// New returns a Server.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, log: cfg.Logger, files: make(map[nfs3.FH]*rangelock.Table[owner]),
		holders: make(map[owner]*holder), clients: make(map[netip.Addr]*fair.Limit)}
	if s.log == nil {
		s.log = hclog.NewNullLogger()
	}
	grace := cfg.Grace
	if grace == 0 {
		grace = DefaultGrace
	}
	if cfg.StateFile == "" {
		return s
	}
	_, err := os.Stat(cfg.StateFile)
	if s.held = err == nil; s.held {
		s.until = time.Now().Add(grace)
		s.log.Info("clients held locks when the server ended: grace period begins", "duration", grace)
	}
	return s
}

// Locks returns the number of locks.
func (s *Server) Locks() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locks
}

// ServeNLM executes one call of NLM and appends the reply.
func (s *Server) ServeNLM(peer netip.Addr, h *sunrpc.CallHeader, args, reply []byte) []byte {
	if h.Vers != nlmwire.Version {
		return sunrpc.AppendProgMismatchReply(reply, h.XID, nlmwire.Version, nlmwire.Version)
	}
	var a nlmwire.Args
	proc := nlmwire.Proc(h.Proc)
	switch proc {
	case nlmwire.ProcNull:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	case nlmwire.ProcFreeAll:
		name, _, err := nlmwire.ParseNotify(args)
		return s.freed(peer, name, err, h, reply)
	case nlmwire.ProcTest, nlmwire.ProcLock, nlmwire.ProcCancel, nlmwire.ProcUnlock:
	default:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail)
	}
	if nlmwire.ParseArgs(proc, args, &a) != nil {
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs)
	}
	res := nlmwire.Res{Cookie: a.Cookie}
	fh, err := nfs3.NewFH(a.Region.FH)
	if err != nil {
		res.Stat = nlmwire.StaleFH
	} else {
		s.execute(peer, h, proc, &fh, &a, &res)
	}
	return nlmwire.AppendRes(sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), proc, &res)
}

// ServeNSM executes one call of NSM and appends the reply.
func (s *Server) ServeNSM(peer netip.Addr, h *sunrpc.CallHeader, args, reply []byte) []byte {
	switch {
	case h.Vers != nlmwire.NSMVersion:
		return sunrpc.AppendProgMismatchReply(reply, h.XID, nlmwire.NSMVersion, nlmwire.NSMVersion)
	case h.Proc == nlmwire.NSMNull:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	case h.Proc == nlmwire.NSMNotify:
		name, _, err := nlmwire.ParseNotify(args)
		return s.freed(peer, name, err, h, reply)
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail)
}

// freed removes the locks of a client that has restarted.
func (s *Server) freed(peer netip.Addr, name string, err error, h *sunrpc.CallHeader, reply []byte) []byte {
	if err != nil {
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for fh, table := range s.files {
		for _, l := range table.All() {
			if l.Owner.addr == peer && l.Owner.caller == name {
				s.change(fh, table, l.Owner, 0, func() { table.Clear(l.Owner, l.Start, l.End) })
			}
		}
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
}

func (s *Server) execute(peer netip.Addr, h *sunrpc.CallHeader, proc nlmwire.Proc, fh *nfs3.FH, a *nlmwire.Args,
	res *nlmwire.Res) {
	if proc == nlmwire.ProcCancel {
		return // no request is queued
	}
	if proc != nlmwire.ProcUnlock { // also a removed file can be unlocked
		if res.Stat = s.cfg.Check(h, fh); res.Stat != nlmwire.Granted {
			return
		}
	}
	l := lock{Exclusive: a.Exclusive, PID: a.Region.SVID,
		Owner: owner{addr: peer, caller: a.Region.Caller, svid: a.Region.SVID, oh: string(a.Region.OH)}}
	l.Start, l.End = a.Region.Range()
	uid := sunrpc.AuthUID(h.CredFlavor, h.Cred)
	s.mu.Lock()
	defer s.mu.Unlock()
	table := s.files[*fh]
	if table == nil {
		table = new(rangelock.Table[owner])
	}
	switch proc {
	case nlmwire.ProcTest:
		if res.Stat = s.graceStat(false); res.Stat != nlmwire.Granted {
			return
		}
		if c := table.Conflict(&l); c != nil {
			res.Stat = nlmwire.Denied
			res.Holder = nlmwire.Holder{Exclusive: c.Exclusive, SVID: c.Owner.svid, OH: []byte(c.Owner.oh)}
			res.Holder.SetRange(c.Start, c.End)
		}
	case nlmwire.ProcLock:
		res.Stat = s.lock(*fh, table, &l, uid, a)
	case nlmwire.ProcUnlock:
		if table.Splits(l.Owner, l.Start, l.End) && s.full(l.Owner, uid) {
			res.Stat = nlmwire.DeniedNoLocks
			return
		}
		s.change(*fh, table, l.Owner, uid, func() { table.Clear(l.Owner, l.Start, l.End) })
	}
}

// graceStat refuses new locks during the grace period and reclaims after it.
func (s *Server) graceStat(reclaim bool) nlmwire.Stat {
	if time.Now().Before(s.until) != reclaim {
		return nlmwire.DeniedGracePeriod
	}
	return nlmwire.Granted
}

// lock executes LOCK. mu is held.
func (s *Server) lock(fh nfs3.FH, table *rangelock.Table[owner], l *lock, uid uint32, a *nlmwire.Args) nlmwire.Stat {
	if stat := s.graceStat(a.Reclaim); stat != nlmwire.Granted {
		return stat
	}
	switch {
	case table.Conflict(l) != nil && a.Block:
		return nlmwire.Blocked
	case table.Conflict(l) != nil:
		return nlmwire.Denied
	case s.full(l.Owner, uid):
		return nlmwire.DeniedNoLocks
	}
	if err := s.noteHeld(); err != nil {
		s.log.Error("lock refused: cannot record that locks are held", "file", s.cfg.StateFile, "error", err)
		return nlmwire.DeniedNoLocks
	}
	s.change(fh, table, l.Owner, uid, func() { table.Set(*l) })
	return nlmwire.Granted
}

// full reports whether an owner gets no more locks. uid is that of its user. mu is held.
func (s *Server) full(id owner, uid uint32) bool {
	if h := s.holders[id]; h != nil {
		uid = h.uid
	}
	client := s.clients[id.addr]
	if s.locks >= maxLocks || client != nil && client.Take(uid) != nil {
		return true
	}
	if client != nil {
		client.Release(uid) // change counts the lock
	}
	return false
}

// change runs one change of the locks of an owner and keeps the counts. mu is held.
func (s *Server) change(fh nfs3.FH, table *rangelock.Table[owner], id owner, uid uint32, do func()) {
	before := table.Len()
	do()
	s.count(id, uid, table.Len()-before)
	if table.Len() == 0 {
		delete(s.files, fh)
	} else {
		s.files[fh] = table
	}
}

// count adds n to the locks of an owner. mu is held.
func (s *Server) count(id owner, uid uint32, n int) {
	if n == 0 {
		return
	}
	h, client := s.holders[id], s.clients[id.addr]
	if h == nil {
		h = &holder{uid: uid}
		s.holders[id] = h
	}
	if client == nil {
		client = fair.NewLimit("locks of client "+id.addr.String(), maxClientLocks)
		client.Warn = func(msg string, args ...any) { s.log.Warn(msg, args...) }
		s.clients[id.addr] = client
	}
	s.locks += n
	client.Add(h.uid, n)
	if h.locks += n; h.locks == 0 {
		delete(s.holders, id)
	}
	if client.Used() == 0 {
		delete(s.clients, id.addr)
	}
}

// noteHeld makes the state file, on stable storage. It does so once, and holds mu.
func (s *Server) noteHeld() error {
	if s.held || s.cfg.StateFile == "" {
		return nil
	}
	dir := filepath.Dir(s.cfg.StateFile)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(s.cfg.StateFile, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = errors.Join(f.Sync(), f.Close())
	if d, openErr := os.Open(dir); openErr == nil {
		_ = d.Sync()
		d.Close()
	}
	s.held = err == nil
	return err
}

// Close removes the state file if no client holds a lock and none may reclaim one. No call may be
// running.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held && s.locks == 0 && !time.Now().Before(s.until) {
		_ = os.Remove(s.cfg.StateFile) // a later server then only has a grace period without need
	}
}
