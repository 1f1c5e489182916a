package mount

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// Recovery is what becomes of a call that the server does not answer, as nfs(5) defines it.
type Recovery string

// Recoveries: wait for ever, fail with EIO, fail with ETIMEDOUT.
const (
	RecoveryHard    Recovery = "hard"
	RecoverySoft    Recovery = "soft"
	RecoverySoftErr Recovery = "softerr"
)

// Options are the mount options of "-o", with nfs(5)'s names, meanings and defaults, and this
// project's own.
type Options struct {
	Port             uint16 // the server's RDMA port
	MountPort        uint16 // the server's MOUNT port; 0 asks its port mapper
	RSize, WSize     int    // octets; 0 takes the largest that the server and the transport allow
	Timeout          time.Duration
	Retrans          int
	Recovery         Recovery
	AcRegMin         time.Duration
	AcRegMax         time.Duration
	AcDirMin         time.Duration
	AcDirMax         time.Duration
	NoAC             bool
	LookupCache      string // all, pos or none
	NConnect         int
	ReadOnly         bool
	Provider, Device string
	Slots            int // calls in flight on one connection
	InlineBytes      int // inline threshold, octets
	MPACRC           bool
	WritePad         bool
	TraceEvents      int // kept for each connection; 0 for none
	// silence after which the server is asked for a sign of life; 0 never
	KeepAlive time.Duration
	Idle      time.Duration // for which a connection is kept without a call; 0 for ever
	// Kernel are the mount flags for the kernel: nosuid, nodev, noexec, noatime, nodiratime.
	Kernel []string
}

// DefaultOptions returns what holds where nothing is said: nfs(5)'s defaults for RDMA.
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
		NConnect:    1,
		Provider:    providerAuto,
		Slots:       64,   // what Linux servers grant
		InlineBytes: 4096, // RFC 8797 §4, and Linux's default
		TraceEvents: xprt.DefaultTraceEvents,
		KeepAlive:   xprt.DefaultKeepAlive,
		Idle:        xprt.DefaultIdleTimeout,
	}
}

// An OptionError refuses one mount option.
type OptionError struct {
	Option string // as the user wrote its name
	Value  string // "" if none was given
	Want   string // what is allowed, as a phrase
}

func (e *OptionError) Error() string {
	opt := e.Option
	if e.Value != "" {
		opt += "=" + e.Value
	}
	return fmt.Sprintf("mount option %q: %s", control.Brief(opt), e.Want)
}

// ErrorCode makes it a usage error.
func (e *OptionError) ErrorCode() control.Code { return control.CodeUsage }

// An option is one row of the option table: either a word (set is called with "") or name=value
// with a value checked by parse.
type option struct {
	names []string
	// group names what the option decides; two options of one group with different values
	// contradict each other.
	group string
	// word options take no value.
	word bool
	want string
	set  func(o *Options, name, value string) bool
}

const (
	// Payloads from a page to nfs(5)'s 1 MiB, rounded down to a multiple of nfs(5)'s 1 KiB.
	minPayload, maxPayload = 4096, 1 << 20
	payloadUnit            = 1024
	// RFC 8797 §4 can express thresholds of 1 KiB to 256 KiB; a call's buffers exist once for each
	// slot, hence less.
	minInline, maxInline = 1024, 65536
	minSlots, maxSlots   = 4, 1024 // fewer are not worth a connection
	maxAttrSeconds       = 1 << 22 // a limit far above use, far below overflow
	maxTraceEvents       = 1 << 20 // 56 MiB for each connection
	maxKeepAlive         = 3600    // seconds: a dead server should be noticed within the hour
	maxIdle              = 1 << 22 // seconds
)

func word(group string, names ...string) option {
	return option{names: names, group: group, word: true, set: func(*Options, string, string) bool { return true }}
}

func wordSets(group, name string, set func(*Options)) option {
	return option{names: []string{name}, group: group, word: true,
		set: func(o *Options, _, _ string) bool { set(o); return true }}
}

func number(group string, lo, hi int, unit string, set func(*Options, int), names ...string) option {
	return option{names: names, group: group, want: fmt.Sprintf("must be a number from %d to %d%s", lo, hi, unit),
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

// attrTimeout and actimeo end a noac of the base; one of the same list contradicts them (see
// check).
func attrTimeout(name string, field func(*Options) *time.Duration) option {
	return number(name, 0, maxAttrSeconds, " (seconds)", func(o *Options, n int) {
		*field(o), o.NoAC = time.Duration(n)*time.Second, false
	}, name)
}

func kernelFlag(flag, opposite string) []option {
	without := func(o *Options) {
		o.Kernel = slices.DeleteFunc(o.Kernel, func(f string) bool { return f == flag })
	}
	return []option{
		wordSets(opposite, flag, func(o *Options) { without(o); o.Kernel = append(o.Kernel, flag) }),
		wordSets(opposite, opposite, without),
	}
}

var optionTable = slices.Concat([]option{
	oneOf("vers", []string{"3"}, " (this client speaks NFS version 3)", ignore, "vers", "nfsvers"),
	oneOf("proto", []string{"rdma"}, " (for TCP use mount -t nfs)", ignore, "proto"),
	number("port", 1, 65535, "", func(o *Options, n int) { o.Port = uint16(n) }, "port"),
	number("mountport", 1, 65535, "", func(o *Options, n int) { o.MountPort = uint16(n) }, "mountport"),
	oneOf("mountproto", []string{"tcp"}, " (MOUNT over UDP is not spoken)", ignore, "mountproto"),
	number("rsize", minPayload, maxPayload, " (octets)", func(o *Options, n int) { o.RSize = n &^ (payloadUnit - 1) },
		"rsize"),
	number("wsize", minPayload, maxPayload, " (octets)", func(o *Options, n int) { o.WSize = n &^ (payloadUnit - 1) },
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
	number("nconnect", 1, 16, "", func(o *Options, n int) { o.NConnect = n }, "nconnect"),
	oneOf("sec", []string{"sys"}, " (Kerberos is not spoken)", ignore, "sec"),
	word("nolock", "nolock"),
	oneOf("local_lock", []string{"all"}, " (locks are always local: the lock manager protocol is not spoken)", ignore,
		"local_lock"),
	wordSets("access", "ro", func(o *Options) { o.ReadOnly = true }),
	wordSets("access", "rw", func(o *Options) { o.ReadOnly = false }),
	word("", "intr", "nointr"), // accepted and without effect, as in nfs(5)
	// as it is here anyhow: nfs(5)'s short form of proto=rdma, close-to-open, READDIRPLUS
	word("", "rdma", "cto", "rdirplus"),
	oneOf("mountvers", []string{"3"}, " (the MOUNT protocol of NFS version 3)", ignore, "mountvers"),
	oneOf("provider", []string{providerAuto, providerSoftiwarp, providerRdmacore}, "",
		func(o *Options, v string) { o.Provider = v }, "provider"),
	{names: []string{"device"}, group: "device", want: "must name an RDMA device",
		set: func(o *Options, _, v string) bool { o.Device = v; return v != "" }},
	number("slots", minSlots, maxSlots, "", func(o *Options, n int) { o.Slots = n }, "slots"),
	{names: []string{"inline"}, group: "inline",
		want: fmt.Sprintf("must be a multiple of 1024 from %d to %d (octets)", minInline,
			maxInline), set: func(o *Options, _, v string) bool {
			n, err := strconv.Atoi(v)
			o.InlineBytes = n
			return err == nil && n >= minInline && n <= maxInline && n%minInline == 0
		}},
	oneOf("mpacrc", []string{"off", "on"}, "", func(o *Options, v string) { o.MPACRC = v == "on" }, "mpacrc"),
	wordSets("writepad", "writepad", func(o *Options) { o.WritePad = true }),
	number("trace", 0, maxTraceEvents, " (events; 0 turns it off)", func(o *Options, n int) { o.TraceEvents = n },
		"trace"),
	number("keepalive", 0, maxKeepAlive, " (seconds; 0 turns it off)",
		func(o *Options, n int) { o.KeepAlive = time.Duration(n) * time.Second }, "keepalive"),
	number("idle", 0, maxIdle, " (seconds; 0 keeps connections)",
		func(o *Options, n int) { o.Idle = time.Duration(n) * time.Second }, "idle"),
	// What mount(8) and fstab(5) say to every helper.
	word("", "defaults", "auto", "noauto", "nofail", "_netdev", "relatime", "norelatime", "strictatime",
		"nostrictatime",
		"async", "fg"), // as it is here anyhow
},
	kernelFlag("nosuid", "suid"), kernelFlag("nodev", "dev"), kernelFlag("noexec", "exec"),
	kernelFlag("noatime", "atime"), kernelFlag("nodiratime", "diratime"))

var optionByName = func() map[string]*option {
	m := make(map[string]*option)
	for i := range optionTable {
		for _, n := range optionTable[i].names {
			m[n] = &optionTable[i]
		}
	}
	return m
}()

// notSpoken are options that people know from elsewhere, with what to do instead.
var notSpoken = map[string]string{
	"bg":         "not spoken: nobody tries again in the background; use nofail in fstab(5)",
	"fsc":        "not spoken: nothing is cached on a local disk",
	"lock":       "not spoken: locks are local to this host (nolock)",
	"nocto":      "not spoken: every open asks the server (cto)",
	"nordirplus": "not spoken: directories are read with READDIRPLUS",
	"remount":    "not spoken: the options of a mount stay as they are; unmount it, then mount it again",
	"tcp":        "not spoken: this client is RDMA's alone; for TCP use mount -t nfs",
	"udp":        "not spoken: this client is RDMA's alone",
}

// OptionNames returns the names of all mount options, sorted.
func OptionNames() []string { return slices.Sorted(maps.Keys(optionByName)) }

// ParseOptions reads one comma separated option list over base. A value given twice within the list
// must be the same both times; what base says may be overridden. Errors are *OptionError and name
// the option.
func ParseOptions(base Options, list string) (Options, error) {
	o := base
	o.Kernel = slices.Clone(base.Kernel)
	given := make(map[string]string) // group -> the option
	for item := range strings.SplitSeq(list, ",") {
		if item == "" || isForOthers(item) {
			continue
		}
		name, value, hasValue := strings.Cut(item, "=")
		opt := optionByName[name]
		switch {
		case opt == nil:
			return base, &OptionError{name, value,
				cmp.Or(notSpoken[name], "unknown; see the options in nfsrdmad mount --help")}
		case opt.word && hasValue:
			return base, &OptionError{name, value, "takes no value"}
		case !opt.word && value == "":
			return base, &OptionError{name, "", "needs a value: " + opt.want}
		case !opt.set(&o, name, value):
			return base, &OptionError{name, value, opt.want}
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

// KnownOptions leaves out the options whose names nobody knows.
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

// isForOthers tells the options that mount(8) and fstab(5) reserve for user space programs. Who may
// mount is mount(8)'s to decide; it adds what "user" implies.
func isForOthers(item string) bool {
	switch name, _, _ := strings.Cut(item, "="); name {
	case "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup":
		return true
	}
	return strings.HasPrefix(item, "x-") || strings.HasPrefix(item, "X-") || strings.HasPrefix(item, "comment=")
}

// check finds options that contradict each other across groups.
func (o *Options) check(given map[string]string) error {
	acs := []string{"acregmin", "acregmax", "acdirmin", "acdirmax"}
	for _, ac := range acs {
		if _, ok := given[ac]; !ok {
			continue
		}
		for _, other := range []string{"actimeo", "noac"} {
			group := strings.TrimPrefix(other, "no")
			if strings.HasPrefix(given[group], other) {
				_, v, _ := strings.Cut(given[ac], "=")
				return &OptionError{ac, v, fmt.Sprintf("contradicts %q; give one of them", given[group])}
			}
		}
	}
	if actimeo, ok := given["actimeo"]; ok && given["ac"] == "noac" {
		_, v, _ := strings.Cut(actimeo, "=")
		return &OptionError{"actimeo", v, "contradicts \"noac\"; give one of them"}
	}
	// MOUNT is spoken on TCP: a connection of TCP's own would harm the RDMA port of a stock Linux
	// server
	if o.MountPort == o.Port {
		return &OptionError{"mountport", strconv.Itoa(int(o.MountPort)),
			fmt.Sprintf("contradicts port=%d, the RDMA port: name the server's MOUNT port (TCP), or leave it to the port mapper", o.Port)}
	}
	if o.Device != "" && o.Provider == providerSoftiwarp {
		return &OptionError{"device", o.Device, "contradicts provider=softiwarp, which needs none"}
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

func seconds(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) }

// String returns o as an option list that ParseOptions reads back to o.
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
	add("lookupcache", o.LookupCache)
	add("nconnect", o.NConnect)
	add("sec", "sys")
	add("local_lock", "all")
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
	return strings.Join(append(l, o.Kernel...), ",")
}
