package xprt

import (
	"errors"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestErrorsNameTheirCause checks the text of each error, and the error that it wraps.
func TestErrorsNameTheirCause(t *testing.T) {
	for _, c := range []struct {
		err   error
		text  string
		wraps error
	}{
		{&InterruptedError{io.EOF}, "RPC interrupted: EOF", syscall.EINTR},
		{&InterruptedError{io.EOF}, "RPC interrupted: EOF", io.EOF},
		{&TimeoutError{Server: "s", After: 1500*time.Millisecond + 1, Errno: syscall.EIO},
			"NFS server s did not answer for 1.5s", syscall.EIO},
		{&TimeoutError{Server: "s", After: time.Second, Errno: syscall.ETIMEDOUT, Last: "refused"},
			"NFS server s did not answer for 1s (last connection error: refused)", syscall.ETIMEDOUT},
		{&ServerError{Code: rpcrdma.ErrVers, Low: 2, High: 3},
			"NFS server rejected RPC-over-RDMA version 1; it supports versions 2 to 3", syscall.EREMOTEIO},
		{&ServerError{Code: rpcrdma.ErrChunk},
			"NFS server rejected the chunks of the call: RDMA_ERROR ERR_CHUNK", syscall.EREMOTEIO},
		{&ProtocolError{"reply has a Read list"}, "RPC-over-RDMA: reply has a Read list", syscall.EIO},
		{&completionFailure{"send", verbs.StatusLocProtErr}, "send: " + verbs.StatusLocProtErr.String(), nil},
		{&postError{"RPC", verbs.ErrQueueFull}, "post RPC: " + verbs.ErrQueueFull.Error(), verbs.ErrQueueFull},
		{&unmapError{verbs.ErrBusy}, "release memory: " + verbs.ErrBusy.Error(), verbs.ErrBusy},
	} {
		if got := c.err.Error(); got != c.text {
			t.Errorf("%T: got %q, want %q", c.err, got, c.text)
		}
		if c.wraps != nil && !errors.Is(c.err, c.wraps) {
			t.Errorf("%v: does not wrap %v", c.err, c.wraps)
		}
	}
}
