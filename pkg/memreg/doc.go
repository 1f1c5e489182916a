// Package memreg registers memory by fast-registration work requests (FRWR). It decides which
// memory a server can reach, and for how long.
//
// # Normal operation
//
// A [List] belongs to one RPC slot. [List.Map] takes MRs one at a time (docs/features.md S2) and
// lays the caller's memory out on them (S3). Each MR gets a new key that the server cannot predict
// (S4). Its address carries the XID (S5), and its access is the least that the RPC needs (S6).
// [List.Chain] puts the registrations in front of the Send, so that one post carries the whole RPC
// (S7).
//
// A Send With Invalidate of the server invalidates one MR ([List.RemoteInvalidated], S11).
// [List.Invalidate] posts LOCAL_INVs for the others as one chain whose last request is signaled
// (S9, S10). An RPC ends only after all of its keys are invalidated.
//
// A device that registers memory for each use (verbs.CapPerIOReg) registers it in Map, because only
// the registration returns the key for the header. Its FastRegs and LOCAL_INVs still take their
// places in the chains. Unmap invalidates the MR at once. If that fails, the caller must end the
// connection, which fences the memory.
//
// A device that must pin memory before a FastReg (verbs.PreparingPD) pins it in Map. A lack of
// memory is then a shortage of this RPC only, and not an error of the post.
//
// # Recovery
//
// An MR whose state is uncertain has failed, and is not used again as it is. [State] shows the
// state machine. There are three outcomes:
//
//   - Recovered: the MR failed because the connection ended. [Pool.Recover] destroys the provider's
//     MR, which fences its memory, and allocates another in its place (S13).
//   - Recycled: the LOCAL_INV of the MR failed or could not be posted. The pool destroys the MR and
//     allocates another on demand (S14).
//   - Orphaned: the MR could not be destroyed or replaced. The pool removes it from every list. If
//     the destruction failed, the server may still reach the memory through the protection domain,
//     so the pool must not serve another connection.
//
// The sum of recovered, recycled and orphaned MRs equals the number of failed MRs.
//
// With NFSRDMAD_VERIFY=all, every transition is checked against the state table, every list against
// its owner, and the gauges against the pool ([Pool.Check]). A violation stops the process.
//
// # Locks
//
// A List belongs to the current owner of its slot. Only its free MRs have a lock, List.free. A slot
// at the limit of the device takes free MRs of other slots. Otherwise, only the owner uses that
// lock. Pool.mrs guards the set of all MRs. The pool locks it only to allocate, move or destroy an
// MR, never in the steady state. Recover, Check and Destroy must not run while any List of the pool
// is in use.
package memreg
