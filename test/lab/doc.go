// Package lab runs stock Linux NFS/RDMA servers in virtual machines, for tests.
//
// A guest runs a Debian kernel with knfsd, which serves NFS over RDMA, on siw or rxe, and over TCP.
// "make lab" builds the images. Start boots a guest in software emulation in about ten seconds, and
// forwards free ports of 127.0.0.1 to it. iWARP is TCP, so softiwarp on the host reaches siw in the
// guest through a forwarded port. README.md describes the images and the pitfalls of these servers.
//
// A guest's RDMA device is reachable from the host by iWARP, or from the other guests on a Link. A
// Link is an Ethernet whose switch runs in the test's process; the test can cut it and capture its
// traffic. With Options.HostRoot a guest runs the host's programs, and so can be the client.
//
// The package promises:
//
//   - Only the test connects to the RDMA port, because siw can lose its listener when a
//     connection ends early. The guest reports on its console that it serves, and commands use
//     their own ports.
//   - Guests and captures end with the test, and with the test's process, even if it is killed:
//     QEMU and dumpcap then get SIGKILL, and the guest's disk is an unlinked file.
//   - A guest whose kernel logs an error fails the test, unless the stock kernel is known for
//     this error or the test expects it.
//   - A link loses only the frames that the test asks it to lose, and frames for a guest that
//     accepts none for seconds.
//
// Several guests can run at once. The methods of a Guest can be called concurrently; the methods
// that change its power (PowerOff, Boot, Reset, Freeze, Thaw) exclude each other.
package lab
