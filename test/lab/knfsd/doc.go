// Package knfsd tests the client against stock Linux servers in the virtual machines of package
// lab: the complete stack, from /dev/fuse to a provider, against knfsd over siw or rxe in a guest.
// With softiwarp the client runs on the host. With rdma-core it runs in a second guest, whose
// kernel has RDMA devices. That guest runs this same test program in the host's file system, and
// reaches the server over an Ethernet link.
//
// The only test with guests is TestServers. TestServers has a subtest for each server and provider,
// and each of these has a subtest for each case. A case registers itself with a phrase that says
// what it proves. A run compares the table in docs/interop.md with its results; with -update it
// writes the table:
//
//	go test ./test/lab/knfsd -v                                  # everything
//	go test ./test/lab/knfsd -v -run 'TestServers/.*/forms'      # one case, in each setup
//	go test ./test/lab/knfsd -v -servers 6.1/siw                 # one server, with each provider
//	go test ./test/lab/knfsd -v -provider rdmacore -update       # one provider (see setup_test.go)
//
// The tests read the traffic from captures with an independent decoder, tshark (wire_test.go). To
// read the state of the server, the tests run commands in its guest.
//
// The cases in inapplicableCases do not apply to some setups. All others run in every setup,
// with smaller sizes in guests.
package knfsd
