// Package docs checks the pages for users: README.md and docs.
//
// Links lead to files and headings, and the names of files, targets of make and messages exist. One
// test runs commands that the pages show, and makes the failures of docs/troubleshooting.md, in
// namespaces for itself. The tests of cmd/nfsrdmad check that all commands of nfsrdmad parse.
package docs
