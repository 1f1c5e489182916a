// Package reference extracts from the source of this module what docs/reference.md lists: the
// messages of the log, and the errors of commands. It also has the explanation of each message.
//
// "make reference" writes docs/reference.md; TestReference of cmd/nfsrdmad checks it. Only
// tests use the package.
package reference
