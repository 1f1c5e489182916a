package nfsd

import (
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Programs beside NFS (RFC 1813 §5, RFC 1833 §3).
const (
	progMount   = 100005
	versMount   = 3
	progPortmap = 100000
	versPortmap = 2

	mountNull    = 0
	mountMnt     = 1
	mountDump    = 2
	mountUmnt    = 3
	mountUmntAll = 4
	mountExport  = 5

	pmapNull    = 0
	pmapGetPort = 3
	pmapDump    = 4
	ipprotoTCP  = 6

	maxMountPath = 1024 // MNTPATHLEN (RFC 1813 §5.1.1)
)

// mount answers MOUNT version 3.
func (s *Server) mount(peer netip.AddrPort, h *sunrpc.CallHeader, args, reply []byte) []byte {
	if h.Vers != versMount {
		return sunrpc.AppendProgMismatchReply(reply, h.XID, versMount, versMount)
	}
	success := func() []byte { return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success) }
	switch h.Proc {
	case mountNull, mountUmntAll:
		return success()
	case mountMnt, mountUmnt:
		d := sunrpc.NewDecoder(args)
		name := d.Opaque(maxMountPath)
		switch {
		case d.Err() != nil || d.Remaining() != 0:
			return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs)
		case h.Proc == mountUmnt: // no list of mounts is kept
			return success()
		case !s.allows(peer):
			return sunrpc.AppendUint32(success(), uint32(nfs3.ErrAcces))
		}
		fh, err := s.mountPoint(string(name))
		reply = sunrpc.AppendUint32(success(), uint32(statusOf(err)))
		if err != nil {
			return reply
		}
		reply = sunrpc.AppendUint32(nfs3.AppendFH(reply, &fh), 2)
		return sunrpc.AppendUint32(sunrpc.AppendUint32(reply, sunrpc.FlavorSys), sunrpc.FlavorNone)
	case mountDump:
		return sunrpc.AppendBool(success(), false)
	case mountExport:
		reply = sunrpc.AppendString(sunrpc.AppendBool(success(), true), "/")
		for _, p := range s.cfg.Allow {
			reply = sunrpc.AppendString(sunrpc.AppendBool(reply, true), p.String())
		}
		// no further group, no further export
		return sunrpc.AppendBool(sunrpc.AppendBool(reply, false), false)
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail)
}

// mountPoint is the handle of the directory that a client names in MNT: "/" or the path of the
// export, or a directory below either. os.Root keeps the path inside the export.
func (s *Server) mountPoint(name string) (nfs3.FH, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return nfs3.FH{}, unix.EINVAL
	}
	name = path.Clean("/" + name)
	if below, ok := strings.CutPrefix(name+"/", path.Clean("/"+filepath.ToSlash(s.dir))+"/"); ok && s.dir != "/" {
		name = "/" + below
	}
	name = strings.Trim(name, "/")
	if name == "" {
		return s.rootFH, nil
	}
	f, err := s.root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		if os.IsNotExist(err) {
			err = unix.ENOENT
		}
		return nfs3.FH{}, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nfs3.FH{}, err
	}
	if uint64(st.Dev) != s.rootKey.dev {
		return nfs3.FH{}, unix.EACCES // another file system is mounted there
	}
	if s.paths != nil { // remember the way
		if err := s.rememberPath(name); err != nil {
			return nfs3.FH{}, err
		}
	}
	return s.handleOf(int(f.Fd()), nil, "")
}

// rememberPath notes the place of each directory on a path.
func (s *Server) rememberPath(name string) error {
	parent, at := s.rootKey, ""
	for elem := range strings.SplitSeq(name, "/") {
		at = path.Join(at, elem)
		info, err := s.root.Lstat(at)
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || !info.IsDir() {
			return unix.ENOTDIR // a symbolic link on the way has no fixed place
		}
		k := inodeKey{uint64(st.Dev), st.Ino}
		s.paths.add(k, parent, elem)
		parent = k
	}
	return nil
}

// portmap answers the port mapper version 2: all programs are on the same port.
func (s *Server) portmap(h *sunrpc.CallHeader, args, reply []byte) []byte {
	if h.Vers != versPortmap {
		return sunrpc.AppendProgMismatchReply(reply, h.XID, versPortmap, versPortmap)
	}
	served := [...][2]uint32{{nfs3.Program, nfs3.Version}, {progMount, versMount},
		{nfsacl.Program, nfsacl.Version}, {nlmwire.Program, nlmwire.Version}, {nlmwire.NSMProgram, nlmwire.NSMVersion}}
	success := func() []byte { return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success) }
	switch h.Proc {
	case pmapNull:
		return success()
	case pmapGetPort:
		d := sunrpc.NewDecoder(args)
		want, proto := [2]uint32{d.Uint32(), d.Uint32()}, d.Uint32()
		if d.Err() != nil {
			return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs)
		}
		for _, p := range served {
			if p == want && proto == ipprotoTCP {
				return sunrpc.AppendUint32(success(), uint32(s.cfg.Port))
			}
		}
		return sunrpc.AppendUint32(success(), 0)
	case pmapDump:
		reply = success()
		for _, p := range served {
			for _, v := range [...]uint32{1, p[0], p[1], ipprotoTCP, uint32(s.cfg.Port)} {
				reply = sunrpc.AppendUint32(reply, v)
			}
		}
		return sunrpc.AppendBool(reply, false)
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail)
}
