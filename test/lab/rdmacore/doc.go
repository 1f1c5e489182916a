// Package rdmacore proves the rdma-core provider on the kernel's soft devices, in a guest of the lab: the provider conformance suite, the main job
// and a storm of faults, over rxe with memory windows and over siw with a registration for each use, against the guest's own server. The
// test programs are built on the host with -tags rdmacore and run in the guest from a shared directory; the libraries and their device
// drivers are in the guest's image. README.md of test/lab has why the server is the guest's own.
package rdmacore
