// Package base contains the parts of a verbs provider that do not depend on its device. These parts
// are the use count of a protection domain, the reservations of a completion queue, and the rings
// of the work queues. Others are the checks of posted requests, the counters of a queue pair, and
// the common part of a ConnID.
//
// Only the packages below pkg/verbs import it. The package performs no I/O, starts no goroutine,
// and allocates nothing for a request that passes its checks.
//
// # Locks
//
//	Uses.mu, CQEntries.mu   counts; innermost locks
//	ConnID.state            local address, queue pair and peer parameters; held while CreateQP calls
//	                        the provider, so the provider must not take it there
package base
