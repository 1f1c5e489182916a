package nfsserve

import (
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxRecord is the largest call or reply in octets: 1 MiB of data and its headers.
const maxRecord = 1<<20 + 64<<10

// numWorkers is how many calls an export executes at a time.
const numWorkers = 16

// An export is one directory as an NFS server: what every connection shares. Safe for concurrent
// use.
type export struct {
	dir      string
	readOnly bool
	port     uint16 // TCP port, for the port mapper's answers
	tree     *tree
	listings listings
	verifier [8]byte // of WRITE and COMMIT; new with every process
	workers  chan *worker
}

// exports tells whether p is a name by which the export may be mounted.
func (e *export) exports(p string) bool {
	p = path.Clean("/" + p)
	return p == "/" || p == path.Clean("/"+filepath.ToSlash(e.dir))
}

// serve answers one call; the reply is appended to reply. A call that cannot be answered ends its
// connection.
func (e *export) serve(ctx context.Context, call, reply []byte) ([]byte, error) {
	h, a, err := sunrpc.ParseCall(call)
	var denied *sunrpc.DeniedError
	switch {
	case errors.As(err, &denied):
		return sunrpc.AppendMismatchReply(reply, h.XID), nil
	case err != nil && len(call) < sunrpc.SizeUint32:
		return nil, err
	case err != nil:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs), nil
	}
	switch h.Prog {
	case progPortmap:
		return e.portmap(&h, a, reply), nil
	case progMount:
		return e.mount(ctx, &h, call, a, reply)
	case nfs3.Program:
	default:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProgUnavail), nil
	}
	switch {
	case h.Vers != nfs3.Version:
		return sunrpc.AppendProgMismatchReply(reply, h.XID, nfs3.Version, nfs3.Version), nil
	case h.Proc >= nfs3.NumProcs:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail), nil
	}
	parsed, ok := parseArgs(nfs3.Proc(h.Proc), a)
	if !ok {
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs), nil
	}
	if h.Proc == uint32(nfs3.ProcNull) {
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
	}
	w, err := e.take(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { e.workers <- w }()
	unlock := e.lock(nfs3.Proc(h.Proc))
	defer unlock()
	w.fs.who, w.fs.err = credOf(&h), nil
	w.fs.sync = parsed.stable != nfs3.Unstable
	w.fs.cookie, w.fs.page = parsed.cookie, int(min(parsed.count, ioSize)/entryRoom)+1
	c := &nfsCall{export: e, w: w, proc: nfs3.Proc(h.Proc), xid: h.XID, args: &parsed, msg: call,
		argsOff: len(call) - len(a)}
	return c.run(reply)
}

func (e *export) take(ctx context.Context) (*worker, error) {
	select {
	case w := <-e.workers:
		return w, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// lock keeps paths still: see doc.go.
func (e *export) lock(proc nfs3.Proc) (unlock func()) {
	var l sync.Locker = e.tree.calls.RLocker()
	switch proc {
	case nfs3.ProcRename, nfs3.ProcRemove, nfs3.ProcRmdir:
		l = &e.tree.calls
	}
	l.Lock()
	return l.Unlock
}

// An nfsCall is one NFSv3 call with well-formed arguments.
type nfsCall struct {
	*export
	w       *worker
	proc    nfs3.Proc
	xid     uint32
	args    *args
	msg     []byte
	argsOff int
}

// NFS status codes that are used here (RFC 1813 §2.6).
const (
	stOK          = 0
	stPerm        = 1
	stNoEnt       = 2
	stIO          = 5
	stNXIO        = 6
	stAcces       = 13
	stExist       = 17
	stXDev        = 18
	stNoDev       = 19
	stNotDir      = 20
	stIsDir       = 21
	stInval       = 22
	stFBig        = 27
	stNoSpc       = 28
	stROFS        = 30
	stMLink       = 31
	stNameTooLong = 63
	stNotEmpty    = 66
	stDQuot       = 69
	stStale       = 70
	stNotSync     = 10002
	stNotSupp     = 10004
	stServerFault = 10006
)

// status maps a file system's failure.
func status(err error) uint32 {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		switch {
		case err == nil:
			return stOK
		case errors.Is(err, fs.ErrNotExist):
			return stNoEnt
		case errors.Is(err, fs.ErrExist):
			return stExist
		case errors.Is(err, fs.ErrPermission):
			return stAcces
		}
		return stIO // also a path that os.Root refuses
	}
	switch errno {
	case syscall.EPERM, syscall.ENOENT, syscall.EIO, syscall.ENXIO, syscall.EACCES, syscall.EEXIST, syscall.EXDEV, syscall.ENODEV,
		syscall.ENOTDIR, syscall.EISDIR, syscall.EINVAL, syscall.EFBIG, syscall.ENOSPC, syscall.EROFS, syscall.EMLINK:
		return uint32(errno) // the same numbers on Linux
	case syscall.ENAMETOOLONG:
		return stNameTooLong
	case syscall.ENOTEMPTY:
		return stNotEmpty
	case syscall.EDQUOT:
		return stDQuot
	case syscall.ESTALE:
		return stStale
	case syscall.ELOOP:
		return stInval
	case syscall.EOPNOTSUPP, syscall.ENOSYS:
		return stNotSupp
	}
	return stIO
}

// failBody is the size in octets of what follows the status of a failure: attributes, all left out
// (RFC 1813 §3.3).
func failBody(p nfs3.Proc) int {
	switch p {
	case nfs3.ProcGetAttr:
		return 0
	case nfs3.ProcSetAttr, nfs3.ProcWrite, nfs3.ProcCreate, nfs3.ProcMkdir, nfs3.ProcSymlink, nfs3.ProcMknod, nfs3.ProcRemove,
		nfs3.ProcRmdir, nfs3.ProcCommit:
		return 8 // wcc_data
	case nfs3.ProcRename:
		return 16
	case nfs3.ProcLink:
		return 12
	}
	return 4 // post_op_attr
}

func (c *nfsCall) fail(reply []byte, st uint32) []byte {
	reply = sunrpc.AppendUint32(sunrpc.AppendAcceptedReply(reply, c.xid, sunrpc.Success), st)
	return append(reply, make([]byte, failBody(c.proc))...)
}

// run checks what go-nfs does not, executes, and repairs the answer.
func (c *nfsCall) run(reply []byte) ([]byte, error) {
	st := c.checkNames()
	if st == stOK {
		st = c.checkRange()
	}
	if st != stOK {
		return c.fail(reply, st), nil
	}
	if native, ok := natives[c.proc]; ok {
		body, st, handled := native(c)
		switch {
		case handled && st != stOK:
			return c.fail(reply, st), nil
		case handled:
			reply = sunrpc.AppendUint32(sunrpc.AppendAcceptedReply(reply, c.xid, sunrpc.Success), stOK)
			return append(reply, body...), nil
		}
	}
	got, err := c.w.call(c.fit())
	if err != nil {
		return nil, err
	}
	return append(reply, c.repair(got)...), nil
}

// entryRoom is the part of count that go-nfs takes for each entry of a directory.
const entryRoom = 512

// minDirCount is the least dircount that go-nfs takes. It bounds nothing that matters: maxcount
// bounds the reply.
const minDirCount = 512

// fit returns the call with numbers that go-nfs copes with: it would make a reply as long as is
// asked for, and takes offsets for signed.
func (c *nfsCall) fit() []byte {
	be, a, msg := binary.BigEndian, c.args, c.msg
	own := func(at int) []byte { // the place in a copy: the call is the caller's
		if &msg[0] == &c.msg[0] {
			msg = append([]byte(nil), c.msg...)
		}
		return msg[c.argsOff+at:]
	}
	switch c.proc {
	case nfs3.ProcRead:
		if a.offset > math.MaxInt64 { // behind the end of every file
			be.PutUint64(own(a.offsetAt), math.MaxInt64)
		}
	case nfs3.ProcReadDirPlus:
		if be.Uint32(msg[c.argsOff+a.dirCountAt:]) < minDirCount {
			be.PutUint32(own(a.dirCountAt), minDirCount)
		}
	case nfs3.ProcReadDir:
	default:
		return msg
	}
	// fewer octets may be answered (RFC 1813 §3.3.6, §3.3.16, §3.3.17)
	if be.Uint32(msg[c.argsOff+a.countAt:]) > ioSize {
		be.PutUint32(own(a.countAt), ioSize)
	}
	return msg
}

// checkRange refuses what goes beyond the largest file that there can be.
func (c *nfsCall) checkRange() uint32 {
	a := c.args
	switch c.proc {
	case nfs3.ProcWrite:
		if a.offset > math.MaxInt64-uint64(a.count) {
			return stFBig
		}
	case nfs3.ProcCreate:
		if a.set.HasSize && a.set.Size > math.MaxInt64 {
			return stFBig
		}
	}
	return stOK
}

// checkNames refuses names that are not one path element (RFC 1813 §2.5, filename3), and what the
// directory's mode forbids.
func (c *nfsCall) checkNames() uint32 {
	a := c.args
	switch c.proc {
	case nfs3.ProcLookup:
		if a.name == "." || a.name == ".." {
			return stOK
		}
		if st := checkName(a.name); st != stOK {
			return st
		}
		return c.checkSearch()
	case nfs3.ProcRename:
		if st := checkName(a.name2); st != stOK {
			return st
		}
	case nfs3.ProcCreate, nfs3.ProcMkdir, nfs3.ProcSymlink, nfs3.ProcMknod, nfs3.ProcLink:
		if a.name == "." || a.name == ".." {
			return stExist
		}
	case nfs3.ProcRemove, nfs3.ProcRmdir:
	default:
		return stOK
	}
	if st := checkName(a.name); st != stOK {
		return st
	}
	return c.checkKind()
}

func checkName(name string) uint32 {
	switch {
	case len(name) > nfs3.MaxName:
		return stNameTooLong
	case name == "" || name == "." || name == "..":
		return stInval
	case strings.ContainsAny(name, "/\x00"):
		return stAcces
	}
	return stOK
}

// checkSearch asks for the right to search the directory of a LOOKUP.
func (c *nfsCall) checkSearch() uint32 {
	p, ok := c.tree.fromHandle(c.args.fh)
	if !ok {
		return stOK // go-nfs says NFS3ERR_STALE
	}
	info, err := c.tree.root.Lstat(clean(path.Join(p...)))
	if err != nil || !info.IsDir() || !amRoot {
		return stOK
	}
	if c.w.fs.who.allowed(info.Mode(), ownerOf(info), groupOf(info))&permExec == 0 {
		return stAcces
	}
	return stOK
}

// checkKind keeps REMOVE from directories and RMDIR from anything else (RFC 1813 §3.3.12, §3.3.13).
func (c *nfsCall) checkKind() uint32 {
	if c.proc != nfs3.ProcRemove && c.proc != nfs3.ProcRmdir {
		return stOK
	}
	p, ok := c.tree.fromHandle(c.args.fh)
	if !ok {
		return stOK
	}
	info, err := c.tree.root.Lstat(path.Join(append(p, c.args.name)...))
	switch {
	case err != nil:
		return stOK
	case c.proc == nfs3.ProcRemove && info.IsDir():
		return stIsDir
	case c.proc == nfs3.ProcRmdir && !info.IsDir():
		return stNotDir
	}
	return stOK
}

func groupOf(info os.FileInfo) uint32 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Gid
	}
	return nobody
}

// Offsets in an accepted reply with an AUTH_NONE verifier.
const (
	acceptAt = sunrpc.AcceptedReplySize - sunrpc.SizeUint32
	statusAt = sunrpc.AcceptedReplySize
	bodyAt   = statusAt + sunrpc.SizeUint32
)

// repair corrects go-nfs's answer in place where RFC 1813 asks for another.
func (c *nfsCall) repair(r []byte) []byte {
	be := binary.BigEndian
	if len(r) < bodyAt || be.Uint32(r[acceptAt:]) != uint32(sunrpc.Success) {
		st := status(c.w.fs.err)
		if st == stOK {
			st = stServerFault
		}
		return c.fail(nil, st)
	}
	st := be.Uint32(r[statusAt:])
	if st != stOK {
		switch st {
		case stIO, stAcces, stNotDir, stServerFault: // go-nfs's names for any failure
			if c.w.fs.err != nil {
				st = status(c.w.fs.err)
			}
		}
		return c.fail(nil, st)
	}
	switch c.proc {
	case nfs3.ProcAccess:
		be.PutUint32(r[len(r)-4:], c.accessBits(be.Uint32(r[len(r)-4:])))
	case nfs3.ProcWrite:
		if c.args.stable == nfs3.Unstable { // no fsync was made
			be.PutUint32(r[len(r)-nfs3.WriteVerfSize-4:], uint32(nfs3.Unstable))
		}
	// go-nfs makes invarsec 64 bits wide: RFC 1813 §3.3.18 ends before its second half
	case nfs3.ProcFSStat:
		r = r[:min(len(r), afterAttr(r)+fsStatSize)]
	case nfs3.ProcFSInfo:
		c.repairFSInfo(r)
	case nfs3.ProcPathConf:
		if at := afterAttr(r); at+4 <= len(r) {
			be.PutUint32(r[at:], linkMax)
		}
	case nfs3.ProcCreate, nfs3.ProcMkdir:
		c.finishMode()
	}
	return r
}

// Values of FSINFO and PATHCONF.
const (
	ioSize  = 1 << 20
	dirSize = 64 << 10
	linkMax = 32000
	modeDir = 0o755
	fattr   = 84
	// fsStatSize is what follows the attributes in FSSTAT: six sizes and invarsec.
	fsStatSize = 6*sunrpc.SizeUint64 + sunrpc.SizeUint32
)

func afterAttr(r []byte) int {
	if binary.BigEndian.Uint32(r[bodyAt:]) != 0 {
		return bodyAt + 4 + fattr
	}
	return bodyAt + 4
}

// repairFSInfo gives sizes that the transport carries: go-nfs says a gigabyte.
func (c *nfsCall) repairFSInfo(r []byte) {
	at := afterAttr(r)
	// rtmax, rtpref, rtmult, wtmax, wtpref, wtmult, dtpref
	words := []uint32{ioSize, ioSize, 1, ioSize, ioSize, 1, dirSize}
	if at+4*len(words) > len(r) {
		return
	}
	for i, v := range words {
		binary.BigEndian.PutUint32(r[at+4*i:], v)
	}
}

// accessBits takes away what the mode forbids; go-nfs grants whatever is asked.
func (c *nfsCall) accessBits(granted uint32) uint32 {
	p, ok := c.tree.fromHandle(c.args.fh)
	if !ok {
		return 0
	}
	info, err := c.tree.root.Lstat(clean(path.Join(p...)))
	if err != nil {
		return 0
	}
	perm := uint32(permRead | permWrite | permExec)
	if amRoot {
		perm = c.w.fs.who.allowed(info.Mode(), ownerOf(info), groupOf(info))
	}
	var allowed uint32
	if perm&permRead != 0 {
		allowed |= nfs3.AccessRead
	}
	if perm&permWrite != 0 && !c.readOnly {
		allowed |= nfs3.AccessModify | nfs3.AccessExtend
		if info.IsDir() {
			allowed |= nfs3.AccessDelete
		}
	}
	if perm&permExec != 0 {
		if info.IsDir() {
			allowed |= nfs3.AccessLookup
		} else {
			allowed |= nfs3.AccessExecute
		}
	}
	return granted & allowed
}

// finishMode sets the mode bits that go-nfs drops, and a sane mode of a directory made without one.
func (c *nfsCall) finishMode() {
	mode, want := c.args.set.Mode, c.args.set.HasMode && c.args.set.Mode&^0o777 != 0
	if c.proc == nfs3.ProcMkdir && !c.args.set.HasMode {
		mode, want = modeDir, true
	}
	if !want {
		return
	}
	if p, ok := c.tree.fromHandle(c.args.fh); ok {
		_ = c.w.fs.chmod(path.Join(append(p, c.args.name)...), mode)
	}
}
