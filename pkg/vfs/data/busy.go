package data

import (
	"context"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A busyMark tells whether a call with written data counts its file as busy.
type busyMark bool

// retryBusy is BusyPolicy.Retry for a call with written data. It counts the file as busy until the
// server answers such a call otherwise. When the delays take too long, it sets *err to BusyErrno.
func (f *File) retryBusy(ctx context.Context, err *error, try int, mark *busyMark) bool {
	if !nfs.IsBusy(*err) {
		f.clearBusy(mark)
		return false
	}
	if !*mark {
		f.setBusy(mark)
	}
	retry := f.s.cfg.Busy.Retry(ctx, *err, try)
	if !retry && ctx.Err() == nil {
		*err = f.s.cfg.BusyErrno
	}
	return retry
}

func (f *File) setBusy(mark *busyMark) {
	*mark = true
	d := &f.s.dirty
	d.Lock()
	defer d.Unlock()
	f.busy++
	f.s.serveWriters() // the waits of writers may be useless now
}

// clearBusy reverses the mark of retryBusy.
func (f *File) clearBusy(mark *busyMark) {
	if !*mark {
		return
	}
	*mark = false
	d := &f.s.dirty
	d.Lock()
	defer d.Unlock()
	f.busy--
	f.s.serveWriters()
}
