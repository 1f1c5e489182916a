// Package differential compares two file systems, operation by operation. Streams of random
// operations run on both sides: a reference, and a mount of this project. The package compares
// errors, data and attributes, and at the end the trees. It shrinks a stream that differs.
//
// A stream may use several processes, several users and several mounts of one export. Operations
// run one after the other. The reference is a local directory in test/integration, and the kernel's
// NFS client in test/lab/beside.
package differential
