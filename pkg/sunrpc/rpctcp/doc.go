// Package rpctcp implements ONC RPC over TCP: record marking (RFC 5531 §11) and a [Client]. MOUNT,
// the port mapper, the relay of `serve --backend` and the tests use this one client. NFS over RDMA
// does not use it.
//
// # Files
//
//	record.go  ReadRecord, WriteRecord: the framing of the stream
//	client.go  Client: concurrent calls on one connection, matched by XID
//
// # Promises
//
// A record is never larger than the limit of its reader. Memory grows with the bytes received, not
// with the claimed length. Invalid input from the peer is an error, never a panic. An error of the
// connection closes it and ends every call on it. A Client does not reconnect.
//
// # Locks and goroutines
//
// Client.state guards the table of calls and the error of the connection. No I/O happens under this
// lock. The right to write is a channel with one token, so a caller can stop waiting for it when
// its context ends. One goroutine reads the connection; Close waits until it has returned.
package rpctcp
