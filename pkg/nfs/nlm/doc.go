// Package nlm is a client of the Network Lock Manager, version 4 (XNFS chapter 14; RFC 1813 §6),
// and of the status monitor NSM (XNFS chapter 11). Both go over TCP beside NFS. Package nlmwire has
// their wire format.
//
// # Files
//
//	client.go    Client: files, owners, start and end
//	counters.go  counters of a Client
//	lock.go      Lock, Unlock, Test; canceled requests
//	waiters.go   requests that wait for locks of the same mount
//	pending.go   blocked requests and GRANTED
//	recover.go   restart of a server: reclaimed and lost locks
//	notice.go    verification of notices of a restart
//	state.go     State: what survives the process
//	record.go    records of a State
//	owners.go    copies of the owners on disk, release of the locks of a killed process
//	restore.go   restored locks, interrupted requests, Detach
//	link.go      the connection to the lock service of a server
//	service.go   Service: calls of servers to this host
//	portmap.go   the port mapper of this host
//
// # Promises
//
// A [Client] keeps the locks of one mount in tables of package rangelock. It decides conflicts
// between owners of the mount itself. It asks the server about everything else.
//
// The server decides. A GRANTED call of a server only makes a waiting request ask again, or makes
// the client send the locks of its table again, so that a forged call changes no lock. A waiting
// request also asks again at growing intervals: the callback may not arrive.
//
// A request that ends early leaves nothing behind: the client cancels it and makes the server's
// state that of its table. Later requests for the file wait for this.
//
// A request that a lock of the same mount excludes sleeps until that lock is released. A release
// wakes the requests that can be granted. A woken request that does not get its lock passes the wake
// on.
//
// A user gets at most half of the locks of a mount, and of the requests that wait: see package
// fair.
//
// When a server may have restarted, the client reclaims all locks. Reasons are a notice of NSM, a
// lost connection, and [Client.Restarted]. A lock that another client took meanwhile is lost. After
// a notice of NSM, each lock that the server does not let reclaim is lost, unless the connection or
// the status monitor of the server shows that the server has not restarted since the locks were set
// or reclaimed.
//
// # What survives the process
//
// A [State] has the records of a client: its identity, each owner that may have locks of a file, and
// each range that is locked, lost or requested. An owner and a request are recorded before the
// request is sent, and the result before the program gets it. The process may be killed at any
// instruction. A State lies in shared memory, and ends with the descriptor store.
//
// With a state directory, a State has a file there: a copy of the client and the owners, which is
// all that UNLOCK needs. It is written when an owner gets its first record of a file, and when the
// last one goes. It survives the descriptor store, and mostly a restart of the host. It is not
// mapped: a page fault would stop all mounts while the disk is slow, and end the process when the
// disk is full. A client that no process continues has a State only for this file.
//
//	in the next process                               locks of the client
//	a client has the State                            restored
//	none has it: lost, of another version, given up,  released, again each minute until the server
//	or without a descriptor store                     replies; see Service.Restored
//	there is no file: no state directory              stay at the server
//
// The next client with the State has each lock that a program was told it has, with the same owner
// at the server. It reclaims the locks as after a lost connection. Then it makes the server's state
// that of its table for each request whose result is not recorded. A part that was being unlocked is
// not in the table. The kernel repeats a request without a reply, and the request then waits for
// this. [Client.Detach] ends a client as the end of the process does.
//
// The number and the size of the files that the next process reads are bounded. Files that this
// package did not write are ignored with a warning. The state number of NSM does not change.
//
// Nothing that a server or another host sends can cause a panic, a large allocation or a wait
// without end. Invalid records of a State are ignored.
//
// # Locks
//
// file.turn is held during calls to the server about that file, and guards its tables. Work in the
// background queues for it before the request returns, so that later requests come after it.
// waiters.mu, waitGraph.mu, Client.mu, link.mu and Service.mu guard tables and are never held across
// I/O. State.mu is held during changes of its tables and writes to its file. Take file.turn before
// waiters.mu, Client.mu and State.mu, waiters.mu before waitGraph.mu, and each other lock alone.
package nlm
