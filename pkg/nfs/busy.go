package nfs

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"time"
)

// HasStatus reports whether err is an [*Error] with a status.
func HasStatus(err error, s Status) bool {
	if err == nil {
		return false // returns before the allocation below
	}
	var e *Error
	return errors.As(err, &e) && e.Status == s
}

// IsStale reports whether the server no longer knows the handle of a call.
func IsStale(err error) bool { return HasStatus(err, ErrStale) || HasStatus(err, ErrBadHandle) }

// IsBusy reports whether the call would take long, for example while a tape is loaded: the server
// wants it to be repeated later (RFC 1813 §2.6, NFS3ERR_JUKEBOX; NFS4ERR_DELAY in NFSv4).
func IsBusy(err error) bool { return HasStatus(err, ErrJukebox) }

// CallErrno returns the error number for the caller of an operation: that of [Errno], but EINTR for a
// busy server, because only an interrupt ends the retries, and the number itself for an error number.
func CallErrno(err error) syscall.Errno {
	switch err := err.(type) {
	case nil:
		return 0
	case syscall.Errno:
		return err
	case *Error: // the usual case, without the allocations below
		if err.Status == ErrJukebox {
			return syscall.EINTR
		}
		return err.Status.Errno()
	}
	return wrappedErrno(err)
}

func wrappedErrno(err error) syscall.Errno {
	var n syscall.Errno
	var e *Error
	switch {
	case errors.As(err, &e) && e.Status == ErrJukebox:
		return syscall.EINTR
	case e == nil && errors.As(err, &n) && n == syscall.EINTR:
		return n
	}
	return Errno(err)
}

// minDelay and maxDelay bound the delay before a retry of a call to a busy server. The kernel's NFS
// client waits 5 s (NFS_JUKEBOX_RETRY_TIME).
const (
	minDelay = 100 * time.Millisecond
	maxDelay = 5 * time.Second
)

// RetryDelay returns the delay before a retry of a call to a busy server: it doubles up to 5 s.
func RetryDelay(try int) time.Duration {
	if try < 6 { // 2^6 times the minimum exceeds the maximum
		return min(minDelay<<try, maxDelay)
	}
	return maxDelay
}

// A BusyPolicy says how long calls to a busy server are repeated. During the delays a call should hold
// nothing that calls for other objects need.
type BusyPolicy struct {
	// Timeout bounds the delays of one call. 0 retries forever.
	Timeout time.Duration
	Retries *atomic.Uint64 // counts retries
}

// Retry reports whether to retry a call that returned err, after a delay. try is the number of retries
// before. Retry returns false when the server is not busy, when ctx ends during the delay, or when the
// delays exceed Timeout.
func (p *BusyPolicy) Retry(ctx context.Context, err error, try int) bool {
	if !IsBusy(err) || p.tooLong(try) {
		return false
	}
	t := time.NewTimer(RetryDelay(try))
	defer t.Stop()
	select {
	case <-t.C:
		p.Retries.Add(1)
		return true
	case <-ctx.Done():
		return false
	}
}

// tooLong reports whether the delays before a try exceed Timeout.
func (p *BusyPolicy) tooLong(try int) bool {
	if p.Timeout <= 0 {
		return false
	}
	var delays time.Duration
	for i := 0; i < try && delays < p.Timeout; i++ {
		delays += RetryDelay(i)
	}
	return delays >= p.Timeout
}
