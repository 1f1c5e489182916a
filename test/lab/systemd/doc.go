// Package systemd tests the life cycle of the daemon under systemd, in a guest with a whole Debian:
// restart, upgrade, crash, stop and the shutdown of the host. It also tests the Debian package.
package systemd
