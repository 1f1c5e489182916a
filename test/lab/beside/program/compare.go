package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A difference is a value that differs between the two sides.
type difference struct {
	at           int // index of the operation
	op           op
	field        string
	kernel, ours string
}

func (d difference) String() string {
	return fmt.Sprintf("operation %d: %s: %s: kernel's client %q, ours %q", d.at, d.op, d.field, d.kernel, d.ours)
}

// A pair is the environment of streams: a directory on the mount of the kernel's client, one on
// ours, and both as the server sees them.
type pair struct {
	kernel, ours             string
	serverKernel, serverOurs string // "" if not available
	// wait for a tick of the server's clock after each operation
	ticks     bool
	closeWait time.Duration // pause after a file is closed
	runs      int
	// done is the number of operations in the last run, which may end before its stream does
	done int
	// keepGoing continues after a tolerated difference that makes the sides diverge
	keepGoing bool
	distort   func(o *op, fields []field) // changes our side's values; for tests
	onHang    func(o op)
}

// hangTime bounds one operation.
const hangTime = 2 * time.Minute

// run runs a stream on both sides, each time in a new directory. It returns the first difference
// that is not tolerated, or nil, and the tolerated ones.
func (p *pair) run(ops []op, tolerated func(*difference) bool) (first *difference, known []difference, err error) {
	p.runs++
	dir := fmt.Sprintf("run%d", p.runs)
	sides := [2]*side{newSide(filepath.Join(p.kernel, dir)), newSide(filepath.Join(p.ours, dir))}
	for _, w := range sides {
		w.closeWait = p.closeWait
		if err := os.Mkdir(w.root, 0o777); err != nil {
			return nil, nil, err
		}
		if err := os.Chmod(w.root, 0o777); err != nil {
			return nil, nil, err
		}
		defer func() { w.close(); os.RemoveAll(w.root) }()
	}
	unix.Umask(0o022)
	diverged := false // after a tolerated difference the later results are meaningless
	check := func(i int, o op, a, b []field) bool {
		for _, d := range differences(i, o, a, b) {
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
	p.done = 0
	for i, o := range ops {
		p.done++
		watchdog := time.AfterFunc(hangTime, func() { p.onHang(o) })
		a := sides[0].do(&o)
		b := sides[1].do(&o)
		watchdog.Stop()
		if p.distort != nil {
			p.distort(&o, b)
		}
		if !check(i, o, a, b) {
			return first, known, nil
		}
		if diverged && !p.keepGoing {
			return nil, known, nil
		}
		// The difference is tolerated, but close the file that only one side has open.
		if o.do == "open" && (sides[0].fds[o.fd] < 0) != (sides[1].fds[o.fd] < 0) {
			sides[0].closeSlot(o.fd)
			sides[1].closeSlot(o.fd)
		}
		if p.ticks {
			nextTick()
		}
	}
	// At the end the trees must be equal, as the clients and as the server see them.
	for _, w := range sides {
		w.close()
	}
	walk := op{do: "walk"}
	if !check(len(ops), walk, sides[0].do(&walk), sides[1].do(&walk)) || p.serverKernel == "" {
		return first, known, nil
	}
	server := op{do: "walk", path: "server"}
	check(len(ops)+1, server, newSide(filepath.Join(p.serverKernel, dir)).do(&walk),
		newSide(filepath.Join(p.serverOurs, dir)).do(&walk))
	return first, known, nil
}

// diverges reports whether only one side executed the operation. Files that only one side opens are
// closed, and a failed listxattr or lseek changes nothing.
func (d *difference) diverges() bool {
	return d.field == "errno" && (d.kernel == "ok") != (d.ours == "ok") && d.op.do != "open" &&
		d.op.do != "listxattr" && d.op.do != "lseek"
}

// differences compares the values of an operation. A value that only one side has differs. If the
// errno differs, or one side cannot be checked, the other values are not compared.
func differences(at int, o op, kernel, ours []field) (out []difference) {
	a, b := make(map[string]string), make(map[string]string)
	var names []string
	for _, f := range kernel {
		a[f.name] = f.value
		names = append(names, f.name)
	}
	for _, f := range ours {
		b[f.name] = f.value
		if _, both := a[f.name]; !both {
			names = append(names, f.name)
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
		if strings.HasSuffix(name, movedSuffix) && inA != inB || hidden(name) {
			continue
		}
		if a[name] != b[name] {
			out = append(out, difference{at, o, name, a[name], b[name]})
			if name == "errno" {
				break
			}
		}
	}
	return out
}

// shrink removes operations while the last one still causes the same difference, until limit.
func (p *pair) shrink(ops []op, d *difference, tolerated func(*difference) bool, limit time.Duration) ([]op,
	*difference) {
	end := time.Now().Add(limit)
	ops = ops[:min(d.at+1, len(ops))]
	for size := max(1, len(ops)/2); ; size = max(1, size/2) {
		shorter := false
		for from := 0; from+size < len(ops) && time.Now().Before(end); {
			less := append(append([]op(nil), ops[:from]...), ops[from+size:]...)
			found, _, err := p.run(less, tolerated)
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

func trace(ops []op) string {
	var b strings.Builder
	for _, o := range ops {
		b.WriteString(o.String() + "\n")
	}
	return b.String()
}

// survey runs a stream to its end and prints the differences that are not tolerated, once for each
// verb, field and pair of errors. Later differences may be effects of earlier ones.
func (p *pair) survey(name string, ops []op, tolerated func(*difference) bool) error {
	p.keepGoing = true
	_, all, err := p.run(ops, func(*difference) bool { return true })
	if err != nil {
		return err
	}
	times := make(map[string]int)
	var order []string
	example := make(map[string]difference)
	for _, d := range all {
		if tolerated(&d) {
			if d.diverges() {
				break
			}
			continue
		}
		key := d.op.do + " " + d.field
		if strings.HasSuffix(d.field, "errno") {
			key += " " + d.kernel + " " + d.ours
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
