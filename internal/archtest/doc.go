// Package archtest checks the structure of the whole repository. It holds only tests.
//
//   - imports_test.go: every import between packages of this module is in a list.
//   - sources_test.go: programs that are started get no descriptors by accident, no timeout depends
//     on the wall clock, and the documents name tests that exist.
package archtest
