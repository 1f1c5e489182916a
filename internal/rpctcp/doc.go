// Package rpctcp is ONC RPC over TCP: record marking (RFC 5531 §11), and a [Client] that satisfies
// nfs3.Caller. NFS over RDMA does not go through it; it reaches the TCP servers behind the RDMA
// front end, MOUNT and the port mapper, and the servers that tests run.
//
// # What is where
//
//	record.go  ReadRecord, WriteRecord: the stream's framing, for anyone who relays messages
//	client.go  Client: concurrent calls on one connection, matched by XID
//
// # Promises
//
// A record is never larger than the limit that its reader sets, and memory grows with the octets
// that came, not with the length that was claimed. Any octets from the peer end in an error, and an
// error ends the connection and every call on it. A Client does not reconnect.
//
// # Locks
//
// Client.mu guards the table of calls and the connection's error; it is never held across I/O. The
// right to write is a channel of one, so that a caller whose context ends does not wait for it. One
// goroutine reads the connection; Close waits for its end.
package rpctcp
