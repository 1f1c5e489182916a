// Package rdmacore proves the rdma-core provider on the kernel's soft devices, in guests of the
// lab, over rxe with memory windows and over siw with a registration for each use: the main job, a
// storm of faults, attacks by a peer, devices and links that go away. The server is the guest's
// own, where everything is in one kernel and fast, or another guest's on a link of the lab, which
// may be cut meanwhile.
//
// The provider conformance suite has both ends in one process, whose memory it looks into on both
// sides, so it runs in one guest. What of its rules two kernels could keep or break differently is
// in TestWire, whose peer, TestPeer, is in another guest and does what messages tell it.
//
// The test programs are built on the host with -tags rdmacore and run in the guest from a shared
// directory; the libraries and their device drivers are in the guest's image.
package rdmacore
