// Package beside holds the client against the one in the Linux kernel: in a guest of package lab
// both mount the same export of the same server, side by side, and the same program works on both.
//
// TestVisible changes files through either and looks at them through the other. TestDiffer does
// streams of random operations on both and compares errors, data and attributes. Where ours is to
// differ, KNOWN_DIFFERENCES.md says so and why, and the test holds it to that. TestBeside measures
// both in turns; with -update it writes docs/performance.md.
//
// The program is in folder program; its own tests need no guest.
package beside
