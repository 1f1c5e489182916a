package mount

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// A Recovery selects the result of a call when the server does not reply (nfs(5)).
type Recovery string

// Recoveries.
const (
	RecoveryHard    Recovery = "hard"    // retry forever
	RecoverySoft    Recovery = "soft"    // return EIO
	RecoverySoftErr Recovery = "softerr" // return ETIMEDOUT
)

// Options are the mount options of -o. Those of nfs(5) have its names, meanings and defaults.
type Options struct {
	Port         uint16        // RDMA port of the server
	LockPort     uint16        // NLM port of the server; 0 finds it
	LocalLock    string        // locks that the kernel keeps: all, flock, posix or none
	MountPort    uint16        // MOUNT port of the server; 0 asks its port mapper
	RSize, WSize int           // bytes; 0 uses the largest size of the server and the transport
	Timeout      time.Duration // for the reply of a call; the client then reconnects
	Retrans      int           // retries of RecoverySoft and RecoverySoftErr
	Recovery     Recovery
	AcRegMin     time.Duration
	AcRegMax     time.Duration
	AcDirMin     time.Duration
	AcDirMax     time.Duration
	NoAC         bool
	NoCTO        bool // an open may use cached attributes
	Writeback    bool // the kernel gathers writes; no other client may use the files
	NoACL        bool
	LookupCache  string // all, pos or none
	SharedNames  bool   // the kernel caches names for all users

	// DirtyExpire is the age after which the data of open files is written back; 0 for never.
	DirtyExpire      time.Duration
	DirtyBytes       int // bound of data that is not on stable storage
	NConnect         int
	RemotePorts      addrList // addresses of the server for NFS; nil for that of the mount source
	ReadOnly         bool
	Provider, Device string
	Slots            int // calls in flight on one connection
	InlineBytes      int // inline threshold in bytes
	MPACRC           bool
	NoResvPort       bool // connect from any source port
	WritePad         bool
	TraceEvents      int // events kept per connection; 0 for none
	// KeepAlive is the idle time before a keepalive NULL call; 0 for never.
	KeepAlive time.Duration
	// Idle is the time without calls after which a connection is closed; 0 for never.
	Idle time.Duration
	// Stall is the age of a request without reply from which the mount counts as stalled, and
	// StallAbort the age of an RPC without reply from which it is aborted; 0 for never.
	Stall, StallAbort time.Duration
	// Kernel are the mount flags of the kernel: nosuid, nodev, noexec, nodiratime, and noatime or
	// strictatime. nosuid and nodev are defaults, unlike those of nfs(5).
	Kernel []string
}

// DefaultOptions returns the defaults of nfs(5) for RDMA, and nosuid and nodev.
func DefaultOptions() Options {
	return Options{
		Port:        20049,            // IANA nfsrdma
		Timeout:     60 * time.Second, // nfs(5): timeo=600
		Retrans:     2,                // nfs(5)
		Recovery:    RecoveryHard,
		AcRegMin:    3 * time.Second,
		AcRegMax:    60 * time.Second,
		AcDirMin:    30 * time.Second,
		AcDirMax:    60 * time.Second,
		LookupCache: "all",
		DirtyExpire: data.DefaultExpire,
		DirtyBytes:  vfs.DefaultDirtyBytes,
		LocalLock:   lockNone,
		NConnect:    1,
		Provider:    providerAuto,
		Slots:       64,   // credits of Linux servers
		InlineBytes: 4096, // RFC 8797 §4, and Linux's default
		TraceEvents: xprt.DefaultTraceEvents,
		KeepAlive:   xprt.DefaultKeepAlive,
		Idle:        xprt.DefaultIdleTimeout,
		Stall:       time.Minute,
		Kernel:      []string{"nosuid", "nodev"}, // the server is not trusted with privileges of this host
	}
}

// An OptionError is the error of an invalid, unknown or contradictory mount option.
type OptionError struct {
	Option string // name
	Value  string // "" without value
	Want   string // what is allowed, or the cause
}

func (e *OptionError) Error() string {
	opt := e.Option
	if e.Value != "" {
		opt += "=" + e.Value
	}
	return fmt.Sprintf("mount option %q: %s", control.Brief(opt), e.Want)
}

// ErrorCode returns CodeUsage.
func (e *OptionError) ErrorCode() control.Code { return control.CodeUsage }

// An option is one row of the option table: a word, or name=value.
type option struct {
	names []string
	// group is the setting that the option changes. Two options of one group with different values
	// contradict each other. "" is no group.
	group string
	word  bool   // the option has no value
	want  string // what values are allowed
	// lo and hi are the range of a number; hi is 0 for other values.
	lo, hi int
	// set sets the option in o, and reports whether value is allowed. For a word value is "".
	set func(o *Options, name, value string) bool
	// explain returns why set rejects value; nil if want says it.
	explain func(value string) string
}

// reason returns why set rejects value.
func (o *option) reason(value string) string {
	if o.explain != nil {
		return o.explain(value)
	}
	return o.want
}

// Values of Options.LocalLock: the kinds of locks that stay local to this host (nfs(5)).
const (
	lockAll   = "all"
	lockFlock = "flock"
	lockPosix = "posix"
	lockNone  = "none"
)

const (
	// Payloads from one page to 1 MiB, rounded down to a multiple of 1 KiB (nfs(5), rsize).
	minPayload, maxPayload = 4096, 1 << 20
	payloadUnit            = 1024
	inlineUnit             = 1024
	maxAttrSeconds         = 1 << 22 // seconds; avoids overflow of a Duration
	maxTraceEvents         = 1 << 20 // 56 MiB per connection
	maxKeepAlive           = 3600    // seconds; detects a dead server within one hour
	maxIdle                = 1 << 22 // seconds
	maxStall               = 1 << 22 // seconds
	maxDirtyExpire         = 3600    // seconds
	minDirtyBytes          = vfs.MaxIOSize
	maxDirtyBytes          = 1 << 30
)

func word(group string, names ...string) option {
	return option{names: names, group: group, word: true, set: func(*Options, string, string) bool { return true }}
}

func wordSets(group, name string, set func(*Options)) option {
	return option{names: []string{name}, group: group, word: true,
		set: func(o *Options, _, _ string) bool { set(o); return true }}
}

func number(group string, lo, hi int, unit string, set func(*Options, int), names ...string) option {
	return option{names: names, group: group, lo: lo, hi: hi,
		want: fmt.Sprintf("must be a number from %d to %d%s", lo, hi, unit),
		set: func(o *Options, _, value string) bool {
			n, err := strconv.Atoi(value)
			if err != nil || n < lo || n > hi {
				return false
			}
			set(o, n)
			return true
		}}
}

func oneOf(group string, values []string, why string, set func(*Options, string), names ...string) option {
	return option{names: names, group: group, want: "must be " + orList(values) + why,
		set: func(o *Options, _, value string) bool {
			if !slices.Contains(values, value) {
				return false
			}
			set(o, value)
			return true
		}}
}

func orList(values []string) string {
	if len(values) == 1 {
		return values[0]
	}
	return strings.Join(values[:len(values)-1], ", ") + " or " + values[len(values)-1]
}

func ignore(*Options, string) {}

// attrTimeout sets one attribute cache time and clears NoAC, which the base options may have set.
// In one list, noac and a cache time contradict each other (see checkAttrTimes).
func attrTimeout(name string, field func(*Options) *time.Duration) option {
	return number(name, 0, maxAttrSeconds, " (seconds)", func(o *Options, n int) {
		*field(o), o.NoAC = time.Duration(n)*time.Second, false
	}, name)
}

// kernelFlag returns the options of a flag of mount(2) and of its opposite. mount(8) does not pass
// the opposites "suid" and "dev" to helpers, because they are its defaults: they have another name
// that it passes.
func kernelFlag(flag string, opposites ...string) []option {
	return []option{
		wordSets(opposites[0], flag, func(o *Options) { o.setKernel(flag, flag) }),
		{names: opposites, group: opposites[0], word: true,
			set: func(o *Options, _, _ string) bool { o.setKernel("", flag); return true }},
	}
}

// setKernel adds the kernel flag to o.Kernel, unless it is "", and removes the flags in others.
func (o *Options) setKernel(flag string, others ...string) {
	o.Kernel = slices.DeleteFunc(o.Kernel, func(f string) bool { return slices.Contains(others, f) })
	if flag != "" {
		o.Kernel = append(o.Kernel, flag)
	}
}

var optionTable = slices.Concat([]option{
	oneOf("vers", []string{"3"}, " (only NFS version 3 is supported)", ignore, "vers", "nfsvers"),
	oneOf("proto", []string{"rdma"}, " (for TCP use mount -t nfs)", ignore, "proto"),
	number("port", 1, 65535, "", func(o *Options, n int) { o.Port = uint16(n) }, "port"),
	number("mountport", 1, 65535, "", func(o *Options, n int) { o.MountPort = uint16(n) }, "mountport"),
	number("nlmport", 1, 65535, "", func(o *Options, n int) { o.LockPort = uint16(n) }, "nlmport"),
	oneOf("mountproto", []string{"tcp"}, " (MOUNT over UDP is not supported)", ignore, "mountproto"),
	number("rsize", minPayload, maxPayload, " (bytes)", func(o *Options, n int) { o.RSize = n &^ (payloadUnit - 1) },
		"rsize"),
	number("wsize", minPayload, maxPayload, " (bytes)", func(o *Options, n int) { o.WSize = n &^ (payloadUnit - 1) },
		"wsize"),
	number("timeo", 1, 36000, " (tenths of a second)",
		func(o *Options, n int) { o.Timeout = time.Duration(n) * time.Second / 10 }, "timeo"),
	number("retrans", 0, 1000, "", func(o *Options, n int) { o.Retrans = n }, "retrans"),
	wordSets("recovery", "hard", func(o *Options) { o.Recovery = RecoveryHard }),
	wordSets("recovery", "soft", func(o *Options) { o.Recovery = RecoverySoft }),
	wordSets("recovery", "softerr", func(o *Options) { o.Recovery = RecoverySoftErr }),
	attrTimeout("acregmin", func(o *Options) *time.Duration { return &o.AcRegMin }),
	attrTimeout("acregmax", func(o *Options) *time.Duration { return &o.AcRegMax }),
	attrTimeout("acdirmin", func(o *Options) *time.Duration { return &o.AcDirMin }),
	attrTimeout("acdirmax", func(o *Options) *time.Duration { return &o.AcDirMax }),
	number("actimeo", 0, maxAttrSeconds, " (seconds)", func(o *Options, n int) {
		d := time.Duration(n) * time.Second
		o.AcRegMin, o.AcRegMax, o.AcDirMin, o.AcDirMax, o.NoAC = d, d, d, d, false
	}, "actimeo"),
	wordSets("ac", "ac", func(o *Options) { o.NoAC = false }),
	wordSets("ac", "noac", func(o *Options) { o.NoAC = true }),
	wordSets("cto", "cto", func(o *Options) { o.NoCTO = false }),
	wordSets("cto", "nocto", func(o *Options) { o.NoCTO = true }),
	wordSets("writeback", "writeback", func(o *Options) { o.Writeback = true }),
	wordSets("writeback", "nowriteback", func(o *Options) { o.Writeback = false }),
	wordSets("acl", "acl", func(o *Options) { o.NoACL = false }),
	wordSets("acl", "noacl", func(o *Options) { o.NoACL = true }),
	{names: []string{"lookupcache"}, group: "lookupcache", want: "must be all, none, pos or positive",
		set: func(o *Options, _, v string) bool {
			switch v {
			case "positive":
				v = "pos"
			case "all", "none", "pos":
			default:
				return false
			}
			o.LookupCache = v
			return true
		}},
	number("dirty_expire", 0, maxDirtyExpire, " (seconds; 0 turns it off)",
		func(o *Options, n int) { o.DirtyExpire = time.Duration(n) * time.Second }, "dirty_expire"),
	number("dirty_bytes", minDirtyBytes, maxDirtyBytes, " (bytes)", func(o *Options, n int) { o.DirtyBytes = n },
		"dirty_bytes"),
	wordSets("names", "sharednames", func(o *Options) { o.SharedNames = true }),
	wordSets("names", "nosharednames", func(o *Options) { o.SharedNames = false }),
	number("nconnect", 1, 16, "", func(o *Options, n int) { o.NConnect = n }, "nconnect"),
	{names: []string{"remoteports"}, group: "remoteports",
		want: "must be addresses and ranges FIRST-LAST of one server, separated by \"~\"",
		set: func(o *Options, _, v string) (ok bool) {
			var err error
			o.RemotePorts, err = parseAddrList(v)
			return err == nil
		},
		explain: func(v string) string {
			_, err := parseAddrList(v)
			return err.Error()
		}},
	oneOf("sec", []string{"sys"}, " (Kerberos is not supported)", ignore, "sec"),
	wordSets("lock", "lock", func(o *Options) { o.LocalLock = lockNone }),
	wordSets("lock", "nolock", func(o *Options) { o.LocalLock = lockAll }),
	oneOf("local_lock", []string{lockAll, lockFlock, lockPosix, lockNone}, "",
		func(o *Options, v string) { o.LocalLock = v }, "local_lock"),
	wordSets("access", "ro", func(o *Options) { o.ReadOnly = true }),
	wordSets("access", "rw", func(o *Options) { o.ReadOnly = false }),
	word("", "intr", "nointr"),   // no effect, as in nfs(5)
	word("", "rdma", "rdirplus"), // always on
	oneOf("mountvers", []string{"3"}, " (the MOUNT protocol of NFS version 3)", ignore, "mountvers"),
	oneOf("provider", []string{providerAuto, providerSoftiwarp, providerRdmacore}, "",
		func(o *Options, v string) { o.Provider = v }, "provider"),
	{names: []string{"device"}, group: "device", want: "must name an RDMA device",
		set: func(o *Options, _, v string) bool { o.Device = v; return v != "" }},
	number("slots", xprt.MinSlots, xprt.MaxSlots, "", func(o *Options, n int) { o.Slots = n }, "slots"),
	{names: []string{"inline"}, group: "inline", lo: xprt.MinInlineBytes, hi: xprt.MaxInlineBytes,
		want: fmt.Sprintf("must be a multiple of %d from %d to %d (bytes)", inlineUnit, xprt.MinInlineBytes,
			xprt.MaxInlineBytes),
		set: func(o *Options, _, v string) bool {
			n, err := strconv.Atoi(v)
			o.InlineBytes = n
			return err == nil && n >= xprt.MinInlineBytes && n <= xprt.MaxInlineBytes && n%inlineUnit == 0
		}},
	wordSets("resvport", "resvport", func(o *Options) { o.NoResvPort = false }),
	wordSets("resvport", "noresvport", func(o *Options) { o.NoResvPort = true }),
	oneOf("mpacrc", []string{"off", "on"}, "", func(o *Options, v string) { o.MPACRC = v == "on" }, "mpacrc"),
	wordSets("writepad", "writepad", func(o *Options) { o.WritePad = true }),
	number("trace", 0, maxTraceEvents, " (events; 0 turns it off)", func(o *Options, n int) { o.TraceEvents = n },
		"trace"),
	number("keepalive", 0, maxKeepAlive, " (seconds; 0 turns it off)",
		func(o *Options, n int) { o.KeepAlive = time.Duration(n) * time.Second }, "keepalive"),
	number("idle", 0, maxIdle, " (seconds; 0 keeps connections)",
		func(o *Options, n int) { o.Idle = time.Duration(n) * time.Second }, "idle"),
	number("stall", 0, maxStall, " (seconds; 0 for never)",
		func(o *Options, n int) { o.Stall = time.Duration(n) * time.Second }, "stall"),
	number("stallabort", 0, maxStall, " (seconds; 0 for never)",
		func(o *Options, n int) { o.StallAbort = time.Duration(n) * time.Second }, "stallabort"),
	// Options that mount(8) passes to every helper; no effect.
	word("", "defaults", "auto", "noauto", "nofail", "_netdev", "async", "fg"),
	// The kernel's default for access times is relatime, also with norelatime.
	word("", "norelatime"),
	{names: []string{"relatime", "atime", "nostrictatime"}, group: "atime", word: true,
		set: func(o *Options, _, _ string) bool { o.setKernel("", "noatime", "strictatime"); return true }},
	wordSets("atime", "noatime", func(o *Options) { o.setKernel("noatime", "noatime", "strictatime") }),
	wordSets("atime", "strictatime", func(o *Options) { o.setKernel("strictatime", "noatime", "strictatime") }),
},
	kernelFlag("nosuid", "suid", "allow_suid"), kernelFlag("nodev", "dev", "allow_dev"), kernelFlag("noexec", "exec"),
	kernelFlag("nodiratime", "diratime"))

var optionByName = func() map[string]*option {
	m := make(map[string]*option)
	for i := range optionTable {
		for _, n := range optionTable[i].names {
			m[n] = &optionTable[i]
		}
	}
	return m
}()

// unsupported are options of nfs(5) that this client does not support, with the reason or an
// alternative.
var unsupported = map[string]string{
	"bg":         "not supported; use nofail in fstab(5)",
	"fsc":        "not supported; there is no cache on a local disk",
	"nordirplus": "not supported; directories are read with READDIRPLUS",
	"remount":    "not supported; unmount it, then mount it again with the new options",
	"tcp":        "not supported; for TCP use mount -t nfs",
	"udp":        "not supported; for UDP use mount -t nfs",
}

// OptionNames returns the names of all mount options, sorted.
func OptionNames() []string { return slices.Sorted(maps.Keys(optionByName)) }

// ParseOptions parses a comma-separated option list. The options of the list override those of
// base. An option may be repeated only with the same value. Errors are of type *OptionError.
func ParseOptions(base Options, list string) (Options, error) {
	o := base
	o.Kernel = slices.Clone(base.Kernel)
	given := make(map[string]string) // option by group
	for item := range strings.SplitSeq(list, ",") {
		if item == "" || isUserSpaceOption(item) {
			continue
		}
		name, value, hasValue := strings.Cut(item, "=")
		opt := optionByName[name]
		switch {
		case opt == nil:
			return base, &OptionError{name, value,
				cmp.Or(unsupported[name], "unknown; see nfsrdmad mount --help")}
		case opt.word && hasValue:
			return base, &OptionError{name, value, "takes no value"}
		case !opt.word && value == "":
			return base, &OptionError{name, "", "needs a value: " + opt.want}
		case !opt.set(&o, name, value):
			return base, &OptionError{name, value, opt.reason(value)}
		}
		if opt.group == "" {
			continue
		}
		canonical := opt.names[0]
		if !opt.word {
			canonical += "=" + value
		}
		if before, twice := given[opt.group]; twice && before != canonical {
			return base, &OptionError{name, value, fmt.Sprintf("contradicts %q; give one of them", before)}
		}
		given[opt.group] = canonical
	}
	return o, o.check(given)
}

// KnownOptions returns list without unknown options.
func KnownOptions(list string) string {
	var known []string
	for item := range strings.SplitSeq(list, ",") {
		name, _, _ := strings.Cut(item, "=")
		if optionByName[name] != nil {
			known = append(known, item)
		}
	}
	return strings.Join(known, ",")
}

// isUserSpaceOption reports whether mount(8) or fstab(5) reserves the option for other programs.
// mount(8) itself evaluates "user" and adds the options that "user" implies.
func isUserSpaceOption(item string) bool {
	switch name, _, _ := strings.Cut(item, "="); name {
	case "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup":
		return true
	}
	return strings.HasPrefix(item, "x-") || strings.HasPrefix(item, "X-") || strings.HasPrefix(item, "comment=")
}

// check finds contradictions between options of different groups. given are the options of one list
// by group.
func (o *Options) check(given map[string]string) error {
	if err := checkAttrTimes(given); err != nil {
		return err
	}
	if local, ok := strings.CutPrefix(given["local_lock"], "local_lock="); ok {
		if given["lock"] == "nolock" && local != lockAll {
			return &OptionError{"local_lock", local, "contradicts \"nolock\"; give one of them"}
		}
		o.LocalLock = local // also if lock or nolock comes later in the list
	}
	// The client sends MOUNT over TCP. A TCP connection to the RDMA port would stop the RDMA
	// listener of a stock Linux server.
	if o.MountPort == o.Port {
		return &OptionError{"mountport", strconv.Itoa(int(o.MountPort)),
			fmt.Sprintf("contradicts port=%d, the RDMA port; set the TCP port of MOUNT, or remove the option", o.Port)}
	}
	if o.LockPort == o.Port {
		return &OptionError{"nlmport", strconv.Itoa(int(o.LockPort)),
			fmt.Sprintf("contradicts port=%d, the RDMA port; set the TCP port of NLM, or remove the option", o.Port)}
	}
	if o.StallAbort != 0 && (o.Stall == 0 || o.StallAbort < o.Stall) {
		return &OptionError{"stallabort", seconds(o.StallAbort),
			fmt.Sprintf("contradicts stall=%s: must be 0, or not less than stall, which must not be 0",
				seconds(o.Stall))}
	}
	if o.Writeback && o.NoAC {
		return &OptionError{"writeback", "", "contradicts \"noac\"; give one of them"}
	}
	if o.Device != "" && o.Provider == providerSoftiwarp {
		return &OptionError{"device", o.Device, "contradicts provider=softiwarp, which uses no device"}
	}
	if o.AcRegMin > o.AcRegMax {
		return &OptionError{"acregmin", seconds(o.AcRegMin),
			fmt.Sprintf("contradicts acregmax=%s: must be from 0 to %[1]s (seconds)", seconds(o.AcRegMax))}
	}
	if o.AcDirMin > o.AcDirMax {
		return &OptionError{"acdirmin", seconds(o.AcDirMin),
			fmt.Sprintf("contradicts acdirmax=%s: must be from 0 to %[1]s (seconds)", seconds(o.AcDirMax))}
	}
	return nil
}

// NeedsCard reports whether the options select the provider rdma-core.
func (o *Options) NeedsCard() bool { return o.Provider == providerRdmacore || o.Device != "" }

// LocksAreLocal reports whether the kernel of this host keeps all locks.
func (o *Options) LocksAreLocal() bool { return o.LocalLock == lockAll }

// checkPrivilege returns an error if this daemon must not make such a mount: set-user-ID programs
// and device files give the privileges of root, so only a daemon of root allows them.
func (o *Options) checkPrivilege() error {
	if os.Geteuid() == 0 || slices.Contains(o.Kernel, "nosuid") && slices.Contains(o.Kernel, "nodev") {
		return nil
	}
	return control.Errorf(control.CodePermission,
		"mount options suid, allow_suid, dev and allow_dev: the daemon does not run as root; remove the options")
}

// checkAttrTimes finds contradictions between the attribute cache times, actimeo and noac.
func checkAttrTimes(given map[string]string) error {
	contradiction := func(option, other string) error {
		name, value, _ := strings.Cut(option, "=")
		return &OptionError{name, value, fmt.Sprintf("contradicts %q; give one of them", other)}
	}
	actimeo, noAC := given["actimeo"], given["ac"] == "noac"
	for _, group := range []string{"acregmin", "acregmax", "acdirmin", "acdirmax"} {
		switch option, ok := given[group]; {
		case !ok:
		case actimeo != "":
			return contradiction(option, actimeo)
		case noAC:
			return contradiction(option, "noac")
		}
	}
	if actimeo != "" && noAC {
		return contradiction(actimeo, "noac")
	}
	return nil
}

func seconds(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) }

// String returns o as an option list that ParseOptions parses to o.
func (o Options) String() string {
	l := []string{"rw"}
	if o.ReadOnly {
		l[0] = "ro"
	}
	add := func(name string, v any) { l = append(l, fmt.Sprintf("%s=%v", name, v)) }
	add("vers", 3)
	add("proto", "rdma")
	add("port", o.Port)
	if o.MountPort != 0 {
		add("mountport", o.MountPort)
	}
	if o.RSize != 0 {
		add("rsize", o.RSize)
	}
	if o.WSize != 0 {
		add("wsize", o.WSize)
	}
	l = append(l, string(o.Recovery))
	add("timeo", int(o.Timeout*10/time.Second))
	add("retrans", o.Retrans)
	if o.NoAC {
		l = append(l, "noac")
	} else {
		add("acregmin", seconds(o.AcRegMin))
		add("acregmax", seconds(o.AcRegMax))
		add("acdirmin", seconds(o.AcDirMin))
		add("acdirmax", seconds(o.AcDirMax))
	}
	if o.NoCTO {
		l = append(l, "nocto")
	}
	if o.Writeback {
		l = append(l, "writeback")
	}
	if o.NoACL {
		l = append(l, "noacl")
	}
	add("lookupcache", o.LookupCache)
	add("dirty_expire", seconds(o.DirtyExpire))
	add("dirty_bytes", o.DirtyBytes)
	if o.SharedNames {
		l = append(l, "sharednames")
	}
	add("nconnect", o.NConnect)
	if len(o.RemotePorts) > 0 {
		add("remoteports", o.RemotePorts)
	}
	add("sec", "sys")
	add("local_lock", o.LocalLock)
	if o.LockPort != 0 {
		add("nlmport", o.LockPort)
	}
	if o.NoResvPort {
		l = append(l, "noresvport")
	}
	add("provider", o.Provider)
	if o.Device != "" {
		add("device", o.Device)
	}
	add("slots", o.Slots)
	add("inline", o.InlineBytes)
	if o.MPACRC {
		add("mpacrc", "on")
	} else {
		add("mpacrc", "off")
	}
	if o.WritePad {
		l = append(l, "writepad")
	}
	add("trace", o.TraceEvents)
	add("keepalive", seconds(o.KeepAlive))
	add("idle", seconds(o.Idle))
	add("stall", seconds(o.Stall))
	add("stallabort", seconds(o.StallAbort))
	for _, privilege := range []string{"suid", "dev"} {
		if !slices.Contains(o.Kernel, "no"+privilege) {
			l = append(l, privilege)
		}
	}
	return strings.Join(append(l, o.Kernel...), ",")
}
