// Package nfsserve is what `nfsrdmad serve` runs: the RDMA port and the TCP port of an NFS server.
// It either exports a directory ([Config.Dir]) with internal/nfsd, or relays to an NFSv3 server on
// TCP ([Config.Backend]).
//
//	RDMA port ── svcrdma ──┬── nfsd.Server ──── the directory
//	TCP port ── tcpServer ─┘
//
//	RDMA port ── svcrdma ── proxy ──TCP──► the backend
//
// # What is where
//
//	serve.go    Run, Config, Server: start and end
//	tcp.go      RPC over TCP server (RFC 5531 §11) in front of a directory
//	tcpcall.go  a call over TCP: its memory, and bounds of its reply
//	proxy.go    calls from RDMA to the backend; XIDs stay; each client connection has its TCP connections
//
// # Promises and locks
//
// Connections that send nothing, or only part of a call, do not keep other clients out. Each
// connection has deadlines for its first call, for the rest of a begun call, for the next call, and
// for taking a reply. One client address gets at most half of the connections. A full server closes
// the connection that has been silent for the longest time, or that does not take its reply.
//
// Two resources of the TCP side are divided among client addresses (fair.Pool): the places
// of calls that are executed, and the memory of large calls and of replies. A call holds its place
// only while it is executed, and memory until its reply is written. Clients that do not read their
// replies therefore hold no places, and leave memory to others. When calls wait for memory, the
// server closes the connections that have made no progress for a few seconds. Calls of MOUNT and of
// the port mapper have a share of their own. The RDMA side uses nothing of the TCP side.
//
// A server that ends sends the replies of its running calls first, so that clients do not repeat
// these calls on the next server.
//
// tcpServer.clients guards the table of connections; tcpConn.write is held during the write of one
// reply. backendPool and backendConn have a lock each for their tables, which is never held across
// I/O.
package nfsserve
