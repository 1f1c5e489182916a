// Package nfs has the terms in which the file system speaks to a server: handles, attributes,
// changes, statuses, and the interface [Server]. It has no wire format. Package nfs3 implements the
// interface with NFSv3 (RFC 1813), whose types are general enough to be those of this package.
//
// # Other versions
//
// The interface has room for NFSv4.1 (RFC 8881):
//
//   - Open returns the state of an open file, and Read and Write take it. FUSE opens files by node,
//     which is OPEN with CLAIM_FH. A create is Create and then Open. A version without such a state
//     checks rights in Open and ignores the state.
//   - Each method is one COMPOUND: its results have all that the operations of the COMPOUND return,
//     for example the attributes of the object and of the directory.
//   - A [Stamp] identifies the state of an object. NFSv4 has the change attribute for this, and a
//     Stamp then contains it.
//   - A delegation lets a client use what it knows without asking. It is a promise about a handle
//     that ends with a callback, and the file system has the same event for a lock that was lost.
//   - Sessions, leases and their renewal are below the interface, as the transport is.
//
// Locks, ACLs and MOUNT are other protocols beside NFSv3: see packages nlm, nfsacl and
// mountd.
package nfs
