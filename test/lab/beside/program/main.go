// Command program runs in a guest of the lab, where the kernel's own NFS client and ours have
// mounted the same export side by side.
//
// "differ" does streams of random operations on both and compares what comes back; "visible"
// changes files through one and looks at them through the other; "bench" measures both in turns;
// "mount" is our client with a CPU profile.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: program differ|visible|bench|mount [flags]")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "differ":
		err = differ(os.Args[2:])
	case "visible":
		err = visible(os.Args[2:])
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

// differ runs streams, or one that a file holds, and prints differences.
func differ(args []string) error {
	f := flag.NewFlagSet("differ", flag.ExitOnError)
	p := &pair{ticks: true, closeWait: closeTime}
	f.StringVar(&p.kernel, "kernel", "", "directory on the mount of the kernel's client")
	f.StringVar(&p.ours, "ours", "", "directory on our mount")
	f.StringVar(&p.serverKernel, "server-kernel", "", "the first as the server sees it")
	f.StringVar(&p.serverOurs, "server-ours", "", "the second as the server sees it")
	seed := f.Uint64("seed", 1, "of the first stream; the next has the next number")
	streams := f.Int("streams", 1, "number of streams")
	n := f.Int("ops", 300, "operations of a stream")
	known := f.String("known", "", "KNOWN_DIFFERENCES.md, which is held to what it says first")
	file := f.String("file", "", "run the operations of this file instead")
	shrinkTime := f.Duration("shrink", time.Minute, "time for making the trace of a difference shorter")
	survey := f.Bool("survey", false, "go on behind differences, and count them by what differs")
	f.Parse(args)
	runtime.LockOSThread()
	var current string
	p.hung = func(o op) {
		fmt.Printf("%s: no answer within %v: %s\n", current, hangTime, o)
		os.Exit(3)
	}
	var list []entry
	bad, done, all := 0, 0, 0
	if *known != "" {
		var err error
		if list, err = readKnown(*known); err != nil {
			return err
		}
		current = "known differences"
		gone, err := hold(p, list)
		if err != nil {
			return err
		}
		for _, g := range gone {
			fmt.Println("KNOWN_DIFFERENCES.md says what is not so any more:", g)
			bad++
		}
	}
	run := func(ops []op) error {
		if *survey {
			return p.survey(current, ops, tolerate(list))
		}
		found, tolerated, err := p.run(ops, tolerate(list))
		if err != nil {
			return err
		}
		if found == nil {
			done, all = done+p.done, all+len(ops)
			fmt.Printf("%s: %d of %d operations, %d known differences\n", current, p.done, len(ops), len(tolerated))
			return nil
		}
		bad++
		fmt.Printf("%s: %v\n", current, found)
		short, d := p.shrink(ops, found, tolerate(list), *shrinkTime)
		fmt.Printf("%s: shrunk: %v\n%s", current, d, trace(short))
		return nil
	}
	if *file != "" {
		text, err := os.ReadFile(*file)
		if err != nil {
			return err
		}
		ops, err := parseOps(string(text))
		if err != nil {
			return err
		}
		current = *file
		if err := run(ops); err != nil {
			return err
		}
	} else {
		for s := *seed; s < *seed+uint64(*streams); s++ {
			current = fmt.Sprintf("seed %d", s)
			if err := run(generate(s, *n)); err != nil {
				return err
			}
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d differences", bad)
	}
	if done < all/2 {
		return fmt.Errorf("known differences ended the streams after %d of %d operations, which says little: take other seeds", done, all)
	}
	return nil
}
