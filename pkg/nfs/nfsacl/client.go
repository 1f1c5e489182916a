package nfsacl

import (
	"context"
	"errors"
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

var errMask = errors.New("mask of ACLs is out of range")

// An Error is a status other than NFS3_OK from the server. errors.As finds an *nfs3.Error with the
// same status in it, so that [nfs3.Errno] works for errors of this package.
type Error struct {
	Proc   Proc
	Status nfs3.Status
}

func (e *Error) Error() string { return "NFSACL " + e.Proc.String() + ": " + e.Status.String() }

// Unwrap returns what the status stands for, as [nfs3.Error.Unwrap].
func (e *Error) Unwrap() error { return (&nfs3.Error{Status: e.Status}).Unwrap() }

// As sets target to an *nfs3.Error with the status.
func (e *Error) As(target any) bool {
	t, ok := target.(**nfs3.Error)
	if ok {
		*t = &nfs3.Error{Status: e.Status}
	}
	return ok
}

// A Client calls the procedures over the transport of NFS. Every method takes an encoded credential
// (see sunrpc.AppendAuthSys). Errors are of type [*Error], wrap [nfs3.ErrMalformed], or wrap the
// error of the transport.
type Client struct{ caller nfs3.Caller }

// NewClient returns a Client over caller.
func NewClient(caller nfs3.Caller) *Client { return &Client{caller} }

// Null makes a round trip without any effect.
func (c *Client) Null(ctx context.Context, cred []byte) error {
	_, err := c.call(ctx, cred, ProcNull, nil, 0)
	return err
}

// Get returns the ACLs of fh that mask selects, and the attributes of fh if the server sends them.
// The result contains at least the ACLs that mask selects.
func (c *Client) Get(ctx context.Context, cred []byte, fh nfs3.FH, mask uint32,
	attr *nfs3.PostOpAttr) (acls ACLs, err error) {
	args := sunrpc.AppendUint32(nfs3.AppendFH(nil, &fh), mask)
	d, err := c.call(ctx, cred, ProcGetACL, args, maxResultGet)
	if err != nil {
		return acls, err
	}
	nfs3.DecodePostOpAttr(&d, attr)
	acls.decode(&d)
	if d.Err() == nil && acls.Mask&mask != mask {
		d.Fail(errMask)
	}
	if d.Err() != nil {
		return ACLs{}, malformed(ProcGetACL, d.Err())
	}
	return acls, nil
}

// Set replaces the ACLs of fh that acls.Mask selects. The owner is that of fh. attr gets the
// attributes after the change if the server sends them.
func (c *Client) Set(ctx context.Context, cred []byte, fh nfs3.FH, acls *ACLs, owner Owner,
	attr *nfs3.PostOpAttr) error {
	if max(len(acls.Access), len(acls.Default)) > MaxEntries {
		return &Error{ProcSetACL, nfs3.ErrNoSpc}
	}
	args := acls.append(nfs3.AppendFH(nil, &fh), owner)
	d, err := c.call(ctx, cred, ProcSetACL, args, maxResultSet)
	if err != nil {
		return err
	}
	nfs3.DecodePostOpAttr(&d, attr)
	if d.Err() != nil {
		return malformed(ProcSetACL, d.Err())
	}
	return nil
}

// call makes a call and decodes its status. NULL has no status.
func (c *Client) call(ctx context.Context, cred []byte, proc Proc, args []byte,
	maxResult int) (d sunrpc.Decoder, err error) {
	m := sunrpc.Message{Prog: Program, Vers: Version, Proc: uint32(proc), Cred: cred, Args: args, ArgDataPos: len(args),
		MaxResult: maxResult, Result: make([]byte, 0, maxResult), ResultDataLen: -1}
	if err = c.caller.Call(ctx, &m); err != nil {
		return d, fmt.Errorf("NFSACL %v: %w", proc, err)
	}
	d = sunrpc.NewDecoder(m.Result)
	if proc == ProcNull {
		return d, nil
	}
	status := nfs3.Status(d.Uint32())
	if err := d.Err(); err != nil {
		return d, malformed(proc, err)
	}
	if status != nfs3.OK {
		return d, &Error{proc, status}
	}
	return d, nil
}

func malformed(proc Proc, reason error) error {
	return fmt.Errorf("NFSACL %v: %w: %w", proc, nfs3.ErrMalformed, reason)
}
