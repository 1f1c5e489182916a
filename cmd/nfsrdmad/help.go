package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// configureHelp wraps the help of cmd and its subcommands at 80 columns. Usage errors become one
// line that names the command for help.
func configureHelp(cmd *cobra.Command) {
	cobra.AddTemplateFunc("wrapped", func(f interface{ FlagUsagesWrapped(int) string }) string {
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

// argCount accepts lo to hi arguments. For any other number the error shows the usage.
func argCount(lo, hi int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < lo || len(args) > hi {
			return fmt.Errorf("%s given; usage: %s", plural(uint64(len(args)), "argument"), cmd.UseLine())
		}
		return nil
	}
}

// rejectUnknownCommand returns an error that names the unknown command and similar commands.
func rejectUnknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	if similar := cmd.SuggestionsFor(args[0]); len(similar) > 0 {
		hint = " (did you mean " + strings.Join(similar, " or ") + "?)"
	}
	return fmt.Errorf("unknown command %q%s; see %s --help", args[0], hint, cmd.CommandPath())
}

// wrap breaks text at spaces into lines of at most width columns. The first line starts with first,
// the others with indent.
func wrap(text, first, indent string, width int) string {
	var b strings.Builder
	line, words := first, 0
	for _, word := range strings.Fields(text) {
		if words > 0 && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			b.WriteString(line + "\n")
			line, words = indent, 0
		}
		if words > 0 {
			line += " "
		}
		line += word
		words++
	}
	return b.String() + line
}
