// Package scale measures what mounts and connections cost, and writes docs/scale.md: `make scale`.
//
// TestScale starts "nfsrdmad serve DIR" and a daemon, mounts the export many times, and measures
// both processes from outside. TestFleet of pkg/xprt simulates a fleet of clients. TestPage writes
// the results of both into docs/scale.md.
//
// "make test" runs TestScale with few mounts. It checks only that each figure exists.
package scale
