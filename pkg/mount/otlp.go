package mount

import (
	"context"
	"encoding/binary"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// traces passes sampled requests and RPCs of one mount to the exporter. A nil *traces is off.
type traces struct {
	exporter *otlp.Exporter
	mount    otlp.Mount
}

// newTraces returns the traces of the mount, nil if they are off.
func (s *mountStack) newTraces() *traces {
	if s.shared.traces == nil {
		return nil
	}
	return &traces{s.shared.traces, otlp.Mount{Dir: s.dir, Server: s.spec.Host, Port: s.opts.Port,
		Process: func(thread uint32) uint32 {
			pid, _ := process(thread)
			return pid
		}}}
}

// operation returns the operation of a request, nil if the request is not sampled. The first call
// decides that.
func (t *traces) operation(r *kernel.Request) *otlp.Operation {
	if r.Tag == nil {
		r.Tag = t.exporter.Sample(&t.mount)
	}
	return r.Tag.(*otlp.Operation)
}

// rpcEnded adds an RPC to its request r if the request is sampled. It samples RPCs that belong to
// no request.
func (t *traces) rpcEnded(ctx context.Context, r *kernel.Request, connection int, peer func() netip.AddrPort,
	c *xprt.Ended) {
	var o *otlp.Operation
	if r != nil {
		o = t.operation(r)
	} else {
		o = t.exporter.Sample(&t.mount)
	}
	if o == nil {
		return
	}
	m := c.Message
	call := otlp.Call{ProgramName: programName(c.Prog), ProcName: procedureName(c.Prog, c.Vers, c.Proc),
		Vers: c.Vers, Proc: c.Proc, XID: c.XID, Slot: c.Slot, Connection: connection, Sends: c.Sends, Peer: peer(),
		ArgBytes: len(m.Args) + len(m.ArgData), Times: c.Times}
	if c.Err != nil {
		call.Result = otlp.Result{Error: errorKind(c.Err), Failure: true}
	} else {
		call.ResultBytes = len(m.Result) + max(m.ResultDataLen, 0)
		call.Status, call.Result = replyStatus(c)
	}
	if r != nil {
		o.AddCall(&call)
		return
	}
	call.Owner = ownerOf(ctx, c.Proc).Owner
	o.AddCall(&call)
	t.exporter.Export(o)
}

// replyStatus returns the status of a reply of NFS or NFSACL, "" if it has none. It is in the first
// four bytes of the results (RFC 1813 §3.3).
func replyStatus(c *xprt.Ended) (string, otlp.Result) {
	if nfs3.Proc(c.Proc) == nfs3.ProcNull || len(c.Message.Result) < 4 {
		return "", otlp.Result{}
	}
	s := nfs3.Status(binary.BigEndian.Uint32(c.Message.Result))
	if s == nfs3.OK {
		return s.String(), otlp.Result{}
	}
	return s.String(), otlp.Result{Error: s.String(), Failure: !isUsual(s.Errno())}
}

// isUsual reports whether an error is a usual answer: to the lookup of a missing name, or to a
// request for an attribute that the file does not have.
func isUsual(err unix.Errno) bool {
	return err == unix.ENOENT || err == unix.ENODATA || err == unix.EOPNOTSUPP
}

// programName returns the name of an RPC program as in rpc(5), or else its number.
func programName(prog uint32) string {
	switch prog {
	case nfs3.Program:
		return "nfs"
	case nfsacl.Program:
		return "nfs_acl"
	}
	return strconv.FormatUint(uint64(prog), 10)
}

// requestEnded exports a request if it is sampled.
func (t *traces) requestEnded(r *kernel.Request) {
	o := t.operation(r)
	if o == nil {
		return
	}
	o.Request = &otlp.Request{Name: r.Op.String(), Bytes: r.Bytes, Calls: r.Calls, Times: r.Times,
		Owner: otlp.Owner{Type: control.OwnerProcess, Thread: r.Header.Pid, UID: r.Header.Uid}}
	if r.Header.Pid == 0 {
		o.Request.Owner.Type = control.OwnerKernel
	}
	if r.Status > 0 {
		errno := unix.Errno(r.Status)
		o.Request.Result = otlp.Result{Error: unix.ErrnoName(errno), Failure: !isUsual(errno)}
	}
	t.exporter.Export(o)
}
