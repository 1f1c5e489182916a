package differential

import (
	"math/rand/v2"
	"slices"

	"golang.org/x/sys/unix"
)

// There are few names, so that operations often use the same ones. Most operations use a name
// either for a file or for a directory, so that paths are often valid.
var (
	files = []string{"a", "b", "c", "d/a", "d/b", "d/c", "e/a", "e/b", "e/d/a", "~255", "d/~255", "%ff%01",
		"d/%20%0a"}
	dirs         = []string{"d", "e", "e/d", "d", "e", "e/d", "f", "d/f"}
	dotPaths     = []string{"d/..", "e/.", "d/../a", "e/d/../b"}
	unusualPaths = []string{"~256", "d/~256", "missing/a", ".", "..", "a/", "d/", "f/", "b/.", "/", "a/b/c/d",
		"@4094/a",
		"@4095/d/b",
		"@4096/a", "d/...", "d//a", "d/%ff/../a"}
	targets = []string{"a", "b", "d", "e/a", "../a", "d/a", ".", "missing", "c", "~255", "~1024", "@4095/a", "~4096",
		"%ff", "d/", "b"}
	modes = []int{0o644, 0o600, 0o666, 0o755, 0o777, 0o777, 0o700, 0o400, 0o222, 0, 0o4755, 0o2755, 0o1777, 0o2775,
		0o6777}
	sizes = []int{0, 1, 100, 4095, 4096, 4097, 10000, 65536, 70001, 1 << 20, 1<<20 + 1}
)

// A Stream describes streams of random operations.
type Stream struct {
	// Processes and Users are the numbers of processes and users that take part. 0 is one process,
	// and all users.
	Processes, Users int
	// Expressible limits a stream to what NFSv3 can express: no verbs, flags and times that the
	// protocol lacks.
	Expressible bool
	// Without are the verbs that do not occur.
	Without []string
	// Sessions limits a stream to what close-to-open consistency promises: before a process opens
	// files, all other processes have closed theirs, and names do not change.
	Sessions bool
}

// A generator generates a stream of operations from a seed.
type generator struct {
	Stream
	r          *rand.Rand
	lastOpened string // the last opened file
	link       string // the last created symbolic link
}

func newGenerator(seed uint64) *generator { return &generator{r: rand.New(rand.NewPCG(seed, 0))} }

func pick[T any](g *generator, list []T) T { return list[g.r.IntN(len(list))] }

func (g *generator) chance(percent int) bool { return g.r.IntN(100) < percent }

func (g *generator) path() string {
	switch at := g.r.IntN(100); {
	case at < 3:
		return pick(g, unusualPaths)
	case at < 8:
		return pick(g, dotPaths)
	case at < 30:
		return pick(g, dirs)
	}
	return pick(g, files)
}

// pathFrom returns a path from list in most cases.
func (g *generator) pathFrom(list []string) string {
	if g.chance(12) {
		return g.path()
	}
	return pick(g, list)
}

// offset returns an offset near typical file sizes, pages and requests.
func (g *generator) offset() int {
	if g.chance(3) {
		// Clients and file systems differ near the size of the largest file.
		if off := pick(g, far); !g.Expressible || off <= 1<<40 || off > 1<<50 {
			return off
		}
	}
	return max(0, pick(g, sizes)+g.r.IntN(3)-1)
}

// far are offsets near the limits of 32 bits, of a server's file system and of a client's
// integers.
var far = []int{1<<31 - 1, 1<<32 - 1, 1 << 32, 1 << 40, 1<<44 - 4097, 1<<44 - 4096, 1 << 44, 1 << 50, 1 << 62,
	1<<63 - 4096, 1<<63 - 1}

func (g *generator) openFlags() int {
	flags := pick(g, []int{unix.O_RDONLY, unix.O_WRONLY, unix.O_RDWR, unix.O_RDWR, unix.O_RDWR})
	for _, f := range []struct{ bit, percent int }{
		{unix.O_CREAT, 75},
		{unix.O_EXCL, 6},
		{unix.O_TRUNC, 15},
		{unix.O_APPEND, 15},
		{unix.O_DIRECT, 8},
		{unix.O_SYNC, 5},
		{unix.O_DIRECTORY, 2},
		{unix.O_NOFOLLOW, 5},
		{unix.O_NOATIME, 2},
		{unix.O_PATH, 1},
	} {
		if g.chance(f.percent) && !(g.Expressible && f.bit == unix.O_PATH) {
			flags |= f.bit
		}
	}
	return flags
}

// time returns a code of timeOf.
func (g *generator) time() int {
	for {
		code := g.r.IntN(14)
		if at := timeOf(code).Sec; !g.Expressible || at >= 0 && at < 1<<32 {
			return code
		}
	}
}

// inexpressible are the verbs for which NFSv3 has no procedure.
var inexpressible = []string{"fallocate", "setxattr", "getxattr", "listxattr", "removexattr", "tmpfile"}

// A kind is a verb with its weight in a stream and a function that sets its fields.
type kind struct {
	do     string
	weight int
	fill   func(g *generator, o *Op)
}

// noFields is for verbs without further fields.
func noFields(*generator, *Op) {}

func data(g *generator, o *Op) {
	o.n, o.seed = pick(g, sizes), 1+g.r.IntN(250)
	if g.chance(50) {
		o.n = g.r.IntN(5000)
	}
}

func dataAt(g *generator, o *Op) {
	data(g, o)
	o.off = g.offset()
}

var kinds = []kind{
	{"open", 260, func(g *generator, o *Op) { o.flags, o.mode = g.openFlags(), pick(g, modes) }},
	{"close", 40, noFields},
	{"read", 50, func(g *generator, o *Op) { o.n = pick(g, sizes) }},
	{"pread", 50, func(g *generator, o *Op) { o.n, o.off = pick(g, sizes), g.offset() }},
	{"write", 60, data},
	{"pwrite", 60, dataAt},
	{"append", 15, data},
	{"mmap", 30, func(g *generator, o *Op) { o.n, o.flags = pick(g, []int{4096, 8192, 65536, 1 << 20}), g.r.IntN(2) }},
	{"mread", 25, dataAt},
	{"mwrite", 25, dataAt},
	{"munmap", 6, noFields},
	{"fadvise", 8, noFields},
	{"dropcaches", 1, noFields},
	{"lseek", 30, func(g *generator, o *Op) {
		o.flags, o.off = g.r.IntN(5), g.offset()-g.r.IntN(2)*5000
		if g.Expressible {
			o.flags, o.off = o.flags%unix.SEEK_DATA, min(o.off, 1<<40)
		}
	}},
	{"ftruncate", 20, func(g *generator, o *Op) { o.n = g.offset() }},
	{"truncate", 20, func(g *generator, o *Op) { o.n = g.offset() }},
	{"fallocate", 12, func(g *generator, o *Op) { o.flags, o.off, o.n = g.r.IntN(4), g.offset(), pick(g, sizes) }},
	{"fsync", 15, noFields},
	{"fdatasync", 5, noFields},
	{"futimens", 10, func(g *generator, o *Op) { o.atime, o.mtime = g.time(), g.time() }},
	{"fchown", 6, func(g *generator, o *Op) { o.uid, o.gid = g.ids() }},
	{"sendfile", 10, func(g *generator, o *Op) { o.off, o.n = g.r.IntN(6), pick(g, sizes) }},
	{"fchmod", 8, func(g *generator, o *Op) { o.mode = pick(g, modes) }},
	{"copyrange", 12, func(g *generator, o *Op) { o.off, o.n = g.r.IntN(6), pick(g, sizes) }},
	{"dup", 8, func(g *generator, o *Op) { o.off = g.r.IntN(slots) }},
	{"plock", 8, func(g *generator, o *Op) { o.flags, o.off, o.n = g.r.IntN(3), g.offset(), pick(g, sizes) }},
	{"getlk", 4, func(g *generator, o *Op) { o.flags, o.off, o.n = g.r.IntN(2), g.offset(), pick(g, sizes) }},
	{"flock", 5, func(g *generator, o *Op) {
		o.flags = pick(g, []int{unix.LOCK_SH, unix.LOCK_EX, unix.LOCK_UN}) | unix.LOCK_NB
	}},
	{"lock", 5, func(g *generator, o *Op) { o.flags, o.off, o.n = g.r.IntN(3), g.offset(), pick(g, sizes) }},
	{"mkdir", 70, func(g *generator, o *Op) { o.mode = pick(g, modes) }},
	{"rmdir", 15, noFields},
	{"unlink", 45, noFields},
	{"rename", 70, func(g *generator, o *Op) {
		if !g.Expressible && g.chance(10) {
			o.flags = 1 + g.r.IntN(3) // RENAME_NOREPLACE, RENAME_EXCHANGE
		}
	}},
	{"link", 40, noFields},
	{"symlink", 20, func(g *generator, o *Op) { o.to = pick(g, targets) }},
	{"readlink", 20, noFields},
	{"chmod", 40, func(g *generator, o *Op) { o.mode = pick(g, modes) }},
	{"chown", 20, func(g *generator, o *Op) { o.uid, o.gid = g.ids() }},
	{"lchown", 10, func(g *generator, o *Op) { o.uid, o.gid = g.ids() }},
	{"utimens", 40, func(g *generator, o *Op) { o.atime, o.mtime, o.flags = g.time(), g.time(), g.r.IntN(4)/3 }},
	{"stat", 20, noFields},
	{"access", 20, func(g *generator, o *Op) { o.flags = g.r.IntN(8) }},
	{"readdir", 40, noFields},
	{"fill", 3, func(g *generator, o *Op) { o.n = pick(g, []int{1, 3, 30, 30, 150}) }},
	{"sweep", 5, noFields},
	{"seekdir", 8, func(g *generator, o *Op) { o.off = pick(g, []int{0, 1, 3, 20, 100}) }},
	{"mknod", 15, func(g *generator, o *Op) {
		o.mode = pick(g, modes)&0o777 | pick(g, []int{unix.S_IFIFO, unix.S_IFREG, unix.S_IFSOCK, unix.S_IFCHR,
			unix.S_IFBLK, 0})
	}},
	{"setxattr", 4, noFields},
	{"getxattr", 4, noFields},
	{"listxattr", 4, noFields},
	{"removexattr", 3, noFields},
	{"statfs", 4, noFields},
	{"same", 10, noFields},
	{"tmpfile", 3, noFields},
}

// ids returns the arguments of a chown(2).
func (g *generator) ids() (uid, gid int) {
	for {
		uid, gid = pick(g, ids), pick(g, ids)
		if !g.Expressible || uid >= 0 || gid >= 0 {
			return uid, gid
		}
	}
}

var ids = []int{-1, 0, 1000, 1001, lastGroup}

var totalWeight = func() (sum int) {
	for _, k := range kinds {
		sum += k.weight
	}
	return sum
}()

// kind chooses a kind.
func (g *generator) kind() (k kind) {
	for {
		at := g.r.IntN(totalWeight)
		for _, k = range kinds {
			if at -= k.weight; at < 0 {
				break
			}
		}
		if !slices.Contains(g.Without, k.do) && !(g.Expressible && slices.Contains(inexpressible, k.do)) {
			return k
		}
	}
}

// next returns the next operation of the stream.
func (g *generator) next() Op {
	k := g.kind()
	o := Op{do: k.do, fd: g.r.IntN(slots), quiet: g.chance(35)}
	if g.Processes > 1 {
		o.by, o.fd = g.r.IntN(g.Processes), o.fd%2 // fewer slots, so that more of them are open
	}
	uses := verbs[k.do].uses
	if uses&usesPath != 0 {
		o.path = g.path()
	}
	if uses&usesTo != 0 {
		o.to = g.path()
	}
	if uses&usesFD == 0 {
		o.fd = 0
	}
	if g.chance(25) && g.Users > 1 {
		o.as = 1 + g.r.IntN(g.Users-1)
	}
	switch k.do {
	case "readlink", "stat", "utimens":
		if g.chance(30) && g.link != "" {
			o.path = g.link
		}
	case "mkdir", "rmdir", "readdir", "tmpfile", "fill", "sweep", "seekdir":
		o.path = g.pathFrom(dirs)
	case "open", "truncate", "mknod", "symlink", "unlink", "link":
		o.path = g.pathFrom(files)
		if k.do == "link" {
			o.to = g.pathFrom(files)
		}
		if k.do != "symlink" && k.do != "mknod" && g.chance(25) && g.lastOpened != "" {
			o.path = g.lastOpened
		}
		switch k.do {
		case "open":
			g.lastOpened = o.path
		case "symlink":
			g.link = o.path
		}
	case "rename":
		list := files
		if g.chance(30) {
			list = dirs
		}
		o.path, o.to = g.pathFrom(list), g.pathFrom(list)
	}
	k.fill(g, &o)
	if o.do == "truncate" || o.do == "ftruncate" {
		o.quiet = false // a known difference of times must not appear later
	}
	return o
}

// firstOps create directories that every user may write to.
var firstOps = []Op{{do: "mkdir", path: "d"}, {do: "chmod", path: "d", mode: 0o777}, {do: "mkdir", path: "e"},
	{do: "chmod", path: "e", mode: 0o1777}}

// Generate returns the stream of a seed, for one process.
func Generate(seed uint64, n int) []Op { return Stream{}.Generate(seed, n) }

// Generate returns the stream of a seed.
func (s Stream) Generate(seed uint64, n int) []Op {
	g := newGenerator(seed)
	g.Stream = s
	if g.Users == 0 {
		g.Users = len(users)
	}
	if s.Sessions {
		return g.sessions(n)
	}
	ops := make([]Op, n)
	for i := range ops {
		ops[i] = g.next()
		if i < len(firstOps) {
			ops[i] = firstOps[i]
		}
	}
	return ops
}

// sessionFiles exist from the start of a stream of sessions.
var sessionFiles = []string{"a", "b", "c"}

// sessions returns a stream in which one process at a time opens files, uses and closes them.
func (g *generator) sessions(n int) (ops []Op) {
	for _, f := range sessionFiles {
		ops = append(ops, Op{do: "open", path: f, flags: unix.O_CREAT | unix.O_RDWR, mode: 0o666},
			Op{do: "fchmod", mode: 0o666}, Op{do: "close"})
	}
	for len(ops) < n {
		by, open := g.r.IntN(g.Processes), 1+g.r.IntN(2)
		for fd := range open {
			o := Op{do: "open", by: by, fd: fd, path: pick(g, sessionFiles), as: g.r.IntN(g.Users),
				flags: g.openFlags() &^ (unix.O_EXCL | unix.O_DIRECTORY | unix.O_PATH), mode: 0o666}
			ops = append(ops, o)
		}
		for range 2 + g.r.IntN(12) {
			o := g.next()
			for verbs[o.do].uses != usesFD || o.do == "close" || o.do == "fchmod" || o.do == "fchown" || o.do == "dup" {
				o = g.next()
			}
			o.by, o.fd, o.off = by, o.fd%open, min(o.off, 1<<20)
			ops = append(ops, o)
		}
		for fd := range open {
			ops = append(ops, Op{do: "munmap", by: by, fd: fd, quiet: true}, Op{do: "close", by: by, fd: fd})
		}
	}
	return ops
}
