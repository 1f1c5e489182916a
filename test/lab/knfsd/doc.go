// Package knfsd proves the client against stock Linux servers, in the virtual machines of package lab: the whole stack on the host, from
// /dev/fuse to a provider, against knfsd over siw in a guest.
//
// There is one test, TestServers, with a subtest for each server and in it one for each case. Cases register themselves, with what they prove in a
// phrase; a run holds the table in docs/interop.md to what it has proved, and writes it with -update:
//
//	go test ./test/lab/knfsd -v                                  # everything
//	go test ./test/lab/knfsd -v -run 'TestServers/.*/forms'      # one case, on each kernel
//	go test ./test/lab/knfsd -v -servers 6.1/siw                 # one server
//	go test ./test/lab/knfsd -v -provider softiwarp -update      # another provider joins by one line in setup_test.go
//
// What was on the wire is read from captures, by a decoder that nobody here wrote (wire_test.go); what the server has is asked of the server itself, by
// commands in the guest.
package knfsd
