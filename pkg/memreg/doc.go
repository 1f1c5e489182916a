// Package memreg is memory registration by fast-registration work requests (FRWR), the part of an NFS/RDMA client that
// decides what a server may touch, and for how long.
//
// # Normal operation
//
// A [List] belongs to one RPC slot. [List.Map] takes MRs one at a time (features.md S2), lays the caller's memory
// out on them (S3), gives each a fresh key that the server cannot guess (S4), an address that carries the XID (S5), and the
// least access that does (S6). [List.Chain] puts the registrations in front of the Send, so that one post carries
// all of it (S7). When the reply has come, either the server has already invalidated the one MR that its Send With Invalidate named
// ([List.RemoteInvalidated], S11), or [List.Invalidate] posts LOCAL_INVs for the rest as one chain whose last
// request is signaled (S9, S10). No RPC ends before its keys are dead.
//
//	           Map                    reply: SWI / LOCAL_INV done
//	INVALID ---------------> VALID ------------------------------> INVALID
//	   ^                       |  \
//	   |        FastReg flushed|   \ LOCAL_INV flushed
//	   |                       v    v
//	   |              FLUSHED_FR    FLUSHED_LI
//	   |                       \    /
//	   +--- (new MR) <-- destroyed with the connection, or recycled alone
//
// # Recovery
//
// An MR whose state is not certain is never used again: it is destroyed (Dereg fences it without fail) and a new one made when
// one is needed. [Pool.Destroy] does that for all MRs of a connection that ended; those hurt by it count as recycled, those whose
// Dereg failed as orphaned (S13, S14).
//
// # Locks
//
// A List has no lock: it belongs to whoever owns its slot at the moment. Pool.mu guards the list of all MRs and is taken when an MR
// is made or destroyed only, never in the steady state.
package memreg
