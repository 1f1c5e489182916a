// Package nfsacl gets and sets POSIX ACLs with NFSACL version 3, the protocol of Solaris beside NFS
// version 3 (program 100227). Linux and Solaris servers answer it on the connection of NFS. No RFC
// describes the protocol. The source is the Linux kernel: fs/nfs_common/nfsacl.c,
// fs/nfs/nfs3xdr.c, fs/nfsd/nfs3acl.c and include/uapi/linux/nfsacl.h.
//
// The package has the types and their wire format for both sides, a [Client], and the conversion to
// and from the extended attributes system.posix_acl_access and system.posix_acl_default (acl(5)).
//
// The protocol differs from POSIX.1e draft 17 in these points, and the package converts between
// them:
//
//   - An ACL always has a mask. A minimal ACL has four entries, and its mask equals the entry of
//     the owning group. POSIX has three entries then.
//   - The entries of the owner and of the owning group contain the uid and the gid of the file.
//     POSIX leaves the identifiers undefined.
//   - Entries are in any order. POSIX sorts them by tag and identifier.
//   - The tags of a default ACL have an additional bit.
//
// No function keeps or modifies the memory of its arguments after it has returned. A Client is safe
// for concurrent use.
package nfsacl
