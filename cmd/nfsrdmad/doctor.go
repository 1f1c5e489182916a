package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
)

func doctorCommand(c *commonFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this host can mount, and report what is missing",
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := daemon.CheckHost(cmd.Context(), c.socket)
			if err := c.print(cmd.OutOrStdout(), findings,
				func(w io.Writer) { printFindings(w, findings) }); err != nil {
				return err
			}
			for _, f := range findings {
				if f.Needed && !f.OK {
					return &control.Error{Code: control.CodeSystem, Text: "doctor: this host cannot mount: " + f.Text,
						Err: errors.New(f.Subject)}
				}
			}
			return nil
		},
	}
	c.socketFlag(cmd)
	return cmd
}

func printFindings(w io.Writer, l []daemon.Finding) {
	for _, f := range l {
		mark := "ok"
		switch {
		case !f.OK && f.Needed:
			mark = "MISSING"
		case !f.OK:
			mark = "no"
		}
		wrapIndented(w, fmt.Sprintf("%-8s %-10s ", mark, f.Subject), printable(f.Text), " ")
	}
}
