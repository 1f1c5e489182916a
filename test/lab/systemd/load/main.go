// Command load runs in a guest with systemd. It works on a mount while the test restarts the
// daemon.
//
//	load run MOUNT SERVED PROGRESS   work until SIGTERM; SERVED is the directory on the server
//	load hold FILE BYTES             write, and keep the file open without fsync
//	load check FILE BYTES            check a file of hold
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 4 && args[0] == "run":
		return work(args[1], args[2], args[3])
	case len(args) == 3 && (args[0] == "hold" || args[0] == "check"):
		n, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		if args[0] == "hold" {
			return hold(args[1], n)
		}
		return compare(args[1], kit.RandomBytes(1, n))
	}
	return errors.New("usage: load run|hold|check ARGUMENTS")
}

// hold writes n bytes and keeps the file open until SIGKILL.
func hold(path string, n int) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := f.Write(kit.RandomBytes(1, n)); err != nil {
		return err
	}
	// The Go runtime needs a signal handler, or it ends a program that only waits.
	ignored := make(chan os.Signal, 1)
	signal.Notify(ignored, syscall.SIGTERM, syscall.SIGHUP)
	fmt.Println("held")
	for range ignored {
		continue
	}
	return f.Close()
}

func compare(path string, want []byte) error {
	got, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return same(path, got, want)
}

func same(path string, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	at := 0
	for at < min(len(got), len(want)) && got[at] == want[at] {
		at++
	}
	return fmt.Errorf("%s: got %d bytes that differ from byte %d on, want %d bytes", path, len(got), at, len(want))
}
