// Package selfcheck finds faults of this process. It counts the resources that must be released,
// such as buffers, memory regions and queue pairs: the test mains fail when [Leaks] finds any. It
// also switches the invariant checks: NFSRDMAD_VERIFY=all turns them on in a daemon, and every test
// main turns them on. A broken invariant stops the process at once, because the daemon's memory can
// no longer be trusted.
package selfcheck
