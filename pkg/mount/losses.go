package mount

import (
	"sync/atomic"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics/otlp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// A shared is the state that all mounts of a table share. It outlives the mounts, so that its
// counters include the end of a mount.
type shared struct {
	log      hclog.Logger
	dirty    *data.Total         // bounds the dirty data of all mounts
	rejected atomic.Uint64       // bytes that a server rejected
	unmount  atomic.Uint64       // bytes that the end of a mount discarded
	store    fdstore.Store       // keeps the mounts while no process serves them; nil for none
	noStore  error               // why store is nil; nil if the mounts are meant to end with the process
	helper   []string            // command of the process that sends notifications of kept mounts
	locks    *nlm.Service        // calls of lock servers for all mounts; nil for none
	connects *xprt.ConnectLimits // of the connects of all mounts
	traces   *otlp.Exporter      // nil if traces are off
}

// lost counts and logs written data that the file system of the mount discards.
func (s *mountStack) lost(l data.Loss) {
	if l.Err != nil { // the program gets the error
		s.shared.rejected.Add(l.Bytes)
		s.shared.log.Debug("written data rejected", "dir", s.dir, "fileid", l.FileID, "handle", l.Handle, "offset",
			l.Offset, "end", l.End, "bytes", l.Bytes, "error", l.Err)
		return
	}
	s.shared.unmount.Add(l.Bytes)
	s.shared.log.Error("written data lost: the mount ended before the server had it", "spec", s.spec.String(), "dir",
		s.dir, "fileid", l.FileID, "handle", l.Handle, "offset", l.Offset, "end", l.End, "bytes", l.Bytes)
}

// invalidReply logs a reply that breaks NFSv3. The server controls the number of these replies; a
// metric counts each.
func (s *mountStack) invalidReply(reason string) {
	s.invalid.Log(s.shared.log.Warn, "invalid reply from server; the request fails", "spec", s.spec.String(),
		"dir", s.dir, "reason", reason)
}

// failed logs a panic of the file system of the mount.
func (s *mountStack) failed(reason string, stack []byte) {
	s.shared.log.Error("file system failed; unmount it and report the stack", "spec", s.spec.String(), "dir", s.dir,
		"reason", reason, "stack", string(stack))
}

// LossError returns an error if mounts discarded written data when they ended. before is the number
// of bytes that the caller knows already.
func (t *Table) LossError(before uint64) error {
	if n := t.shared.unmount.Load() - before; n > 0 {
		return control.Errorf(control.CodeMount, "stop: %d bytes of written data lost; see the files in the log", n)
	}
	return nil
}
