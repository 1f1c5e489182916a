package nfsd

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// errNotNow is the error of a call that must not wait for the disk and would have to.
var errNotNow = errors.New("the call needs the disk")

// ErrNoRPC is the error of a message that is no RPC call and deserves no reply; the transport
// should end the connection.
var ErrNoRPC = errors.New("not an RPC call")

// A call is one NFSv3 call while it runs.
type call struct {
	*Server
	proc   nfs3.Proc
	who    cred
	nowait bool // return errNotNow instead of waiting for the disk
	args   nfs3.Args
	out    []byte // the reply so far
	limit  int    // largest reply in bytes

	obj, obj2 *object // of args.FH and args.FH2
	w, w2     wcc
}

// A wcc is a change of an object, for the wcc_data of the reply.
type wcc struct {
	obj    *object
	before nfs3.WccAttr
	ticket uint64
	alone  bool
	ended  bool
}

// ServeRPC executes one call of peer and appends the reply to reply. An error means that the call
// gets no reply; it wraps [ErrNoRPC] or is that of ctx. It satisfies svcrdma.Handler: the data of a
// READ goes from the file straight into reply.
func (s *Server) ServeRPC(ctx context.Context, peer netip.AddrPort, msg, reply []byte) ([]byte, error) {
	return s.serve(ctx, peer, msg, reply, false)
}

// TryServe is ServeRPC for calls that need no disk: ok is false when the call needs more, and then
// nothing was done.
func (s *Server) TryServe(peer netip.AddrPort, msg, reply []byte) (out []byte, ok bool) {
	out, err := s.serve(context.Background(), peer, msg, reply, true)
	return out, err == nil
}

func (s *Server) serve(ctx context.Context, peer netip.AddrPort, msg, reply []byte, nowait bool) ([]byte, error) {
	h, args, err := sunrpc.ParseCall(msg)
	var denied *sunrpc.DeniedError
	switch {
	case errors.As(err, &denied):
		return sunrpc.AppendMismatchReply(reply, h.XID), nil
	case err != nil && len(msg) < sunrpc.SizeUint32:
		return nil, ErrNoRPC
	case err != nil:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs), nil
	}
	switch h.Prog {
	case progPortmap:
		return s.portmap(&h, args, reply), nil
	case progMount:
		if nowait && h.Proc == mountMnt {
			return nil, errNotNow
		}
		return s.mount(peer, &h, args, reply), nil
	case nfsacl.Program:
		if nowait {
			return nil, errNotNow
		}
		return s.nfsACL(ctx, peer, &h, args, reply)
	case nlmwire.Program, nlmwire.NSMProgram:
		return s.lockCall(ctx, peer, &h, args, reply, nowait)
	case nfs3.Program:
	default:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProgUnavail), nil
	}
	switch {
	case h.Vers != nfs3.Version:
		return sunrpc.AppendProgMismatchReply(reply, h.XID, nfs3.Version, nfs3.Version), nil
	case h.Proc >= nfs3.NumProcs:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail), nil
	case nfs3.Proc(h.Proc) == nfs3.ProcNull:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
	case !s.allows(peer):
		return sunrpc.AppendDeniedReply(reply, h.XID, sunrpc.AuthTooWeak), nil
	case nowait && !quick[h.Proc] && !(s.inMemory && quickInMemory[h.Proc]):
		return nil, errNotNow
	}
	if !nowait {
		release, err := s.slot(ctx)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	return s.nfs(&h, args, reply, nowait)
}

// quick marks the procedures that TryServe tries, and quickInMemory those that it also tries when
// the file system is in memory.
var (
	quick = [nfs3.NumProcs]bool{nfs3.ProcGetAttr: true, nfs3.ProcLookup: true, nfs3.ProcAccess: true,
		nfs3.ProcRead: true, nfs3.ProcFSInfo: true, nfs3.ProcPathConf: true}
	quickInMemory = [nfs3.NumProcs]bool{nfs3.ProcReadLink: true, nfs3.ProcFSStat: true}
)

// nfs executes a call of NFS.
func (s *Server) nfs(h *sunrpc.CallHeader, args, reply []byte, nowait bool) ([]byte, error) {
	c := s.calls.Get().(*call)
	defer s.calls.Put(c)
	c.Server, c.proc, c.nowait, c.limit = s, nfs3.Proc(h.Proc), nowait && !s.inMemory, len(reply)+s.cfg.MaxReply
	if nfs3.ParseArgs(c.proc, args, &c.args) != nil {
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs), nil
	}
	ok := false
	if c.who, ok = credOf(h, s.cfg.NoRootSquash); !ok {
		return sunrpc.AppendDeniedReply(reply, h.XID, sunrpc.AuthBadCred), nil
	}
	if !s.id.switches {
		c.who = cred{uid: s.id.uid, gid: s.id.gid}
	}
	c.out = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	results := len(c.out)
	c.out = sunrpc.AppendUint32(c.out, uint32(nfs3.OK))
	err := c.run()
	if err == errNotNow {
		c.finish()
		return nil, err
	}
	if err != nil {
		c.out = sunrpc.AppendUint32(c.out[:results], uint32(statusFrom(err)))
		c.appendFailure()
	}
	out := c.out
	c.finish()
	return out, nil
}

// A statusError is a status that no error number stands for.
type statusError nfs3.Status

func (e statusError) Error() string { return nfs3.Status(e).String() }

func statusFrom(err error) nfs3.Status {
	if st, ok := err.(statusError); ok {
		return nfs3.Status(st)
	}
	return statusOf(err)
}

// finish releases the objects and buffers of the call.
func (c *call) finish() {
	c.w.done()
	c.w2.done()
	c.objects.release(c.obj)
	c.objects.release(c.obj2)
	c.obj, c.obj2, c.out, c.w, c.w2 = nil, nil, nil, wcc{}, wcc{}
	c.args = nfs3.Args{}
}

var procs = [nfs3.NumProcs]func(*call) error{
	nfs3.ProcGetAttr:     (*call).getAttr,
	nfs3.ProcSetAttr:     (*call).setAttr,
	nfs3.ProcLookup:      (*call).lookup,
	nfs3.ProcAccess:      (*call).access,
	nfs3.ProcReadLink:    (*call).readLink,
	nfs3.ProcRead:        (*call).read,
	nfs3.ProcWrite:       (*call).write,
	nfs3.ProcCreate:      (*call).create,
	nfs3.ProcMkdir:       (*call).mkdir,
	nfs3.ProcSymlink:     (*call).symlink,
	nfs3.ProcMknod:       (*call).mknod,
	nfs3.ProcRemove:      (*call).remove,
	nfs3.ProcRmdir:       (*call).rmdir,
	nfs3.ProcRename:      (*call).rename,
	nfs3.ProcLink:        (*call).link,
	nfs3.ProcReadDir:     (*call).readDir,
	nfs3.ProcReadDirPlus: (*call).readDir,
	nfs3.ProcFSStat:      (*call).fsStat,
	nfs3.ProcFSInfo:      (*call).fsInfo,
	nfs3.ProcPathConf:    (*call).pathConf,
	nfs3.ProcCommit:      (*call).commit,
}

// changing marks the procedures that a read-only export refuses.
var changing = [nfs3.NumProcs]bool{nfs3.ProcSetAttr: true, nfs3.ProcWrite: true, nfs3.ProcCreate: true,
	nfs3.ProcMkdir: true, nfs3.ProcSymlink: true, nfs3.ProcMknod: true, nfs3.ProcRemove: true, nfs3.ProcRmdir: true,
	nfs3.ProcRename: true, nfs3.ProcLink: true, nfs3.ProcCommit: true}

func (c *call) run() error {
	var st nfs3.Status
	if c.nowait {
		if c.obj = c.objects.get(&c.args.FH); c.obj == nil {
			return errNotNow
		}
	} else if c.obj, st = c.object(&c.args.FH); st != nfs3.OK {
		return statusError(st)
	}
	if c.proc == nfs3.ProcRename || c.proc == nfs3.ProcLink {
		if c.obj2, st = c.object(&c.args.FH2); st != nfs3.OK {
			return statusError(st)
		}
	}
	if c.leftExport(c.obj) || c.leftExport(c.obj2) {
		return unix.ESTALE
	}
	if c.cfg.ReadOnly && changing[c.proc] {
		return unix.EROFS
	}
	return procs[c.proc](c)
}

// appendFailure appends what follows the status of a failure (RFC 1813 §3.3): attributes where they
// can be had.
func (c *call) appendFailure() {
	switch c.proc {
	case nfs3.ProcGetAttr:
	case nfs3.ProcSetAttr, nfs3.ProcWrite, nfs3.ProcCreate, nfs3.ProcMkdir, nfs3.ProcSymlink, nfs3.ProcMknod,
		nfs3.ProcRemove, nfs3.ProcRmdir, nfs3.ProcCommit:
		c.appendWcc(&c.w, c.obj)
	case nfs3.ProcRename:
		c.appendWcc(&c.w, c.obj)
		c.appendWcc(&c.w2, c.obj2)
	case nfs3.ProcLink:
		c.appendPostOp(c.obj)
		c.appendWcc(&c.w, c.obj2)
	default:
		c.appendPostOp(c.obj)
	}
}

// begin notes the attributes of an object before the call changes it.
func (c *call) begin(w *wcc, o *object) error {
	var st unix.Stat_t
	*w = wcc{obj: o}
	w.ticket, w.alone = o.changes.begin()
	if err := o.stat(&st); err != nil {
		return err
	}
	w.before = wccOf(&st)
	return nil
}

// done ends the change.
func (w *wcc) done() {
	if w.obj != nil && !w.ended {
		w.ended = true
		w.alone = w.obj.changes.end(w.ticket, w.alone)
	}
}

// appendWcc appends the wcc_data of the change w, or of an object whose change did not begin.
func (c *call) appendWcc(w *wcc, o *object) {
	var after *nfs3.Attr
	var st unix.Stat_t
	var a nfs3.Attr
	if o != nil && o.stat(&st) == nil {
		a = c.attrOf(&st)
		after = &a
	}
	w.done()
	if w.obj != nil && w.alone {
		c.out = nfs3.AppendWcc(c.out, &w.before, after)
	} else {
		c.out = nfs3.AppendWcc(c.out, nil, after)
	}
}

func (c *call) appendPostOp(o *object) {
	var st unix.Stat_t
	if o == nil || o.stat(&st) != nil {
		c.out = nfs3.AppendPostOpAttr(c.out, nil)
		return
	}
	a := c.attrOf(&st)
	c.out = nfs3.AppendPostOpAttr(c.out, &a)
}
