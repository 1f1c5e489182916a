// Package fdstore keeps descriptors open while no daemon runs: descriptors of /dev/fuse, whose
// mounts end when the last descriptor is closed, sockets of shares, and memfds with the state of
// the daemon. The next daemon gets the descriptors after a restart, an upgrade, a crash or kill -9.
//
// There are two stores with one interface, [Store]:
//
//	systemd.go     the file descriptor store of systemd
//	notify.go      messages to systemd: sd_notify(3), sd_notify_barrier(3)
//	holderstore.go the daemon's store in a holder: entries, replacement of a lost holder
//	client.go      the daemon's connection to the holder: find it, start it, requests
//	holder.go      the holder process
//	message.go     the protocol between daemon and holder
//	descriptor.go  system calls on descriptors
//
// # Lifecycle
//
//	daemon 1                      store                     daemon 2
//	   | Open, Kept: none           |                          |
//	   | Put(a, f) ---------------->| a                        |
//	   | Put(a, g) ---------------->| a (replaced), no gap      |
//	   | Put(b, h) ---------------->| a, b                     |
//	   | Remove(b) ---------------->| a                        |
//	   x killed, or Close           | a                        |
//	                                |------ Open, Kept: a ---->|
//	                                | a                        | serves a
//	                                | none <-------- Remove(a) |
//
// A daemon opens the store once, before it starts another program. Kept returns duplicates: the
// entry stays in the store until Remove, so the daemon can be killed again at any time. Put returns
// when the store has the descriptor. The daemon removes an entry when the mount has ended. After a
// timeout of systemd the daemon may repeat the call. The daemon calls Verify before it exits and
// leaves its entries.
//
// # Choice of the store
//
// [Open] uses systemd if NOTIFY_SOCKET is set and systemd keeps descriptors of this process.
// systemd 254 and later set FDSTORE to FileDescriptorStoreMax= of the unit, unless it is 0. Older
// versions set no variable, and no version reports that it drops a descriptor. So Open does not
// depend on the variable. It sends one end of a pipe, waits with BARRIER=1 until systemd has read
// the message, and looks whether the other end has hung up. Put does the same after each
// descriptor, so a full store is an error of Put. Where FDSTORE is set, Put also counts, because
// systemd 254 and later close a dropped descriptor in another process, which may be after the
// barrier. Without FDSTORE, Open waits 100 ms for this.
//
// If the variable is not set or systemd drops the pipe, Open uses a holder. If systemd does not
// read the message, Open returns an error: a holder beside a systemd that keeps descriptors would
// be a second truth. If a holder runs and systemd keeps descriptors, Open moves the entries to
// systemd.
//
// # systemd
//
// The unit needs FileDescriptorStoreMax= with at least two places more than there are entries: one
// for the new descriptor during a replacement, one for the pipe. systemd closes the descriptors
// when the service stops and will not start again; systemd 254 and later keep them with
// FileDescriptorStorePreserve=yes. "systemctl restart" and Restart= keep them. systemd only accepts
// messages of the main process (NotifyAccess=main).
//
// systemd adds descriptors and does not replace by name, and it ignores an open file that it has
// under any name. So each descriptor has the name NAME@NUMBER in systemd. Put adds the descriptor
// with the next number, waits for systemd, and then removes the previous number. A daemon that is
// killed in between leaves both; the next one takes the larger number and removes the other. To
// know which open files systemd has, the store keeps a duplicate of each entry and compares with
// kcmp(2).
//
// All descriptors have FDPOLL=0. Otherwise systemd polls and removes a descriptor with EPOLLERR.
// This is wrong for /dev/fuse. A descriptor that is not mounted yet has EPOLLERR, so a daemon could
// not put it before mount(2). One whose mount has ended has EPOLLERR too; the next daemon then sees
// ENODEV and removes the entry together with its state. Also, every FUSE request would wake up
// systemd, because the kernel checks the events only after the wakeup. epoll does not support
// memfds, so that systemd never removes one in this way.
//
// # Holder
//
// Without systemd, the first daemon starts the holder: a process of the same program that keeps
// descriptors and does nothing else. The daemon locks SOCKET.lock, replaces a socket without
// holder, and passes the listening socket and the lock to a child, which starts the holder and
// exits. The holder has its own session, no inherited descriptors and environment, the working
// directory /, and a lower OOM score than the daemon if it may lower the score. It keeps the lock
// as long as it runs. The holder serves one daemon at a time with its own user (SO_PEERCRED); a
// second one gets ErrBusy. It replaces an entry in one step.
//
//	no daemon, no entries         the holder ends and removes its socket
//	no daemon, entries            the holder keeps them without limit of time
//	no daemon, socket removed     the holder ends: no daemon can get the entries
//	SIGTERM                       the holder ends when no daemon is connected
//	holder killed, daemon         the daemon starts another one, which gets all entries
//	holder killed, no daemon      the entries are lost
//
// The daemon has a duplicate of each entry, and waits for the end of its connection to the holder.
// When the holder ends, or does not answer in time, the daemon gives all entries to the next
// holder. It tries again with pauses until it succeeds. Meanwhile Problem returns the reason, and
// Put and Remove only change what the next holder gets. Verify also finds a holder without socket,
// which the next daemon could not reach.
//
// A daemon and a holder may be of different versions. A change of the protocol needs a new
// protocolVersion, and a daemon that also speaks the old one.
//
// A holder does not help in a unit of systemd without file descriptor store: with the default
// KillMode=control-group, systemd kills the holder together with the daemon. RuntimeDirectory= of a
// unit removes the socket when the service stops, unless RuntimeDirectoryPreserve= is set.
//
// # Locks
//
// systemdStore.mu and holderStore.mu serialize the operations of a store and are held during the
// exchange of messages, and holderStore.mu while the holder is replaced. The holder has no mutex:
// one goroutine at a time uses the entries.
package fdstore
