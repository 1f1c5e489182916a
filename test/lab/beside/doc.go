// Package beside compares the client with the NFS client of the Linux kernel. In a guest of package
// lab both mount the same export of the same server, and the same program runs on both mounts.
//
// TestVisible changes files through one client and reads them through the other. TestDiffer runs
// streams of random operations on both, and compares errors, data and attributes.
// KNOWN_DIFFERENCES.md lists the intended differences with their reasons, and the test checks that
// they still exist. TestMatrix tries every operation as several users; with -update it records the
// results of the kernel's client for test/integration. TestBeside measures both alternately; with
// -update it writes docs/performance.md.
//
// The program is in directory program. Package test/differential has the operations, and tests that
// need no guest.
package beside
