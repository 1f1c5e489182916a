package control

import (
	"errors"
	"fmt"
	"strings"
)

// A Code is the class of an error. It crosses the control socket and determines the exit code.
type Code string

// Codes.
const (
	CodeUsage      Code = "usage"       // invalid request: option, source, argument
	CodePermission Code = "permission"  // the caller or the process lacks a privilege
	CodeSystem     Code = "system"      // this host lacks /dev/fuse, a socket or the daemon
	CodeMount      Code = "mount"       // a mount or unmount failed
	CodeNotMounted Code = "not-mounted" // this daemon has no mount there
	CodeInternal   Code = "internal"    // a defect of this program
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

// An Error is an error with its class. Its text is one line: the operation, the object, the cause,
// and after a semicolon what to do.
type Error struct {
	Code Code
	Text string
	Err  error // the cause; may be nil
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ErrorCode returns the class of e.
func (e *Error) ErrorCode() Code { return e.Code }

// Errorf returns an Error with the given class. The operand of %w becomes the cause.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Text: err.Error(), Err: errors.Unwrap(err)}
}

// CodeOf returns the class of err: the class of the first error in its chain that has an ErrorCode
// method, and "" if there is none.
func CodeOf(err error) Code {
	var coded interface{ ErrorCode() Code }
	if errors.As(err, &coded) {
		return coded.ErrorCode()
	}
	return ""
}

// ExitCode returns the exit code of mount(8) for err. An error without a [Code] comes from the
// parser of the command line and is a usage error.
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

// OneLine returns s with each run of white space, line breaks included, replaced by one space.
func OneLine(s string) string {
	return strings.Join(strings.Fields(s), " ")
}

// maxQuoted is the maximum length in bytes of a text that an error quotes.
const maxQuoted = 200

// Brief returns s, or its first 200 bytes and its length if s is longer.
func Brief(s string) string {
	if len(s) <= maxQuoted {
		return s
	}
	return fmt.Sprintf("%s... (%d bytes)", strings.ToValidUTF8(s[:maxQuoted], ""), len(s))
}
