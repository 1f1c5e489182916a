// Package attr has what a mount knows of the attributes of objects: their values and age, which replies
// are outdated, which changes other clients made, and what the kernel has of them.
//
// # Files
//
//	clock.go  the order of calls and changes
//	state.go  State: the attributes of one object
//	update.go replies and changes (RFC 1813 §2.6)
//	chain.go  replies to WRITEs in flight at the same time
//	pages.go  the kernel's pages of a file
//	rights.go rights that the server gave to users
//
// # Locks
//
// State.mu and Rights.mu guard their fields. Neither is held while another lock is taken.
package attr
