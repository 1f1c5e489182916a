// Package hostile is for tests: a server of NFS over RDMA that does what no server may, and what a
// client must have made of it. It holds a transport to the promise of docs/semantics.md, that a
// call's memory is reachable by the server until its reply has been handled, and never after (RFC
// 8166 §8.1), on every provider and device.
package hostile
