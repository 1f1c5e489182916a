package reference

// explanations say what messages mean, and what to do: all of level warn or error. A message that
// several packages log has one explanation.
var explanations = []struct{ message, meaning string }{
	// internal/nfsd, internal/nfsserve, internal/nlmd, internal/svcrdma: serve.
	{"fsync failed: clients must send again what they have not committed",
		"The disk of the server refused data. Clients send their data again, and get the error if it " +
			"repeats. Check the disk and its free space."},
	{"call not relayed",
		"serve --backend has no connection to the backend. Clients send the call again. Check that the " +
			"backend runs."},
	{"no reply to a call",
		"The connection to the backend ended before its reply. Clients send the call again. Check the " +
			"backend."},
	{"lock refused: cannot record that locks are held",
		"The server cannot write its state file, so locks would not survive a restart; clients get " +
			"ENOLCK. Check the directory of the file, and its free space."},
	{"connection refused",
		"The server could not prepare an RDMA connection, for example for lack of memory. The client " +
			"tries again. Read error."},
	{"release connection",
		"A resource of an ended connection could not be released. One such message does no harm; with " +
			"many, restart serve."},
	{"cannot act as another user: calls of other users than root are refused; give the process " +
		"CAP_SETUID and CAP_SETGID and map the users",
		"serve runs in a user namespace, or lacks capabilities. Do what the message says."},
	{"file handles become stale when the server ends: cannot keep their key",
		"After a restart of serve, clients get ESTALE. Make the state directory writable."},
	{"new object refused: another process has replaced it",
		"Another process replaced a directory, node or link while a client created it. The client gets " +
			"ENOENT. No action."},
	{"not running as root: every client acts as the user of this process",
		"serve cannot change to the users of the clients. Run it as root if users must be told apart."},
	{"accept failed",
		"The process could not accept a connection, usually for lack of file descriptors or memory. It " +
			"tries again. Check its limits."},
	{"connection refused: too many",
		"The TCP listener has its maximum number of connections. Find the client in peer, and end the " +
			"connections that it does not need."},
	{"close connection",
		"A connection could not be closed in order. No action."},
	{"connection not established",
		"A client ended its connection during the handshake. No action, unless a client cannot mount."},
	{"connection refused: address is not allowed",
		"The client is not in --allow. Add it, or ignore the message."},
	{"connection refused: too many connections",
		"The server, or the client in peer, has its maximum number of RDMA connections. Increase " +
			"--max-connections."},
	{"reply is too large, sending ERR_CHUNK",
		"The client offered less memory than the reply needs, so its call fails. Check the version of the " +
			"client, and report the message."},
	// pkg/csi.
	{"panic in a call",
		"An internal error ended one call of the CSI driver. Kubernetes calls again. Report the stack."},
	{"abort of a private mount failed",
		"The driver gave up a call, and the daemon could not remove the mount that the call used. The " +
			"driver tries again at its next start. Read error."},
	{"call failed",
		"A call of Kubernetes failed with this code. Read error; the events of the pod or the claim have " +
			"it too."},
	{"delete of an unknown volume ignored",
		"The volume ID is not one of this driver, so there is nothing to delete. Remove the " +
			"PersistentVolume by hand if it stays."},
	{"not ready",
		"The daemon of the node does not reply, so the probe fails. Check the container daemon or the " +
			"service nfsrdmad of the node."},
	{"removing a mount whose daemon has ended; pods that use it must be restarted",
		"The daemon ended without keeping this mount. Restart the pods that use the volume."},
	{"unmount after a failed stage failed",
		"The volume was mounted, but its mode could not be set, and the mount stays. Kubernetes calls " +
			"again. Read error."},
	{"unmount of a private mount failed",
		"The mount that the driver uses to create or delete a directory stays. The driver removes it at " +
			"its next start. Read error."},
	{"unmount of a private mount of an earlier driver failed",
		"A mount that an earlier driver left stays. The driver tries again at its next start. Read error."},
	// pkg/daemon.
	{"FAULT INJECTION IS ON: this daemon breaks its connections on purpose",
		"inject or --inject is set. Remove it in production."},
	{"an earlier daemon kept mounts; keep_mounts=false applies after all mounts are unmounted and the " +
		"daemon is restarted",
		"The daemon continues the mounts it found. Unmount them and restart the daemon to apply the " +
			"setting."},
	{"every mount will fail",
		"The host or the container lacks what mounts need; reason says what. Correct it, and restart the " +
			"daemon."},
	{"metrics are not available; the daemon retries",
		"The daemon cannot listen on metrics_listen, usually because another process uses the address. " +
			"Stop that process, or change metrics_listen. Mounts are not affected."},
	{"mounts end with the daemon: a restart or a crash is not possible without unmount",
		"The daemon has no store for its mounts. Under systemd, set FileDescriptorStoreMax= of the unit; " +
			"else read reason."},
	{"notification of systemd failed",
		"The daemon could not write to the socket of systemd. systemd may then report a failed start. " +
			"Check NotifyAccess= and NOTIFY_SOCKET."},
	{"other processes own nfsrdma mounts; remove those of a killed daemon with umount(8)",
		"Mounts in dirs do not belong to this daemon. Those of --foreground processes work; remove dead " +
			"ones with umount(8)."},
	{"read of the mount table failed",
		"/proc/self/mountinfo could not be read, so the daemon does not know about mounts of others. " +
			"Check that /proc is mounted."},
	{"the daemon has capabilities that it does not need; add CAP_SETPCAP or restrict the bounding set",
		"The daemon could not drop capabilities. Use the unit of the package, or do what the message " +
			"says."},
	{"the mounts stay: systemd does not answer whether it restarts the unit; if it stops the unit, " +
		"remove the mounts with umount(8)",
		"The daemon wrote its data and ended. If no daemon starts again, remove the mounts with " +
			"umount(8)."},
	{"unmounting: systemd does not tell whether it restarts the unit",
		"The daemon cannot reach systemd over D-Bus, and therefore unmounts. Read error."},
	{"when memory is short, the daemon may wait for writes to its own mounts",
		"PR_SET_IO_FLUSHER failed. Add CAP_SYS_RESOURCE to the unit or the container."},
	{"the daemon hangs: systemd ends it, and starts the next one",
		"A part of the daemon does not work. The next daemon continues the mounts. Report the stacks, " +
			"which follow in the log."},
	{"the watchdog of systemd is not used",
		"The environment variables WATCHDOG_USEC and WATCHDOG_PID of systemd are not valid. Check " +
			"WatchdogSec= of the unit."},
	{"the memory of the daemon is not locked",
		"Parts of the daemon can be swapped out, which is slower and can delay the write of files when " +
			"memory is short. Set LimitMEMLOCK=infinity, as the unit of the package does."},
	{"found a mount of an earlier daemon",
		"The daemon continues this mount; state says whether it can. No action, unless state is kept."},
	{"stop of the unit",
		"systemd stops or restarts the unit; job says which. For a restart the mounts stay."},
	// pkg/front, pkg/fusefs, pkg/mount.
	{"FUSE requests of an earlier process are lost",
		"The kernel did not send the requests again that the earlier daemon had not answered. Their " +
			"programs wait until umount --force. Read error."},
	{"FUSE over io_uring has too few threads: requests may wait",
		"A mount with front=uring has its maximum of requests in progress, or cannot start another thread; " +
			"error says which. More requests wait. See the limits of threads and memory."},
	{"calls may fail with ECANCELED: threads of FUSE over io_uring did not react in time",
		"The host was very busy during a restart of the daemon with front=uring. Calls that began during " +
			"the restart may have failed. Restart when the host is less busy, or use a mount without front=uring."},
	{"a thread of FUSE over io_uring ended: requests may wait",
		"The kernel refused a thread of a mount with front=uring; error says why. Report it, and mount " +
			"without front=uring if requests wait."},
	{"groups of a process are unknown; its calls have none",
		"The groups of the process pid could not be read, for example because it is in another PID " +
			"namespace. The server sees only its user and its group. See nfsrdmad_groups_unknown_total."},
	{"process has too many groups for AUTH_SYS; its calls have the first 16",
		"AUTH_SYS has room for 16 groups. Access through the others fails. Let the server look the groups " +
			"up, for knfsd with rpc.mountd --manage-gids."},
	{"the kernel uses more files of the mount than a restart can keep; the others become stale at a " +
		"restart",
		"Programs or the cache of the kernel use more files than limit. Before a restart of the daemon, " +
			"close files, or drop the cache with vm.drop_caches."},
	{"file system failed; unmount it and report the stack",
		"An internal error failed this mount; all its requests return EIO. Unmount it, with --force if " +
			"files are open, mount it again, and report the stack."},
	{"forced unmount failed",
		"The kernel did not remove the mount. Use umount -l, and read error."},
	{"mount failed",
		"A mount request failed. The command got the same error. Run nfsrdmad doctor with the same source " +
			"and options."},
	{"mount not released",
		"A mount did not end in time when the daemon stopped. Its data may be lost; see the messages " +
			"about written data."},
	{"mount of an earlier daemon is left alone; …",
		"This version cannot continue the mount; reason says why. Use the version that made the mount, or " +
			"give the mount up as the message says."},
	{"written data lost: the mount ended before the server had it",
		"Data that a program wrote is not on the server: the server did not accept it before the forced " +
			"unmount, the stop or the end of the process. Find the file with find -inum and the number in " +
			"fileid, and restore its contents."},
	{"a killed daemon may not exit: notifications of a mount have no helper process",
		"The daemon could not start its helper. If it is killed, it can wait in the kernel; then use " +
			"umount -f. Read reason."},
	{"aborting the mount, because it does not answer",
		"The mount has the option stallabort, and a request had no reply for that time. Programs get " +
			"errors, and data that the server does not have is lost. Check the server, and mount again."},
	{"the mount does not answer",
		"A request had no reply for the time of the option stall; reason says whether the server or the " +
			"connection is the cause. Check the server and the network. The log says when the mount answers " +
			"again."},
	{"spans of traces dropped",
		"The collector at otlp_endpoint did not accept spans in time, or there were too many; error says " +
			"which. Mounts are not affected. Check the collector, or reduce otlp_ratio."},
	{"forcing unmount",
		"The normal unmount at the stop of the daemon failed, usually because files are open; reason says " +
			"why. Programs get errors."},
	{"invalid reply from server; the request fails",
		"The server broke the NFS protocol, and a program got EIO. reason describes the reply. Check the " +
			"version of the server, and report the message."},
	{"mount of an earlier daemon waits for its server",
		"The mount continues when the server answers; until then programs wait. Check the server; umount " +
			"--force gives the mount up."},
	{"share of an earlier daemon removed",
		"A forced unmount ended a share that this daemon could not continue. Start the share again if a " +
			"virtual machine needs it."},
	{"the kernel may have a fault of FUSE over io_uring",
		"The release of the kernel has a known fault; reason names it. Update the kernel, or mount " +
			"without front=uring."},
	{"the mount does not use writeback",
		"writeback needs Linux 6.6. The mount works without it."},
	{"the mount ends with the daemon: its connection cannot be kept",
		"The store of file descriptors refused the mount, usually because FileDescriptorStoreMax= is " +
			"reached. Increase it. The mount works until the daemon ends."},
	{"the mount ends with the daemon: its state cannot be kept",
		"The state of the mount could not be stored; reason says why. The mount works until the daemon " +
			"ends."},
	{"the mount uses /dev/fuse instead of io_uring",
		"front=uring is not possible here; reason says why. The mount works."},
	{"the server does not answer MOUNT at an address of remoteports",
		"The daemon could not check that this address leads to the same server. Check the address and its " +
			"TCP port."},
	{"the share ends with the daemon: its connection cannot be kept",
		"The store of file descriptors refused the share, usually because FileDescriptorStoreMax= is " +
			"reached. Increase it."},
	// pkg/nlm.
	{"lock lost: the server did not return it; I/O through its owner fails with EIO until the owner " +
		"unlocks or closes the file",
		"The server restarted and gave the lock to another client, or refused it. Restart the program " +
			"pid, and check the file."},
	{"locks fail with ENOLCK",
		"The lock service of the server does not answer or does not exist. Start it there, set nlmport=, " +
			"or mount with nolock."},
	{"locks fail with ENOLCK: cannot record the identity of this client",
		"The state of the mount has no room or is damaged. Mount again."},
	{"some locks are not restored: records are not valid",
		"Locks of programs were lost in a restart of the daemon, because their records are damaged. " +
			"Restart programs that use locks, and report the message."},
	{"some locks fail with ENOLCK: cannot record them for a restart of this daemon",
		"Programs hold more locks than the daemon can record. Release locks, or spread the files over " +
			"several mounts."},
	{"locks may stay at servers if this daemon is killed: write to the journal failed",
		"The disk of state_dir is full or failed. Correct it, and restart the daemon."},
	{"locks stay at servers if this daemon is killed: cannot keep a journal",
		"state_dir cannot be used. Set it to a directory that the daemon can write, and restart the " +
			"daemon."},
	{"no notices of server restarts",
		"The daemon cannot register with rpcbind, so it learns of a server restart from the end of its " +
			"connection. Check rpcbind of this host."},
	{"no notices of server restarts: status monitor of this host",
		"rpc.statd refused to monitor the server, so the daemon learns of a server restart from the end " +
			"of its connection. Check rpc.statd and the name of the host."},
	{"unlock failed",
		"The server refused to release a lock. The daemon counts the lock as released. If other clients " +
			"then wait for it, restart the lock service of the server."},
	{"set state_dir to a directory of the daemon",
		"Follows a journal of locks that the daemon may not write. Do what the message says."},
	{"waiting locks are polled",
		"Servers cannot call this host back; reason says why. Waiting locks take longer. See the ports of " +
			"locks in mount.md."},
	{"reclaiming locks",
		"The server restarted, or the connection to its lock service ended. The client asks for its locks " +
			"again."},
	// pkg/verbs.
	{"RDMA device has no memory windows; registering memory for each use, which is slower",
		"The device works, but slower than one with type-2 memory windows. No action."},
	{"deregister memory of fault injector",
		"Only with fault injection. Report the message."},
	{"deregister memory region with injected fault",
		"Only with fault injection. Report the message."},
	{"FAULT INJECTION IS ON: connections are broken on purpose",
		"inject or --inject is set. Remove it in production."},
	{"close removed RDMA device; its removal waits until this process ends",
		"The kernel did not release the device, so rdma link delete or the removal of the driver waits. " +
			"Restart the daemon."},
	{"deallocate window of lost connection",
		"The device refused to free a memory window. The daemon counts the region as orphaned. With many, " +
			"restart the daemon."},
	{"deregister memory",
		"The device refused to invalidate memory, so the daemon ends the connection. The call is sent " +
			"again. With many, check the device and its driver."},
	{"open RDMA device again",
		"The daemon could not use the device without memory windows. The next connection opens the device " +
			"again. Read error."},
	{"RDMA device cannot bind memory windows; registering memory for each use, which is slower",
		"The driver has a fault in memory windows. The mount works, but slower."},
	{"RDMA device did not flush a queue pair in the error state; destroying it",
		"The driver did not complete the requests of an ended connection. The daemon destroys the queue " +
			"pair and continues."},
	{"RDMA device was released",
		"The removal of the device is complete. No action."},
	{"RDMA device was removed, and its removal waits for connections that the kernel is still making",
		"Wait: the kernel ends these connection attempts after some minutes."},
	{"RDMA device was removed; ending its connections",
		"The driver, the card or rdma link delete removed the device. Load the driver or add the link " +
			"again; the mounts then continue."},
	{"RDMA listener event",
		"An event of the RDMA listener of serve, for example the removal of its device. Restart serve if " +
			"clients cannot connect."},
	{"accept RDMA connection request",
		"serve could not accept a connection. The client tries again. Read error."},
	{"reserve mmap offset 0x90000 of siw device; creating a queue may fail later",
		"A workaround for a fault of the siw driver is not possible. A connection can fail, and the " +
			"daemon then tries again."},
	// pkg/virtiofs.
	{"accept of a VMM failed",
		"The daemon could not accept the connection of a virtual machine monitor, usually for lack of " +
			"file descriptors. It tries again."},
	{"connection of a VMM failed",
		"The state of a new connection could not be stored. Start the virtual machine again, and read " +
			"error."},
	{"connection of the VMM ended",
		"The virtual machine monitor broke the protocol vhost-user, or crashed. Start the virtual machine " +
			"again, and read error."},
	{"panic in a request of the guest",
		"An internal error failed one request of the guest with EIO. Report the stack."},
	{"the VMM has damaged the guest's memory; its connection ends",
		"The memory of the guest changed its size or vanished. Start the virtual machine again."},
	{"the guest has changed a request in progress",
		"The guest broke the rules of virtio, and its request fails. Check the kernel of the guest."},
	{"virtqueue stopped: the guest broke the rules of virtio; reset the guest",
		"The guest, or its virtual machine monitor, sent an invalid queue entry. Reset the guest."},
	{"another program has removed or replaced the socket; no VMM can connect",
		"The share continues for its virtual machine. Unmount the share and start it again before the " +
			"next virtual machine starts."},
	{"refused a second VMM; one VMM at a time can use the share",
		"Start one share for each virtual machine."},
	{"guest cannot mount",
		"The guest's version of FUSE is not supported, or the session could not be stored. Read error, " +
			"and check the kernel of the guest."},
	// pkg/xprt.
	{"process was stopped; timeouts leave out this time",
		"The daemon did not run for this time, for example because the host or virtual machine was " +
			"suspended. No action."},
	{"trace event before connection loss",
		"The newest events of the trace, for a report about the message connection lost."},
	{"failed to close completion queue",
		"A resource of an ended connection could not be released. One such message does no harm; with " +
			"many, restart the daemon."},
	{"failed to deregister message buffers",
		"A resource of an ended connection could not be released. One such message does no harm; with " +
			"many, restart the daemon."},
	{"failed to destroy a memory region, closing its protection domain",
		"The device refused to release memory. The daemon releases all memory of the connection at once " +
			"and continues."},
	{"failed to destroy memory regions",
		"Memory regions are orphaned, and counted in nfsrdmad_mrs_orphaned_total. With many, restart the " +
			"daemon, and check the device."},
	{"failed to release protection domain",
		"A resource of an ended connection could not be released. One such message does no harm; with " +
			"many, restart the daemon."},
	{"work request failed",
		"The device reported status for a request, and the daemon connects again. A remote access error " +
			"points to a fault of the server or of a device."},
	{"cannot repeat all calls of the earlier process with their XIDs; the server may execute them " +
		"again",
		"More calls were in flight than half of slots=, or slots= is smaller than before the restart. A " +
			"create or remove can report EEXIST or ENOENT although it succeeded. Increase slots=."},
	{"connection lost",
		"The connection ended; error says why. The daemon connects again and sends the pending calls " +
			"again. With many, check the server and the network."},
	{"discarded invalid message from server",
		"The server sent a message that breaks RPC-over-RDMA. Its call is sent again after the timeout. " +
			"Check the version of the server, and report the message."},
	{"no memory to send RPC, retrying; reduce slots= to need less",
		"The daemon cannot register memory for a call. Increase the memory lock limit (LimitMEMLOCK=) or " +
			"the memory of the unit, or reduce slots=."},
	{"reconnect failed",
		"The server does not accept a connection; error says why, and next when the daemon tries again. " +
			"Programs wait. Check the server and the network."},
}

// Explanation returns what a message means and what to do, or "".
func Explanation(message string) string {
	for _, e := range explanations {
		if e.message == message {
			return e.meaning
		}
	}
	return ""
}
