package csi

import (
	"context"
	"errors"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// codeOf returns the gRPC code of an error of the daemon, of a system call or of a context.
func codeOf(err error) codes.Code {
	switch control.CodeOf(err) {
	case control.CodeUsage:
		return codes.InvalidArgument
	case control.CodePermission:
		return codes.PermissionDenied
	case control.CodeSystem:
		return codes.Unavailable
	case control.CodeCanceled:
		return codes.Canceled
	case control.CodeMount, control.CodeNotMounted, control.CodeInternal:
		return codes.Internal
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, errNoReply):
		return codes.Unavailable
	case errors.Is(err, errNotDirectory):
		return codes.InvalidArgument
	case errors.Is(err, fs.ErrPermission):
		return codes.PermissionDenied
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return codes.ResourceExhausted
	}
	return codes.Internal
}

// rpcError returns err as an error of gRPC, with what was tried. It keeps an error that has a code.
func rpcError(what string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Errorf(codeOf(err), "%s: %s", what, control.OneLine(err.Error()))
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

// brief returns a text of a request for an error or the log, without control characters.
func brief(s string) string {
	return control.Brief(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s))
}
