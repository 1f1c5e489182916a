package lab

import (
	"regexp"
	"strings"
)

// kernelError matches the first line of a kernel's report of an internal error.
var kernelError = regexp.MustCompile(`BUG:|kernel BUG at|Oops|WARNING: |general protection fault|` +
	`Kernel panic|UBSAN:|refcount_t: |list_(add|del) corruption|` +
	`EXT4-fs error|I/O error,|unregister_netdevice: waiting`)

// knownKernelErrors are errors of the stock kernels, by series, that do not depend on the client.
var knownKernelErrors = map[string][]*regexp.Regexp{
	// 6.1 leaks a protection domain and a completion queue for each connection that it refuses, and
	// reports them when the device is removed.
	"6.1": {regexp.MustCompile(`WARNING: .*drivers/infiniband/core/restrack\.c`)},
}

// kernelErrorLines is the number of console lines that a report shows: the error and its trace.
const kernelErrorLines = 30

// kernelErrors returns the kernel errors that are not expected, each with the lines that follow it,
// and the first lines of the expected ones.
func kernelErrors(lines []string, o Options) (found, expected []string) {
	patterns := knownKernelErrors[o.Kernel]
	for _, c := range o.ExpectedKernelErrors {
		patterns = append(patterns[:len(patterns):len(patterns)], regexp.MustCompile(c))
	}
next:
	for i, line := range lines {
		if !kernelError.MatchString(line) {
			continue
		}
		for _, e := range patterns {
			if e.MatchString(line) {
				expected = append(expected, line)
				continue next
			}
		}
		found = append(found, strings.Join(lines[i:min(len(lines), i+kernelErrorLines)], "\n"))
	}
	return found, expected
}
