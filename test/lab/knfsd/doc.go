// Package knfsd proves the client against stock Linux servers, in the virtual machines of package
// lab: the whole stack, from /dev/fuse to a provider, against knfsd over siw or rxe in a guest.
// With softiwarp the client is on the host. With rdma-core it is in a guest of its own, whose
// kernel has RDMA devices: there runs this very test program, in the host's file system, and an
// Ethernet link leads to the server.
//
// There is one test, TestServers, with a subtest for each server and provider, and in it one for
// each case. Cases register themselves, with what they prove in a phrase; a run holds the table in
// docs/interop.md to what it has proved, and writes it with -update:
//
//	go test ./test/lab/knfsd -v                                  # everything
//	go test ./test/lab/knfsd -v -run 'TestServers/.*/forms'      # one case, in each setup
//	go test ./test/lab/knfsd -v -servers 6.1/siw                 # one server, with each provider that reaches it
//	go test ./test/lab/knfsd -v -provider rdmacore -update       # one provider; another joins by a few lines in setup_test.go
//
// What was on the wire is read from captures, by a decoder that nobody here wrote (wire_test.go);
// what the server has is asked of the server itself, by commands in the guest.
//
// # What does not apply
//
//   - crc, with rdmacore: CRCs are the device's affair: siw's module has a parameter, RoCE has one always
//   - split, with rdmacore: it is about MPA's CRC, and a relay of TCP octets takes no RDMA device
//   - remote invalidation, with rdmacore: neither soft device can offer it to a peer; "own invalidation" is the case instead
//   - own invalidation, with softiwarp: softiwarp offers remote invalidation
//
// Everything else runs everywhere; sizes are smaller in guests, where the phrases allow it.
package knfsd
