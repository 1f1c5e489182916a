package daemon

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// A capability is a capability of capabilities(7) that the daemon needs.
type capability struct {
	number uint
	name   string
}

// neededCapabilities are the capabilities that the daemon keeps. docs/operator.md says what each is
// for.
var neededCapabilities = []capability{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"},
	{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"},
	{unix.CAP_NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"},
	{unix.CAP_SYS_RESOURCE, "CAP_SYS_RESOURCE"},
	{unix.CAP_IPC_LOCK, "CAP_IPC_LOCK"},
}

// neededMask has a bit for each needed capability.
func neededMask() (mask uint64) {
	for _, c := range neededCapabilities {
		mask |= 1 << c.number
	}
	return mask
}

// boundingSet returns the bounding set of the calling thread.
func boundingSet() (mask uint64) {
	for c := range uint(64) {
		on, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0)
		if err != nil { // beyond the last capability of the kernel
			return mask
		}
		mask |= uint64(on) << c
	}
	return mask
}

// unneededCapabilities returns the capabilities of the calling thread that the daemon does not
// need: those that it has, and those that a program of root would get (the bounding set).
func unneededCapabilities() (mask uint64, err error) {
	_, data, err := getCapabilities()
	if err != nil {
		return 0, err
	}
	own := uint64(data[0].Permitted|data[0].Inheritable) | uint64(data[1].Permitted|data[1].Inheritable)<<32
	return (own | boundingSet()) &^ neededMask(), nil
}

func getCapabilities() (header unix.CapUserHeader, data [2]unix.CapUserData, err error) {
	header.Version = unix.LINUX_CAPABILITY_VERSION_3
	if err := unix.Capget(&header, &data[0]); err != nil {
		return header, data, fmt.Errorf("capget: %w", err)
	}
	return header, data, nil
}

// dropCapabilities removes the capabilities that the daemon does not need from all sets of the
// calling thread. execve(2) and new threads inherit the sets. Without CAP_SETPCAP it returns an
// error if the bounding set has other capabilities: a program of root would get them back.
func dropCapabilities() error {
	var errs []error
	for _, c := range capabilityNumbers(boundingSet() &^ neededMask()) {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			errs = append(errs, fmt.Errorf("drop capability %d from the bounding set: %w", c, err))
			break // the others fail too
		}
	}
	header, data, err := getCapabilities()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for i := range data {
		keep := uint32(neededMask() >> (32 * i))
		data[i].Effective &= keep
		data[i].Permitted &= keep
		data[i].Inheritable &= keep // the kernel drops ambient capabilities with it
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		errs = append(errs, fmt.Errorf("capset: %w", err))
	}
	return errors.Join(errs...)
}

// capabilityNumbers returns the numbers of the capabilities of a mask, as in linux/capability.h.
func capabilityNumbers(mask uint64) (numbers []uint) {
	for c := range uint(64) {
		if mask&(1<<c) != 0 {
			numbers = append(numbers, c)
		}
	}
	return numbers
}
