// Package archtest checks the structure and the style of the whole repository. It holds only tests.
//
//   - imports_test.go: every import between packages of this module is in a list.
//   - docs_test.go: every package has a package page, and the documents name tests that exist.
//   - clock_test.go: no timeout depends on the wall clock.
//   - descriptors_test.go: programs that are started get no descriptors by accident.
//   - style_test.go: line lengths, and words that the project does not use.
package archtest
