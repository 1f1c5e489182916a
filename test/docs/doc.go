// Package docs runs the commands that README.md and the pages of docs show.
//
// Each block of language sh or console runs in namespaces for itself, with a server named "server"
// and a daemon. Commands that cannot run in a test are declared with a reason. Their programs,
// targets of make and files are checked instead. The tests of cmd/nfsrdmad check that all commands
// of nfsrdmad parse, also those in the text.
package docs
