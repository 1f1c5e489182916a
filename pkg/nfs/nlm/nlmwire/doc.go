// Package nlmwire is the wire format of the Network Lock Manager, version 4 (XNFS chapter 14; RFC
// 1813 §6), and of the status monitor NSM, version 1 (XNFS chapter 11), for clients and servers.
//
// The functions Append encode, and the functions Parse decode. Parse functions bound each length
// that a message claims. Their errors wrap sunrpc.ErrMalformed.
package nlmwire
