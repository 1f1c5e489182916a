// Package nlmd is the lock service of the embedded NFS server: NLM version 4 (XNFS chapter 14) and
// the notices of NSM (XNFS chapter 11). It knows no transport and no files: a [Server] gets each
// call as an RPC message, and asks its owner about file handles.
//
// Locks are in memory and exclude only NFS clients; a local process does not see them. The server
// does not queue blocked requests and never calls a client: it answers NLM4_BLOCKED, and the client
// asks again. A client that waits therefore gets a lock some time after it is free, and waiting
// clients are not served in order.
//
// The first lock makes a state file, which an orderly end without locks removes. A server that
// finds the file at its start has a grace period, during which it grants only locks that clients
// reclaim.
//
// The server frees the locks of a client that announces its restart (SM_NOTIFY, FREE_ALL). The
// client is known by its address and its name.
package nlmd
