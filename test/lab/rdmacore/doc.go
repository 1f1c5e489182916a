// Package rdmacore tests the rdma-core provider on the kernel's soft devices, in guests of the lab.
// It uses rxe with memory windows and siw with a registration for each use. It runs the main job, a
// storm of faults, attacks by a peer, and outages of devices and links. The server runs in the same
// guest, which is fast because both ends are in one kernel, or in another guest on a link. The
// tests can cut the link.
//
// The provider conformance suite has both ends in one process and checks the memory of both, so it
// runs in one guest. TestWire covers the rules that two kernels could keep or break differently.
// Its peer, TestPeer, runs in another guest and executes the orders that it receives in messages.
//
// The test programs are built on the host with -tags rdmacore, and run in the guest from a shared
// directory. The guest's image contains the libraries and their device drivers.
package rdmacore
