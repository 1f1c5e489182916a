package mountd

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
)

// Kind is the class of an Error.
type Kind uint8

// Kinds of errors.
const (
	// UnknownHost means that the host name does not resolve.
	UnknownHost Kind = iota + 1
	// PortmapUnreachable means that the port mapper refused the connection or the timeout expired.
	PortmapUnreachable
	// NotRegistered means that the program is not registered with the port mapper.
	NotRegistered
	// MountdUnreachable means that the MOUNT service refused the connection or the timeout expired.
	MountdUnreachable
	// NoExport means that the directory does not exist on the server (MNT3ERR_NOENT,
	// MNT3ERR_NOTDIR).
	NoExport
	// Refused means that the client may not mount the directory (MNT3ERR_ACCES, MNT3ERR_PERM, or
	// the credential was denied). Some servers, for example NFS-Ganesha, return this for any path
	// that they do not export.
	Refused
	// OtherStatus means another mountstat3; see Error.Status.
	OtherStatus
	// Protocol means that the reply is not valid MOUNT version 3 or port mapper version 2.
	Protocol
	// Canceled means that the context of the caller was canceled.
	Canceled
	// Usage means that the arguments are invalid.
	Usage
)

var kindNames = [...]string{"", "unknown host", "port mapper not reachable", "not registered",
	"MOUNT service not reachable", "no such export", "refused", "error status", "protocol error", "canceled",
	"invalid argument"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "kind " + strconv.Itoa(int(k))
}

// An Error is the error of a call of this package.
type Error struct {
	Kind   Kind
	Op     string // "MNT", "UMNT", "NULL", "EXPORT", "GETPORT"
	Host   string
	Port   int    // of the service; 0 if unknown
	Export string // only with MNT and UMNT
	Status Stat   // status of MNT, or MNT3OK
	Err    error  // cause, or nil
}

func (e *Error) Error() string {
	s := e.Op
	if e.Export != "" {
		s += " " + e.Export
	}
	at := e.Host
	if e.Port != 0 {
		at = net.JoinHostPort(e.Host, strconv.Itoa(e.Port))
	}
	s += " at " + at + ": " + e.description()
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if advice := e.advice(); advice != "" {
		s += "; " + advice
	}
	return s
}

// description describes the kind of the error.
func (e *Error) description() string {
	switch e.Kind {
	case UnknownHost:
		return "unknown host"
	case PortmapUnreachable:
		return "port mapper does not answer"
	case NotRegistered:
		return "service is not registered with the port mapper"
	case MountdUnreachable:
		return "MOUNT service does not answer"
	case NoExport, Refused, OtherStatus:
		if e.Status != MNT3OK {
			return "server returned " + e.Status.String()
		}
		return "server denied the credential"
	case Protocol:
		if e.Status != MNT3OK {
			return "server returned " + e.Status.String()
		}
		return "invalid reply"
	case Canceled:
		return "canceled"
	case Usage:
		return "invalid argument"
	}
	return e.Kind.String()
}

// advice returns a hint for the user, or "".
func (e *Error) advice() string {
	switch e.Kind {
	case UnknownHost:
		return "check the spelling, or use an address"
	case PortmapUnreachable:
		return "check that the NFS server runs; start rpcbind on the server, open its port in the firewall, or set " +
			"mountport="
	case NotRegistered:
		return "start the NFS server with MOUNT version 3 over TCP, or set mountport="
	case MountdUnreachable:
		return "start the MOUNT service on the server, open its port in the firewall, or correct mountport="
	case NoExport:
		return "check the path against the list of exports on the server"
	case Refused:
		return "check the path, and that the server exports it to this client; " +
			"mount as root without noresvport if the export requires a source port below 1024"
	case Protocol:
		return "check that host and port belong to an NFS version 3 server"
	}
	return ""
}

// Unwrap returns the cause. Without a cause it returns ENOENT for NoExport and EACCES for Refused.
func (e *Error) Unwrap() error {
	if e.Err != nil {
		return e.Err
	}
	switch e.Kind {
	case NoExport:
		return syscall.ENOENT
	case Refused:
		return syscall.EACCES
	}
	return nil
}

// Stat is mountstat3 (RFC 1813 §5.1.5).
type Stat uint32

// Values of mountstat3.
const (
	MNT3OK             Stat = 0
	MNT3ErrPerm        Stat = 1
	MNT3ErrNoEnt       Stat = 2
	MNT3ErrIO          Stat = 5
	MNT3ErrAcces       Stat = 13
	MNT3ErrNotDir      Stat = 20
	MNT3ErrInval       Stat = 22
	MNT3ErrNameTooLong Stat = 63
	MNT3ErrNotSupp     Stat = 10004
	MNT3ErrServerFault Stat = 10006
)

var statTexts = map[Stat]string{
	MNT3OK:             "MNT3_OK",
	MNT3ErrPerm:        "MNT3ERR_PERM (not owner)",
	MNT3ErrNoEnt:       "MNT3ERR_NOENT (no such directory is exported)",
	MNT3ErrIO:          "MNT3ERR_IO (I/O error)",
	MNT3ErrAcces:       "MNT3ERR_ACCES (not exported to this client)",
	MNT3ErrNotDir:      "MNT3ERR_NOTDIR (not a directory)",
	MNT3ErrInval:       "MNT3ERR_INVAL (invalid argument)",
	MNT3ErrNameTooLong: "MNT3ERR_NAMETOOLONG (path too long)",
	MNT3ErrNotSupp:     "MNT3ERR_NOTSUPP (not supported)",
	MNT3ErrServerFault: "MNT3ERR_SERVERFAULT (server fault)",
}

// Valid reports whether s is a value of mountstat3.
func (s Stat) Valid() bool {
	_, ok := statTexts[s]
	return ok
}

func (s Stat) String() string {
	if text, ok := statTexts[s]; ok {
		return text
	}
	return fmt.Sprintf("invalid mountstat3 %d", uint32(s))
}

// kind returns the kind of error for a status other than MNT3OK.
func (s Stat) kind() Kind {
	switch s {
	case MNT3ErrNoEnt, MNT3ErrNotDir:
		return NoExport
	case MNT3ErrAcces, MNT3ErrPerm:
		return Refused
	}
	if !s.Valid() {
		return Protocol
	}
	return OtherStatus
}
