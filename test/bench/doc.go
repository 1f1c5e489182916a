// Package bench compares nfsrdmad with yardsticks in one run: `make bench`.
//
// TestBench starts the targets below, each in its own process, and measures them alternately with
// the workloads of internal/bench. The files are in memory (tmpfs), and all traffic is on loopback.
//
//	F  a file system in memory behind pkg/fuse/kernel: what FUSE costs
//	T  a TCP connection between two Go processes, with requests and replies of the same sizes
//	P  fusenfs: libnfs over TCP and libfuse, to the same NFS-Ganesha
//	S  the server without FUSE: the served directory, and READ and WRITE calls of a client process
//	D  nfsrdmad on "nfsrdmad serve DIR"
//	R  nfsrdmad on "nfsrdmad serve --backend" in front of NFS-Ganesha
//
// # Files
//
//	bench_test.go  TestBench: the rounds
//	rig_test.go    starts the servers, mounts and other processes
//	main_test.go   the roles of the test program in other processes
//	null_test.go   the file system of F
//	raw_test.go    the programs of T and S: TCP echo, RPC client
//	fusenfs/       the program of P, in C
//	goals_test.go  ratios and their goals
//	text_test.go   tables as text and for docs/performance.md
//	plot_test.go   pictures
//
// "make test" runs TestBench with tiny sizes. It checks only that each figure exists.
package bench
