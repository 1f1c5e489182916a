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
		a, _ := ino.attr.Attr()
		fs.opts.Invalid(fmt.Sprintf("inode %d: %s", a.FileID, reason))
	}
	return syscall.EIO
}
