package vfs

import (
	"fmt"
	"syscall"
)

// invalidReply counts and reports a reply that breaks the protocol, for example a read that never
// ends. It returns the error of the request.
func (fs *FS) invalidReply(ino *inode, reason string) error {
	fs.Counters.InvalidReplies.Add(1)
	if fs.opts.Invalid != nil {
		ino.mu.Lock()
		id := ino.attr.FileID
		ino.mu.Unlock()
		fs.opts.Invalid(fmt.Sprintf("inode %d: %s", id, reason))
	}
	return syscall.EIO
}
