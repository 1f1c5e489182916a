package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A difference is where the two sides part.
type difference struct {
	at           int // index of the operation
	op           op
	field        string
	kernel, ours string
}

func (d difference) String() string {
	return fmt.Sprintf("operation %d: %s: %s: kernel's client %q, ours %q", d.at, d.op, d.field, d.kernel, d.ours)
}

// A pair is where streams run: a directory on the mount of the kernel's client, one on ours, and
// the two as the server sees them.
type pair struct {
	kernel, ours             string
	serverKernel, serverOurs string        // "" is not known
	ticks                    bool          // between operations a tick of the server's clock passes
	closeWait                time.Duration // behind what closes a file
	runs                     int
	// operations of the last run, which may have ended before its stream
	done int
	// behind a tolerated difference after which the sides are not alike any more
	goOn    bool
	distort func(o *op, fields []field) // of our side; for tests
	hung    func(o op)
}

// hangTime is what an operation may take.
const hangTime = 2 * time.Minute

// run does a stream on both sides, each time in a new directory, and returns the first difference
// that is not tolerated, if any, and those that are.
func (p *pair) run(ops []op, tolerated func(*difference) bool) (first *difference, known []difference, err error) {
	p.runs++
	dir := fmt.Sprintf("run%d", p.runs)
	worlds := [2]*world{newWorld(filepath.Join(p.kernel, dir)), newWorld(filepath.Join(p.ours, dir))}
	for _, w := range worlds {
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
	parted := false // by a tolerated difference, so that what follows says nothing
	check := func(i int, o op, a, b []field) bool {
		for _, d := range differences(i, o, a, b) {
			if tolerated(&d) {
				known = append(known, d)
				parted = parted || d.parts()
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
		watchdog := time.AfterFunc(hangTime, func() { p.hung(o) })
		a := worlds[0].do(&o)
		b := worlds[1].do(&o)
		watchdog.Stop()
		if p.distort != nil {
			p.distort(&o, b)
		}
		if !check(i, o, a, b) {
			return first, known, nil
		}
		if parted && !p.goOn {
			return nil, known, nil
		}
		// tolerated, but not to be taken any further
		if o.do == "open" && (worlds[0].fds[o.fd] < 0) != (worlds[1].fds[o.fd] < 0) {
			worlds[0].closeSlot(o.fd)
			worlds[1].closeSlot(o.fd)
		}
		if p.ticks {
			nextTick()
		}
	}
	// In the end the trees must be equal, as the clients and as the server see them.
	for _, w := range worlds {
		w.close()
	}
	walk := op{do: "walk"}
	if !check(len(ops), walk, worlds[0].do(&walk), worlds[1].do(&walk)) || p.serverKernel == "" {
		return first, known, nil
	}
	server := op{do: "walk", path: "server"}
	check(len(ops)+1, server, newWorld(filepath.Join(p.serverKernel, dir)).do(&walk),
		newWorld(filepath.Join(p.serverOurs, dir)).do(&walk))
	return first, known, nil
}

// parts tells whether a side did something that the other one did not. Files that one side alone
// has opened are closed, and what lists nothing changes nothing.
func (d *difference) parts() bool {
	return d.field == "errno" && (d.kernel == "ok") != (d.ours == "ok") && d.op.do != "open" &&
		d.op.do != "listxattr" && d.op.do != "lseek"
}

// differences compares what an operation gave. Fields that one side alone has count as missing on
// the other. Behind another errno all else is different too, and says nothing, as is what cannot be
// looked at on one side.
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

// shrink leaves out operations for as long as the last one still gives the same difference, and the
// time lasts.
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

// survey runs a stream to its end and prints what is not tolerated, once for each verb, field and
// pair of errors. What follows a difference may follow from it.
func (p *pair) survey(name string, ops []op, tolerated func(*difference) bool) error {
	p.goOn = true
	_, all, err := p.run(ops, func(*difference) bool { return true })
	if err != nil {
		return err
	}
	times := make(map[string]int)
	var order []string
	example := make(map[string]difference)
	for _, d := range all {
		if tolerated(&d) {
			if d.parts() {
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
