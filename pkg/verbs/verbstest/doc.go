// Package verbstest is the conformance suite for providers of package verbs. Only tests import it.
//
// [Conformance] runs the suite on a provider. Each test connects endpoints in this process and uses
// only the verbs interfaces. A test that needs a capability is skipped on devices without it.
// [Connect] and [NewEndpoint] make endpoints for other tests.
//
//	conformance.go  Conformance, the list of groups
//	harness.go      endpoints, pairs, completions
//	connections.go  connect, accept, reject, listen
//	messages.go     Send and Receive, queues
//	memory.go       registration, RDMA Write and Read
//	access.go       accesses that a device must refuse; fences
//	disconnect.go   drain, close, flush, disconnects under load
//	resources.go    device attributes, busy resources, STags
//	sharing.go      several connections on one PD and CQ
//	errors.go       error codes and statuses
package verbstest
