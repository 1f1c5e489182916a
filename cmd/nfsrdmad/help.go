package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// configureHelp makes help and usage errors of cmd and the commands below it readable: help within 80
// columns, errors of one line that say where the help is.
func configureHelp(cmd *cobra.Command) {
	cobra.AddTemplateFunc("wrapped", func(
		f interface{ FlagUsagesWrapped(int) string }) string {
		return f.FlagUsagesWrapped(columns)
	})
	cmd.SetUsageTemplate(strings.NewReplacer(
		".LocalFlags.FlagUsages", "wrapped .LocalFlags",
		".InheritedFlags.FlagUsages", "wrapped .InheritedFlags",
	).Replace(cmd.UsageTemplate()))
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		var number *strconv.NumError
		if errors.As(err, &number) {
			before, _, _ := strings.Cut(err.Error(), ": strconv.")
			err = fmt.Errorf("%s: must be a number", before)
		}
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
}

// takes allows so many arguments, and says else what they are.
func takes(lo, hi int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < lo || len(args) > hi {
			return fmt.Errorf("%s given; usage: %s", plural(uint64(len(args)), "argument"), cmd.UseLine())
		}
		return nil
	}
}

// onlyCommands refuses what is no command, and names those that may be meant.
func onlyCommands(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	if meant := cmd.SuggestionsFor(args[0]); len(meant) > 0 {
		hint = " (is " + strings.Join(meant, " or ") + " meant?)"
	}
	return fmt.Errorf("unknown command %q%s; see %s --help", args[0], hint, cmd.CommandPath())
}

// nothing is said instead of an empty list.
func nothing(w io.Writer) { fmt.Fprintln(w, "nothing is mounted by this daemon") }
