// Package name has what a mount knows of the names in directories: which names a user may look up
// without asking the server, which names the kernel may have cached, and where a listing found an
// object.
//
// # Names and users
//
// The kernel's FUSE client has one cache of names for all users. It checks by mode bits alone who
// may search a directory. The server may refuse a user that the mode bits let in: an access control
// list denies the user, or the server maps root to another user. Therefore the kernel keeps no name
// (SharedNames makes it). It asks for each name of a path on behalf of the caller, and the file
// system answers from the names that it knows under these conditions (see SoleUser for an exception):
//
//   - The server let the caller search the directory: it answered an ACCESS or a LOOKUP with the
//     same credential not longer ago than the attributes of the directory may be cached.
//   - Since then the directory has not changed, as far as this client knows, except by this client.
//   - The name was found not longer ago than the attributes of the directory may be cached, and the
//     attributes of the directory are not older than maxAge.
//   - A name that does not exist was looked up after the last lock that the server granted to this
//     mount.
//
// Otherwise the server gets a LOOKUP with the credential of the caller. So an answer of the server
// for one user is never an answer for another user. Linux's NFS client gives the same promise.
//
// # The kernel's names
//
// The kernel caches names for the time that the file system gives. When another client changes a
// directory, the names in it expire at once: the kernel then repeats the LOOKUP of each name that
// it uses, as Linux's NFS client does. Changes by this mount do not expire names.
//
// # Locks
//
// Dir.mu guards what is known of one object. Table.mu and Expiry.mu guard their fields. Lock Dir.mu
// before Table.mu and attr.State. Take each other lock alone.
package name
