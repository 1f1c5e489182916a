package mount

import (
	"fmt"
	"regexp"
	"strings"
)

// An OptionHelp describes one row of the option table, or several rows that belong together.
type OptionHelp struct {
	Syntax string   // such as "rsize=N, wsize=N", or "hard | soft"
	Names  []string // the options in Syntax
	Text   string   // with the default in parentheses
	// Range is the range of the values, such as "4 to 1024", or "" for other values.
	Range string
}

// An OptionSection is a group of options in a help text.
type OptionSection struct {
	Title   string
	Options []OptionHelp
}

// NoEffect names the options that are accepted for compatibility and have no effect. It does not
// list those of fstab(5) and mount(8).
const NoEffect = "vers=3, nfsvers=3, mountvers=3, proto=rdma, rdma, mountproto=tcp, sec=sys, rdirplus, intr, nointr"

// rangeMark stands in a text for the range of the option table.
const rangeMark = "{range}"

// optionHelp lists the syntax and the text of each option. The option table has the ranges.
var optionHelp = []struct {
	title   string
	options [][2]string
}{
	{"Options of -o with the names and meanings of nfs(5)", [][2]string{
		{"ro | rw", "mount read-only or read-write (rw)"},
		{"hard | soft | softerr",
			"when the server does not reply: retry forever, return EIO, or return ETIMEDOUT (hard)"},
		{"timeo=TENTHS", "reply timeout in tenths of a second; the client then reconnects (600)"},
		{"retrans=N", "retries before soft or softerr returns an error (2)"},
		{"rsize=N, wsize=N", "maximum bytes of a READ or WRITE, {range} (the server's maximum)"},
		{"port=N", "RDMA port of the server (20049)"},
		{"mountport=N", "TCP port of the server's MOUNT service (ask the port mapper, then try 20048)"},
		{"resvport | noresvport", "connect from a source port below 1024 if one is free and permitted, or from any; " +
			"rdma-core connections always use any (resvport)"},
		{"nconnect=N", "number of connections, {range} (1); the first one carries no READ or WRITE of 64 KiB or more"},
		{"acregmin=, acregmax=, acdirmin=, acdirmax=SECONDS",
			"minimum and maximum time to cache attributes of files and directories (3, 60, 30, 60)"},
		{"actimeo=SECONDS", "set all four cache times"},
		{"ac | noac", "cache attributes or not (ac)"},
		{"lookupcache=all | pos | none", "cache all names, existing names, or none (all)"},
		{"cto | nocto",
			"ask the server at each open, or use cached attributes and permissions of the user until they expire " +
				"(cto)"},
		{"acl | noacl", "use POSIX ACLs of the server, or ignore them (acl)"},
		{"lock | nolock",
			"fcntl(2) and flock(2) locks exclude other clients, or only processes of this host (lock)"},
		{"local_lock=all | flock | posix | none", "kinds of locks that are local to this host (none)"},
		{"nlmport=N", "TCP port of the server's lock service NLM (ask the port mapper, or use the port of MOUNT)"},
		{"allow_suid | nosuid, allow_dev | nodev",
			"allow set-user-ID programs, and device files (nosuid, nodev; also with the option defaults). " +
				"suid and dev mean the same, but mount(8) and fstab do not pass them on"},
		{"noexec, noatime, nodiratime, strictatime and their opposites", "see mount(8)"},
	}},
	{"Options of this client", [][2]string{
		{"remoteports=LIST", "addresses of the server, for the connections in turn and for fail-over: addresses and " +
			`ranges FIRST-LAST, separated by "~", at most 64 (the address of HOST)`},
		{"dirty_expire=SECONDS",
			"age after which the data of open files is written to stable storage, 0 to wait for fsync or close (5)"},
		{"dirty_bytes=N", "bound of written data that is not on stable storage, {range}; writes wait (33554432)"},
		{"writeback | nowriteback",
			"let the kernel gather small writes or not; no other client may use the files (nowriteback)"},
		{"provider=auto | softiwarp | rdmacore",
			"RDMA provider (auto: rdmacore if the route to the server uses an RDMA device, else softiwarp)"},
		{"device=NAME", "RDMA device to use"},
		{"slots=N", "maximum calls in flight per connection, {range} (64)"},
		{"inline=N", "inline threshold in bytes, {range} in steps of 1024 (4096)"},
		{"mpacrc=off | on", "send and check iWARP CRCs (off)"},
		{"writepad", "offer memory for XDR padding, for old servers"},
		{"sharednames | nosharednames", "let the kernel cache names for all users or not; it checks search " +
			"permission by mode bits alone (nosharednames)"},
		{"trace=N", "trace events to keep, 0 for none (1024)"},
		{"keepalive=SECONDS", "idle time before a keepalive NULL call, 0 for never (10)"},
		{"idle=SECONDS", "close a connection that is unused for this time, 0 for never (300)"},
		{"stall=SECONDS", "report the mount as stalled when a request has no reply for this time, 0 for never (60)"},
		{"stallabort=SECONDS",
			"abort the mount, as umount --force does, when an RPC has no reply for this time, 0 for never (0)"},
	}},
}

// optionSyntax matches the name of an option in a syntax, where other words are values.
var optionSyntax = regexp.MustCompile(`(?:^|, | \| )([a-z_]+)`)

// OptionSections returns the help of all options, without those of fstab(5) and [NoEffect].
func OptionSections() []OptionSection {
	var sections []OptionSection
	for _, from := range optionHelp {
		s := OptionSection{Title: from.title}
		for _, row := range from.options {
			h := OptionHelp{Syntax: row[0], Text: row[1]}
			for _, m := range optionSyntax.FindAllStringSubmatch(h.Syntax, -1) {
				if opt := optionByName[m[1]]; opt != nil {
					h.Names, h.Range = append(h.Names, m[1]), opt.valueRange()
				}
			}
			h.Text = strings.ReplaceAll(h.Text, rangeMark, h.Range)
			s.Options = append(s.Options, h)
		}
		sections = append(sections, s)
	}
	return sections
}

// valueRange returns the range of the values, or "" for other values than numbers.
func (o *option) valueRange() string {
	if o.hi == 0 {
		return ""
	}
	return fmt.Sprintf("%d to %d", o.lo, o.hi)
}
