// Package hostile tests a client transport against an NFS/RDMA server that attacks it.
//
// The server accesses memory of the client without permission, and the package checks how the
// client reacts. docs/semantics.md promises that the server can access the memory of a call only
// until the client has handled the reply (RFC 8166 §8.1). [Attacks] checks this promise on every
// provider and device. Only tests import the package.
package hostile
