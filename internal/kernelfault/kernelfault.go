// Package kernelfault knows the faults of Linux releases that make a function unusable.
//
// It compares the release of uname(2). A distribution that repairs a fault without a new release
// number is not recognized.
package kernelfault

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A release is major, minor and patch of a release as in uname -r.
type release [3]int

// The faults of FUSE over io_uring, which Linux has since 6.14.
//
// Without the changes to fs/fuse/dev_uring.c of June 2026, from "fuse-uring: remove request-less
// entries from ent_w_req_queue" (1c57a69be962) to "fuse-uring: fix EFAULT clobber"
// (3a0a8bc51a13), the kernel can use memory after its release when a connection ends
// (CVE-2026-64261), and a request that it gives to a killed process may never end. The changes are
// in Linux 7.2, and in the stable releases of repaired.
//
// Without "fuse: Fix the condition to enable over-io-uring" (1f59015e9581, CVE-2026-90095), the
// kernel accepts io_uring commands for a connection that did not negotiate them. The change is in
// Linux 7.3 and in 7.2.6.
var (
	firstURing  = release{6, 14, 0}
	repaired    = []release{{6, 18, 39}, {7, 1, 4}, {7, 2, 0}}
	conditioned = release{7, 2, 6}
)

// Release returns the release of the running kernel, or "" if it is unknown.
func Release() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return ""
	}
	return unix.ByteSliceToString(name.Release[:])
}

// URing returns why FUSE over io_uring must not be used with a kernel, and a fault of a kernel with
// which it can be used. At most one of them is not nil.
func URing(name string) (refuse, warn error) {
	r, ok := parse(name)
	switch {
	case !ok || r.before(firstURing):
		return nil, fmt.Errorf("the faults of FUSE over io_uring in Linux %q are not known", name)
	case !r.has(repaired):
		return fmt.Errorf("FUSE over io_uring of Linux %s can damage the memory of the kernel; "+
			"use Linux 6.18.39, 7.1.4, 7.2 or later", name), nil
	case r.before(conditioned):
		return nil, fmt.Errorf("kernel %s may have CVE-2026-90095: with enable_uring, it accepts io_uring commands "+
			"of FUSE servers that did not negotiate them; use Linux 7.2.6 or later", name)
	}
	return nil, nil
}

// parse parses a release as in uname -r. Distributions append to it, and the last number can be
// missing: 6.18.44-fc, 6.12.117+deb12-amd64, 6.19-amd64. A release candidate, such as 7.2.0-rc3,
// counts as older than its release, because it may not have all changes.
func parse(name string) (r release, ok bool) {
	end := strings.IndexFunc(name, func(c rune) bool { return c != '.' && (c < '0' || c > '9') })
	suffix := ""
	if end >= 0 {
		name, suffix = name[:end], name[end:]
	}
	numbers := strings.Split(name, ".")
	if len(numbers) < 2 || len(numbers) > len(r) || suffix != "" && suffix[0] != '-' && suffix[0] != '+' {
		return r, false
	}
	for i, s := range numbers {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil {
			return r, false
		}
		r[i] = int(n)
	}
	if rc, found := strings.CutPrefix(suffix, "-rc"); found && strings.IndexAny(rc, "0123456789") == 0 {
		r[2]--
	}
	return r, true
}

// before reports whether r is older than other.
func (r release) before(other release) bool {
	for i := range r {
		if r[i] != other[i] {
			return r[i] < other[i]
		}
	}
	return false
}

// has reports whether r has a change that the given releases were the first to have: some of stable
// series, and the last one of mainline.
func (r release) has(first []release) bool {
	for _, f := range first {
		if r[0] == f[0] && r[1] == f[1] {
			return !r.before(f)
		}
	}
	return !r.before(first[len(first)-1])
}

// AtLeast reports whether the kernel with the given name is of the release major.minor or later. It
// reports false if the release is not known.
func AtLeast(name string, major, minor int) bool {
	r, ok := parse(name)
	return ok && !r.before(release{major, minor, 0})
}
