package lab

import (
	"regexp"
	"strings"
)

// complaint finds the first line of what a kernel says about a fault of its own.
var complaint = regexp.MustCompile(`BUG:|kernel BUG at|Oops|WARNING: |general protection fault|Kernel panic|UBSAN:|refcount_t: |list_(add|del) corruption|EXT4-fs error|I/O error,|unregister_netdevice: waiting`)

// known are complaints of the stock kernels that say nothing about a client, by series.
var known = map[string][]*regexp.Regexp{
	// A connection that is refused leaves a protection domain and a completion queue behind, which
	// is noticed with the end of the device.
	"6.1": {regexp.MustCompile(`WARNING: .*drivers/infiniband/core/restrack\.c`)},
}

// complaintLines is how much of the console is shown of a complaint: its trace.
const complaintLines = 30

// complaints returns the kernel's complaints that nobody expects, each with the lines that follow
// it, and the first lines of those that were expected.
func complaints(lines []string, o Options) (found, announced []string) {
	expected := known[o.Kernel]
	for _, c := range o.Complaints {
		expected = append(expected[:len(expected):len(expected)], regexp.MustCompile(c))
	}
next:
	for i, line := range lines {
		if !complaint.MatchString(line) {
			continue
		}
		for _, e := range expected {
			if e.MatchString(line) {
				announced = append(announced, line)
				continue next
			}
		}
		found = append(found, strings.Join(lines[i:min(len(lines), i+complaintLines)], "\n"))
	}
	return found, announced
}
