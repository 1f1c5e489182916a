// Command program runs in a guest of the lab, in which the kernel's NFS client and ours have
// mounted the same export.
//
// "differ" runs streams of random operations on both mounts and compares the results. "visible"
// changes files through one mount and reads them through the other. "bench" measures both mounts
// alternately. "mount" is our client with a CPU profile.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: program differ|visible|matrix|bench|mount [flags]")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "differ":
		err = differ(os.Args[2:])
	case "visible":
		err = visible(os.Args[2:])
	case "matrix":
		err = matrix(os.Args[2:])
	case "bench":
		err = bench(os.Args[2:])
	case "mount":
		err = profiledMount(os.Args[2:])
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// differ runs streams of random operations, or the operations in a file, and prints differences.
func differ(args []string) error {
	f := flag.NewFlagSet("differ", flag.ExitOnError)
	d := &differRun{Pair: differential.Pair{Ticks: true, CloseWait: differential.CloseTime}}
	kernel := f.String("kernel", "", "directory on the mount of the kernel's client")
	ours := f.String("ours", "", "directory on our mount")
	f.StringVar(&d.Reference.Server, "server-kernel", "", "directory of -kernel on the server")
	f.StringVar(&d.Ours.Server, "server-ours", "", "directory of -ours on the server")
	seed := f.Uint64("seed", 1, "seed of the first stream; later streams use the following numbers")
	streams := f.Int("streams", 1, "number of streams")
	n := f.Int("ops", 300, "number of operations in a stream")
	known := f.String("known", "", "check and tolerate the differences in `FILE`, KNOWN_DIFFERENCES.md")
	file := f.String("file", "", "run the operations in `FILE` instead of random ones")
	f.DurationVar(&d.shrinkTime, "shrink", time.Minute, "time limit for shortening the trace of a difference")
	f.BoolVar(&d.surveyOnly, "survey", false, "continue after differences, and count them by kind")
	f.Parse(args)
	d.Reference.Dirs, d.Ours.Dirs = []string{*kernel}, []string{*ours}
	d.OnHang = func(o differential.Op) {
		fmt.Printf("%s: operation did not return within %v: %s\n", d.current, differential.HangTime, o)
		os.Exit(3)
	}
	if *known != "" {
		if err := d.checkKnownFile(*known); err != nil {
			return err
		}
	}
	if *file != "" {
		if err := d.runFile(*file); err != nil {
			return err
		}
	} else {
		for s := *seed; s < *seed+uint64(*streams); s++ {
			if err := d.runOps(fmt.Sprintf("seed %d", s), differential.Generate(s, *n)); err != nil {
				return err
			}
		}
	}
	if d.found > 0 {
		return fmt.Errorf("found %d differences", d.found)
	}
	if d.executed < d.generated/2 {
		return fmt.Errorf("known differences ended the streams after %d of %d operations; use other seeds", d.executed,
			d.generated)
	}
	return nil
}

// A differRun is one run of the command differ.
type differRun struct {
	differential.Pair
	known      []differential.Entry
	surveyOnly bool
	shrinkTime time.Duration

	current             string // stream or file, for messages
	found               int    // differences
	executed, generated int    // operations of the streams without differences
}

// visible changes files through either client, and reads them through either.
func visible(args []string) error {
	f := flag.NewFlagSet("visible", flag.ExitOnError)
	kernel := f.String("kernel", "", "directory on the mount of the kernel's client")
	ours := f.String("ours", "", "the same directory on our mount")
	seed := f.Uint64("seed", 1, "seed of the changes")
	rounds := f.Int("rounds", 300, "number of changes")
	f.Parse(args)
	return differential.Visible([]string{*kernel, *ours}, *seed, *rounds)
}

// matrix tries every operation as several users, and writes the results to a file.
func matrix(args []string) error {
	f := flag.NewFlagSet("matrix", flag.ExitOnError)
	server := f.String("server", "", "empty directory as the server sees it")
	mount := f.String("mount", "", "the same directory on a mount")
	out := f.String("out", "", "write the results to `FILE`")
	f.Parse(args)
	lines, err := differential.Matrix(*server, *mount)
	if err != nil {
		return err
	}
	return os.WriteFile(*out, []byte(strings.Join(lines, "\n")+"\n"), 0o644)
}

// checkKnownFile reads the known differences and checks that they still occur.
func (d *differRun) checkKnownFile(file string) (err error) {
	if d.known, err = differential.ReadKnown(file); err != nil {
		return err
	}
	d.current = "known differences"
	obsolete, err := differential.CheckKnown(&d.Pair, d.known)
	if err != nil {
		return err
	}
	for _, o := range obsolete {
		fmt.Println("KNOWN_DIFFERENCES.md: difference no longer occurs:", o)
		d.found++
	}
	return nil
}

func (d *differRun) runFile(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	ops, err := differential.ParseOps(string(text))
	if err != nil {
		return err
	}
	return d.runOps(file, ops)
}

// runOps runs operations and prints the first difference with a short trace that shows it.
func (d *differRun) runOps(name string, ops []differential.Op) error {
	d.current = name
	if d.surveyOnly {
		return d.Survey(name, ops, differential.Tolerate(d.known))
	}
	found, tolerated, err := d.Run(ops, differential.Tolerate(d.known))
	if err != nil {
		return err
	}
	if found == nil {
		d.executed, d.generated = d.executed+d.Done, d.generated+len(ops)
		fmt.Printf("%s: %d of %d operations, %d known differences\n", name, d.Done, len(ops), len(tolerated))
		return nil
	}
	d.found++
	fmt.Printf("%s: %v\n", name, found)
	short, shortest := d.Shrink(ops, found, differential.Tolerate(d.known), d.shrinkTime)
	fmt.Printf("%s: shrunk: %v\n%s", name, shortest, differential.Trace(short))
	return nil
}
