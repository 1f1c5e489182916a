// Package memreg is memory registration by fast-registration work requests (FRWR), the part of an
// NFS/RDMA client that decides what a server may touch, and for how long.
//
// # Normal operation
//
// A [List] belongs to one RPC slot. [List.Map] takes MRs one at a time (docs/features.md S2), lays
// the caller's memory out on them (S3), gives each a fresh key that the server cannot guess (S4),
// an address that carries the XID (S5), and the least access that does (S6). [List.Chain] puts the
// registrations in front of the Send, so that one post carries all of it (S7). When the reply has
// come, either the server has already invalidated the one MR that its Send With Invalidate named
// ([List.RemoteInvalidated], S11), or [List.Invalidate] posts LOCAL_INVs for the rest as one chain
// whose last request is signaled (S9, S10). No RPC ends before its keys are dead.
//
// # States
//
// state.go has the machine as one table; this is its drawing (S12):
//
//	              map                  FastReg flushed
//	+--> INVALID -----> VALID --------------------------------> FLUSHED_FR
//	|       ^  ^          | |\                                      |
//	|       |  +----------+ | \         LOCAL_INV flushed           v
//	|       |  unsent,      |  +------------------------------> FLUSHED_LI
//	|       |  LOCAL_INV,   |                                       |
//	|       |  remote inv.  | LOCAL_INV failed, or not posted       | (from any of the three)
//	|       |               v                                       |
//	|       |           CONDEMNED --> destroyed: recycled           |
//	|       |                                                       |
//	|       |     made anew             the connection ended        |
//	|       +---------------- RECOVERING <--------------------------+ (and from VALID)
//	|                              |
//	+-- a new MR, on demand        +--> destroyed: orphaned, if it could not be destroyed or not made anew
//
// A device that registers memory for each use (verbs.CapPerIOReg) does so in Map already, as only
// that tells the key that goes into the header; its FastReg and LOCAL_INV take their places in the
// chains all the same, and an MR that is unmapped is invalidated at once.
//
// # Recovery
//
// An MR whose state is not certain is hurt, and never used again as it is. Hurt by the end of a
// connection, it is taken aside, destroyed, which fences it, and made anew in its place
// ([Pool.Recover]: recovered, S13). Hurt because its LOCAL_INV failed or could not be posted, it is
// destroyed, and another is made when one is needed (recycled, S14). What can be neither is off
// every list (orphaned); when it was the destruction that failed, the memory may still be reached
// through the protection domain, so the pool must not see another connection. Recovered, recycled
// and orphaned add up to the hurt.
//
// With NFSRDMAD_VERIFY=all every step is held to the table, every list to its owner and the gauges
// to the pool ([Pool.Check]); a breach stops the process.
//
// # Locks
//
// A List has no lock: it belongs to whoever owns its slot at the moment. Pool.mu guards the list of
// all MRs and is taken when an MR is made or destroyed only, never in the steady state. Recover,
// Check and Destroy need every List of the pool to be at rest.
package memreg
