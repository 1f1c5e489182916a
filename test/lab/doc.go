// Package lab runs stock Linux NFS/RDMA servers in virtual machines, for tests.
//
// A guest is a kernel of Debian with knfsd on NFS/RDMA, over siw or rxe, and over TCP. "make lab"
// builds the images. Start boots one in software emulation, in about ten seconds, and forwards free
// ports of 127.0.0.1 to it; iWARP is TCP, so softiwarp on the host reaches siw in the guest through
// such a port. README.md has what an image is made of, and the traps of these servers.
//
// A soft RDMA device is reached by iWARP from the host, or by guests on a Link: an Ethernet of
// their own, whose switch is in the test's process and can be cut and recorded. With
// Options.HostRoot a guest runs the host's programs, and so can be the client.
//
// What it promises a test:
//
//   - Nobody connects to the RDMA port but the test: a connection that comes and goes can take siw's listener away. The guest says on its
//     console when it serves, and commands go over ports of their own.
//   - Everything ends with the test, and with the test's process, however that ends: QEMU and dumpcap get SIGKILL with their parent, and the
//     guest's disk has no name on the host.
//   - A guest whose kernel complained fails the test, unless the complaint is one that the stock kernels are known for or the test asked for.
//   - A link loses no frame but those it was told to, and those for a guest that takes none for seconds.
//
// Several guests may run at once. The methods of a Guest may be called concurrently; those that
// change its power (PowerOff, Boot, Reset, Freeze, Thaw) exclude each other.
package lab
