// Package systemd has the parts of systemd that a service talks to, for tests: the D-Bus
// interface with the job of the unit, and the notification socket with its descriptor store.
//
//	bus.go      units and jobs, on a dbus-daemon or on a private socket
//	manager.go  the notification socket
package systemd
