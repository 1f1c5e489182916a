// Package packages tests the files of the packages for Debian and RPM. The lab tests their
// installation on a host with systemd.
package packages
