// Package archtest keeps the shape of the house: imports run downward only, and every room has its
// page of package doc. It holds nothing but tests and no locks.
package archtest
