package differential

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Difference is a value that differs between the two sides.
type Difference struct {
	at              int // index of the operation
	op              Op
	field           string
	reference, ours string
	fields          map[string]string // all values of the reference
}

func (d Difference) String() string {
	return fmt.Sprintf("operation %d: %s: %s: reference %q, ours %q", d.at, d.op, d.field, d.reference, d.ours)
}

// A Side is one of the two file systems that a Pair compares.
type Side struct {
	// Dirs has a directory on each mount of the side. Process i uses Dirs[i%len(Dirs)].
	Dirs []string
	// Server is the same directory as the server sees it, or "" if it is not available.
	Server string
}

// A Pair is the environment of streams. Its methods must not be called concurrently.
type Pair struct {
	Reference, Ours Side
	// Processes execute the operations; Op has the index. Without processes the caller's process
	// executes all operations.
	Processes []Process
	// Ticks waits for a tick of the server's clock after each operation.
	Ticks bool
	// CloseWait is a pause after a file is closed.
	CloseWait time.Duration
	// LikeNFS hides what every NFSv3 client does in another way than the reference. O_DIRECT has
	// no alignment rules, so the reference opens files without it. sendfile(2) to a range of the
	// same file that it reads is skipped, because its result depends on O_DIRECT. lseek(2) from
	// the end of a directory is skipped, because NFS has no such position. A call on an open file
	// has the identity of the process that opened it. Changes by other users than root clear
	// set-id bits, so the user who opened a file with these bits executes the operations on it.
	// Such a change through a mapping also clears the bits on the reference, and is skipped when
	// several users mapped the file. Servers check the permission for every call, so operations on
	// a file are skipped when the user who opened the file could not open it now. A removed open
	// file has a hidden name until it is closed, and then the times of the directory change.
	LikeNFS bool
	// CloseToOpen omits the final look at the tree through the mounts, whose caches may be old.
	CloseToOpen bool
	// OnHang is called when an operation does not return in time.
	OnHang func(o Op)
	// Done is the number of operations in the last run, which may end before its stream does.
	Done int

	runs int
	dir  string // name of the current run's directory
	// released tells that a file without a name was closed in the current run. The client then
	// removes the hidden name, which changes the times of the directory.
	released bool
	// keepGoing continues after a tolerated difference that makes the sides diverge
	keepGoing bool
	kept      map[string]*keptFile // by hidden name
	mappers   mappers
	movedBy   map[uint64]int              // mount that moved a directory, by inode number on the reference
	distort   func(o *Op, fields []Field) // changes our side's values; for tests
}

// HangTime bounds one operation.
const HangTime = 2 * time.Minute

// begin makes a new directory on both sides and tells the processes.
func (p *Pair) begin() error {
	if p.Processes == nil {
		p.Processes = []Process{&local{}}
	}
	p.runs++
	p.released, p.kept, p.movedBy = false, nil, make(map[uint64]int)
	p.mappers = mappers{make(map[[2]int]string), make(map[string]map[string]bool)}
	p.dir = fmt.Sprintf("run%d", p.runs)
	for _, s := range []Side{p.Reference, p.Ours} {
		dir := filepath.Join(s.Dirs[0], p.dir)
		if err := os.Mkdir(dir, 0o777); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o777); err != nil {
			return err
		}
	}
	for i, process := range p.Processes {
		run := Run{CloseWait: p.CloseWait, LikeNFS: p.LikeNFS, Show: p.keepGoing,
			ToEnd: len(p.Ours.Dirs) > 1}
		for side, s := range []Side{p.Reference, p.Ours} {
			run.Roots[side] = filepath.Join(s.Dirs[i%len(s.Dirs)], p.dir)
		}
		if err := process.Begin(&run); err != nil {
			return err
		}
	}
	return nil
}

// closeAll closes all files of a run.
func (p *Pair) closeAll() {
	for i := range p.Processes {
		_, _, _ = p.both(&Op{do: "closeall", by: i, quiet: true})
	}
}

func (p *Pair) end() {
	p.closeAll()
	for _, s := range []Side{p.Reference, p.Ours} {
		os.RemoveAll(filepath.Join(s.Dirs[0], p.dir))
	}
}

// both executes an operation on both sides.
func (p *Pair) both(o *Op) (reference, ours []Field, err error) {
	watchdog := time.AfterFunc(HangTime, func() {
		if p.OnHang != nil {
			p.OnHang(*o)
		}
	})
	defer watchdog.Stop()
	process := p.Processes[o.by%len(p.Processes)]
	if reference, err = process.Do(0, o); err != nil {
		return nil, nil, err
	}
	if ours, err = process.Do(1, o); err != nil {
		return nil, nil, err
	}
	if slices.ContainsFunc(ours, func(f Field) bool { return f.Name == released }) {
		p.released = true
		for _, other := range p.Processes {
			for side := range 2 {
				if _, err := other.Do(side, &Op{do: "forget", quiet: true}); err != nil {
					return nil, nil, err
				}
			}
		}
	}
	return reference, ours, nil
}

// removing are the verbs that can remove a name. NFSv3 keeps a file without a name for the mount
// that removed the name, but not for other mounts.
var removing = map[string]bool{"unlink": true, "rename": true, "rmdir": true, "sweep": true}

// closeOthers closes the files of the processes that use another mount than process by does.
func (p *Pair) closeOthers(by int) error {
	mounts := len(p.Ours.Dirs)
	for i := range p.Processes {
		if i%mounts == by%mounts {
			continue
		}
		if _, _, err := p.both(&Op{do: "closeall", by: i, quiet: true}); err != nil {
			return err
		}
	}
	return nil
}

// Run runs a stream on both sides, each time in a new directory. It returns the first difference
// that is not tolerated, or nil, and the tolerated ones.
func (p *Pair) Run(ops []Op, tolerated func(*Difference) bool) (first *Difference, known []Difference, err error) {
	runtime.LockOSThread() // see Serve
	defer runtime.UnlockOSThread()
	defer p.end()
	if err := p.begin(); err != nil {
		return nil, nil, err
	}
	diverged := false       // after a tolerated difference the later results are meaningless
	movedElsewhere := false // before the current operation
	check := func(i int, o Op, a, b []Field) bool {
		for _, d := range differences(i, o, a, b) {
			if p.LikeNFS && p.released && d.isDirectoryTime() {
				continue
			}
			if d.field == "errno" {
				d.fields[hiddenField] = fmt.Sprint(p.hasHidden(o.path) || p.hasHidden(o.to))
				d.fields[movedField] = fmt.Sprint(movedElsewhere)
			}
			if p.mappers.several(o.by%len(p.Processes), &o) {
				d.fields[mappersField] = "several"
			}
			if dir, ok := strings.CutSuffix(d.field, hidden); ok && o.do == "walk" {
				d.fields[removableField] = fmt.Sprint(p.isRemovable(dir))
			}
			if tolerated(&d) {
				known = append(known, d)
				diverged = diverged || d.diverges()
				continue
			}
			first = &d
			return false
		}
		return true
	}
	p.Done = 0
	for i, o := range ops {
		p.Done++
		process := o.by % len(p.Processes)
		if p.LikeNFS && !p.keepGoing && p.mappers.several(process, &o) {
			continue
		}
		if removing[o.do] {
			if err := p.closeOthers(o.by); err != nil {
				return nil, known, err
			}
		}
		var moved func()
		movedElsewhere, moved = p.beforeRename(&o)
		a, b, err := p.both(&o)
		if err != nil {
			return nil, known, fmt.Errorf("operation %d: %s: %w", i, o, err)
		}
		p.mappers.mapped(process, &o, a)
		if a[0].Value == ok {
			moved()
		}
		if p.distort != nil {
			p.distort(&o, b)
		}
		if err := p.watchKept(o.as); err != nil {
			return nil, known, err
		}
		if !check(i, o, a, b) {
			return first, known, nil
		}
		if diverged && !p.keepGoing {
			return nil, known, nil
		}
		// The difference is tolerated, but close the file that only one side has open.
		if o.do == "open" && (a[0].Value == ok) != (b[0].Value == ok) {
			if _, _, err := p.both(&Op{do: "close", by: o.by, fd: o.fd, quiet: true}); err != nil {
				return nil, known, err
			}
		}
		if p.Ticks {
			NextTick()
		}
	}
	return p.compareTrees(len(ops), check, &first, &known)
}

// mappersField tells in Difference.fields whether several users have mapped the file that an
// operation writes to through a mapping.
const mappersField = "mappers"

// hiddenField tells in Difference.fields whether a directory that the operation uses has hidden
// files on the server of our side.
const hiddenField = "hidden"

func (p *Pair) hasHidden(path string) bool {
	if p.Ours.Server == "" || path == "" {
		return false
	}
	dir := filepath.Join(p.Ours.Server, p.dir)
	found, err := filepath.Glob(dir + "/" + expandPath(path, len(dir)) + "/" + hidden + "*")
	return err == nil && len(found) > 0
}

// compareTrees compares the trees at the end, as the clients and as the server see them.
func (p *Pair) compareTrees(at int, check func(int, Op, []Field, []Field) bool, first **Difference,
	known *[]Difference) (*Difference, []Difference, error) {
	p.closeAll()
	if err := p.awaitHiddenRemoved(); err != nil {
		return nil, *known, err
	}
	for i := range p.Ours.Dirs {
		if p.CloseToOpen || i >= len(p.Processes) {
			break
		}
		walk := Op{do: "walk", by: i}
		a, b, err := p.both(&walk)
		if err != nil {
			return nil, *known, err
		}
		if !check(at, walk, a, b) {
			return *first, *known, nil
		}
	}
	if p.Reference.Server == "" {
		return nil, *known, nil
	}
	server := Op{do: "walk", path: "server"}
	a, errA := doWalk(filepath.Join(p.Reference.Server, p.dir))
	b, errB := doWalk(filepath.Join(p.Ours.Server, p.dir))
	check(at+1, server, append([]Field{{"errno", errnoName(errA)}}, a...),
		append([]Field{{"errno", errnoName(errB)}}, b...))
	return *first, *known, nil
}

// diverges reports whether only one side executed the operation. Files that only one side opens are
// closed, and listxattr and tmpfile change nothing that later operations use.
func (d *Difference) diverges() bool {
	switch d.op.do {
	case "open", "listxattr", "tmpfile":
		return false
	}
	return d.field == "errno" && (d.reference == ok) != (d.ours == ok)
}

// isDirectoryTime reports whether the field is a time of a directory.
func (d *Difference) isDirectoryTime() bool {
	what, time, _ := strings.Cut(d.field, ".")
	mode := d.fields[what+".mode"]
	return strings.Contains(time, "time") && len(mode) == 5 && mode[0] == '4'
}

// differences compares the values of an operation. A value that only one side has differs. If the
// errno differs, or one side cannot be checked, the other values are not compared.
func differences(at int, o Op, reference, ours []Field) (out []Difference) {
	a, b := make(map[string]string), make(map[string]string)
	var names []string
	for _, f := range reference {
		a[f.Name] = f.Value
		names = append(names, f.Name)
	}
	for _, f := range ours {
		b[f.Name] = f.Value
		if _, both := a[f.Name]; !both {
			names = append(names, f.Name)
		}
	}
	hidden := func(name string) bool {
		what, rest, _ := strings.Cut(name, ".")
		_, inA := a[what+".errno"]
		_, inB := b[what+".errno"]
		return inA != inB && rest != "errno"
	}
	for _, name := range names {
		_, inA := a[name]
		_, inB := b[name]
		if strings.HasSuffix(name, movedSuffix) && inA != inB || hidden(name) ||
			strings.HasPrefix(name, contextPrefix) {
			continue
		}
		if a[name] != b[name] {
			out = append(out, Difference{at, o, name, a[name], b[name], a})
			if name == "errno" {
				break
			}
		}
	}
	return out
}

// Shrink removes operations while the last one still causes the same difference, until limit.
func (p *Pair) Shrink(ops []Op, d *Difference, tolerated func(*Difference) bool, limit time.Duration) ([]Op,
	*Difference) {
	end := time.Now().Add(limit)
	ops = ops[:min(d.at+1, len(ops))]
	for size := max(1, len(ops)/2); ; size = max(1, size/2) {
		shorter := false
		for from := 0; from+size < len(ops) && time.Now().Before(end); {
			less := append(append([]Op(nil), ops[:from]...), ops[from+size:]...)
			found, _, err := p.Run(less, tolerated)
			if err == nil && found != nil && found.op.do == d.op.do && found.field == d.field {
				ops, d, shorter = less[:min(found.at+1, len(less))], found, true
			} else {
				from += size
			}
		}
		if size == 1 && !shorter || !time.Now().Before(end) {
			break
		}
	}
	return ops, d
}

// Trace returns the text of operations, one on each line, for ParseOps.
func Trace(ops []Op) string {
	var b strings.Builder
	for _, o := range ops {
		b.WriteString(o.String() + "\n")
	}
	return b.String()
}

// Survey runs a stream to its end and prints the differences that are not tolerated, once for each
// verb, field and pair of errors. Later differences may be effects of earlier ones.
func (p *Pair) Survey(name string, ops []Op, tolerated func(*Difference) bool) error {
	p.keepGoing = true
	_, all, err := p.Run(ops, func(*Difference) bool { return true })
	if err != nil {
		return err
	}
	times := make(map[string]int)
	var order []string
	example := make(map[string]Difference)
	for _, d := range all {
		if tolerated(&d) {
			if d.diverges() {
				break
			}
			continue
		}
		key := d.op.do + " " + d.field
		if strings.HasSuffix(d.field, "errno") {
			key += " " + d.reference + " " + d.ours
		}
		if times[key]++; times[key] == 1 {
			order = append(order, key)
			example[key] = d
		}
	}
	for _, key := range order {
		fmt.Printf("%s: %d times: %v\n", name, times[key], example[key])
	}
	return nil
}

// NextTick waits for the next tick of the clock that a server in the same kernel uses for the times
// of files. Two operations then get two times.
func NextTick() {
	var was, now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &was)
	for now = was; now == was; {
		time.Sleep(time.Millisecond)
		_ = unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now)
	}
}

// CloseTime is long enough for a client's work after a close(2).
const CloseTime = 60 * time.Millisecond
