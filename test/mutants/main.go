// Program mutants checks that tests fail when the code that they test is wrong.
//
// A mutant is the code with one fault. A test kills the mutant when it fails. There are two kinds:
//
//	semantic  a patch in a directory here, written by hand. Its header names the row of
//	          docs/features.md that it breaks and the test that must fail.
//	generic   a change of one operator, made by gremlins. Any test of the package may kill it.
//
// A generic mutant that no test can kill stands in equivalent.txt with the reason.
//
// `make mutants` runs the program. It prints the score and the survivors, and exits with status 1
// when a semantic mutant survives, or when the score of a package is below its goal. Run it from
// the root of the repository. The tests of this package check that the patches apply and that
// their tests exist.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	only := flag.String("run", "", "test only the semantic mutants whose file `name` matches, and no generic ones")
	pkg := flag.String("generic", "", "test only the generic mutants of this `package`, and no semantic ones")
	workers := flag.Int("workers", runtime.NumCPU(), "number of mutants to test at the same time")
	flag.Parse()
	ok, err := run(ctx, *only, *pkg, *workers)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func run(ctx context.Context, only, pkg string, workers int) (ok bool, err error) {
	re, err := regexp.Compile(only)
	if err != nil {
		return false, fmt.Errorf("-run: %w", err)
	}
	ok = true
	if pkg == "" {
		mutants, err := readMutants(".")
		if err != nil {
			return false, err
		}
		if ok, err = runSemantic(ctx, mutants, re, workers); err != nil {
			return false, err
		}
	}
	if only != "" {
		return ok, nil
	}
	equivalents, err := readEquivalents(".")
	if err != nil {
		return false, err
	}
	found := false
	for _, p := range genericPackages {
		if pkg != "" && pkg != p.path {
			continue
		}
		found = true
		good, err := runGeneric(ctx, p, equivalents, workers)
		if err != nil {
			return false, err
		}
		ok = ok && good
	}
	if !found {
		return false, fmt.Errorf("-generic %s: not one of the packages in generic.go", pkg)
	}
	return ok, nil
}
