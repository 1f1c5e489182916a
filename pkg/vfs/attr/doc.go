// Package attr tells which replies, and what a mount knows from them, are outdated.
package attr
