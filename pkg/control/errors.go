package control

import (
	"errors"
	"fmt"
	"strings"
)

// A Code classes an error for scripts: it crosses the control socket and decides the exit code,
// which are mount(8)'s.
type Code string

// Codes.
const (
	CodeUsage      Code = "usage"      // the request is wrong: option, spec, argument
	CodePermission Code = "permission" // the caller, or the process, may not
	// this system lacks something: /dev/fuse, a socket, the daemon
	CodeSystem     Code = "system"
	CodeMount      Code = "mount"       // the mount, or the unmount, failed
	CodeNotMounted Code = "not-mounted" // no mount of ours there
	CodeInternal   Code = "internal"    // a defect of ours
	CodeCanceled   Code = "canceled"    // interrupted by the user
)

// Exit codes, from mount(8).
const (
	ExitOK          = 0
	ExitUsage       = 1
	ExitSystem      = 2
	ExitInternal    = 4
	ExitInterrupted = 8
	ExitMount       = 32
)

// An Error is a failure with its class. Its text is one line that says what was tried, on what, and
// what to do.
type Error struct {
	Code Code
	Text string
	Err  error // the cause, or nil; its text is part of Text where it helps
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ErrorCode returns the class of e.
func (e *Error) ErrorCode() Code { return e.Code }

// Errorf makes an *Error; a %w operand becomes the cause.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Text: err.Error(), Err: errors.Unwrap(err)}
}

// CodeOf returns the class of err: that of the first error in its chain that has an ErrorCode
// method, and "" if there is none.
func CodeOf(err error) Code {
	var coded interface{ ErrorCode() Code }
	if errors.As(err, &coded) {
		return coded.ErrorCode()
	}
	return ""
}

// ExitCode maps err to mount(8)'s exit codes. Errors that carry no [Code] are taken as usage
// errors, as the command line's own parser makes them.
func ExitCode(err error) int {
	if err == nil {
		return ExitOK
	}
	switch CodeOf(err) {
	case CodeUsage, CodePermission, "":
		return ExitUsage
	case CodeSystem:
		return ExitSystem
	case CodeCanceled:
		return ExitInterrupted
	case CodeMount, CodeNotMounted:
		return ExitMount
	}
	return ExitInternal
}

// OneLine keeps foreign error texts to the one line that an error has here.
func OneLine(s string) string {
	return strings.Join(strings.Fields(s), " ")
}

// maxQuoted bounds what an error repeats of its cause's text, in octets.
const maxQuoted = 200

// Brief is s, or the beginning of it where it is too long to be repeated.
func Brief(s string) string {
	if len(s) <= maxQuoted {
		return s
	}
	return fmt.Sprintf("%s... (%d octets)", strings.ToValidUTF8(s[:maxQuoted], ""), len(s))
}
