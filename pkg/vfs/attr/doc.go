// Package attr keeps the attributes of nodes, and tells which replies are outdated.
package attr
