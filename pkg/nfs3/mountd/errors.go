package mountd

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
)

// Kind classifies what went wrong.
type Kind uint8

// Kinds of errors.
const (
	// UnknownHost: the server's name does not resolve.
	UnknownHost Kind = iota + 1
	// PortmapUnreachable: the port mapper refused the connection, or did not answer in time.
	PortmapUnreachable
	// NotRegistered: the port mapper does not know the program.
	NotRegistered
	// MountdUnreachable: the MOUNT service refused the connection, or did not answer in time.
	MountdUnreachable
	// NoExport: the server does not have the directory (MNT3ERR_NOENT, MNT3ERR_NOTDIR).
	NoExport
	// Refused: the server has it, but not for this client (MNT3ERR_ACCES, MNT3ERR_PERM, or the
	// credential was denied). Some servers, NFS-Ganesha among them, answer so for a path that they
	// do not export at all.
	Refused
	// OtherStatus: the server answered another mountstat3; see Error.Status.
	OtherStatus
	// Protocol: whatever answered does not speak MOUNT version 3, or port mapper version 2.
	Protocol
	// Canceled: the caller's context was canceled.
	Canceled
	// Usage: the arguments make no sense.
	Usage
)

var kindNames = [...]string{"", "unknown host", "port mapper not reachable", "not registered",
	"MOUNT service not reachable", "no such export",
	"refused", "error status", "protocol error", "canceled", "bad argument"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "kind " + strconv.Itoa(int(k))
}

// An Error is why a call of this package failed.
type Error struct {
	Kind   Kind
	Op     string // "MNT", "UMNT", "EXPORT", "DUMP", "NULL", "GETPORT"
	Host   string
	Port   int    // of the service that was spoken to; 0 when it never came to that
	Export string // "" for calls that name none
	Status Stat   // of MNT, with NoExport, Refused and OtherStatus
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
	s += " at " + at + ": " + e.what()
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if advice := e.advice(); advice != "" {
		s += "; " + advice
	}
	return s
}

// what says what happened, without the cause.
func (e *Error) what() string {
	switch e.Kind {
	case UnknownHost:
		return "the host name does not resolve"
	case PortmapUnreachable:
		return "the port mapper does not answer"
	case NotRegistered:
		return "the port mapper does not know the service"
	case MountdUnreachable:
		return "the MOUNT service does not answer"
	case NoExport, Refused, OtherStatus:
		if e.Status != MNT3OK {
			return "the server answered " + e.Status.String()
		}
		return "the server refuses the credential"
	case Protocol:
		if e.Status != MNT3OK {
			return "the server answered " + e.Status.String()
		}
		return "what answered does not speak the protocol"
	case Canceled:
		return "given up"
	case Usage:
		return "the call makes no sense"
	}
	return e.Kind.String()
}

// advice says what to do about it.
func (e *Error) advice() string {
	switch e.Kind {
	case UnknownHost:
		return "check the spelling, or give an address"
	case PortmapUnreachable:
		return "start rpcbind on the server, open its port in the firewall, or name the MOUNT port with mountport="
	case NotRegistered:
		return "start the NFS server with MOUNT version 3 on TCP there, or name the MOUNT port with mountport="
	case MountdUnreachable:
		return "check that the server's MOUNT service runs and that no firewall is between, or correct mountport="
	case NoExport:
		return "check the path against the server's list of exports"
	case Refused:
		return "check the path, and that the server exports it to this client's address; an export that asks for a secure port needs a client with the privilege to use one"
	case Protocol:
		return "check host and port: is it an NFS version 3 server?"
	}
	return ""
}

// Unwrap returns the cause, or an error number where the kind has one.
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

// The statuses of MNT.
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
	MNT3ErrServerFault: "MNT3ERR_SERVERFAULT (the server failed)",
}

// Valid tells whether s is a value of mountstat3.
func (s Stat) Valid() bool {
	_, ok := statTexts[s]
	return ok
}

func (s Stat) String() string {
	if text, ok := statTexts[s]; ok {
		return text
	}
	return fmt.Sprintf("mountstat3 %d, which MOUNT version 3 does not have", uint32(s))
}

// kind of error that a status is.
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
