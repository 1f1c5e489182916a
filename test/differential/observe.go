package differential

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// observed contains the times of a file's last observed changes.
type observed struct{ mtime, ctime unix.Timespec }

// do executes an operation as its user, and then observes the affected files as root.
func (w *side) do(o *Op) []Field {
	var fields []Field
	var err error
	users[o.as].run(func() { fields, err = verbs[o.do].run(w, o) })
	out := append([]Field{{"errno", errnoName(err)}}, fields...)
	if w.released {
		out = append(out, Field{released, "1"})
		w.released = false
	}
	uses := verbs[o.do].uses
	var st unix.Stat_t
	if w.likeNFS && uses&usesFD != 0 && unix.Fstat(w.fds[o.fd], &st) == nil {
		out = append(out, Field{contextPrefix + "mode", fmt.Sprintf("%o", st.Mode)})
	}
	if o.quiet {
		return out
	}
	if uses&usesPath != 0 {
		out = append(out, w.lstat("path", o.path)...)
		out = append(out, w.lstat("parent", path.Dir(o.path))...)
	}
	if uses&usesTo != 0 {
		out = append(out, w.lstat("to", o.to)...)
		out = append(out, w.lstat("toparent", path.Dir(o.to))...)
	}
	if uses&usesFD != 0 {
		out = append(out, w.fstat(o.fd)...)
	}
	return out
}

// contextPrefix begins the names of fields that are not compared. The known differences use those
// of the reference; observing a mount would change its caches.
const contextPrefix = "~"

// released is the field of an operation that closed a file without a name. The client then removes
// the file from the server, which changes the times of the directory. The kernel's NFS client
// counts the hidden name of such a file, so its side does not have the field.
const released = contextPrefix + "released"

// ok is the errno of a successful operation.
const ok = "ok"

func errnoName(err error) string {
	var e unix.Errno
	switch {
	case err == nil:
		return ok
	case errors.As(err, &e):
		return unix.ErrnoName(e)
	}
	return err.Error()
}

func (w *side) lstat(what, p string) []Field {
	var st unix.Stat_t
	if err := unix.Lstat(w.abs(p), &st); err != nil {
		return []Field{{what + ".errno", errnoName(err)}}
	}
	if p == ".." || strings.HasPrefix(p, "../") || p == "/" {
		return nil // outside the directory, or its root
	}
	out := w.attributes(what, &st)
	if st.Mode&unix.S_IFMT != unix.S_IFLNK || what != "path" {
		return out
	}
	if err := unix.Stat(w.abs(p), &st); err != nil {
		return append(out, Field{"target.errno", errnoName(err)})
	}
	return append(out, w.attributes("target", &st)...)
}

func (w *side) fstat(slot int) []Field {
	var st unix.Stat_t
	fd := w.fds[slot]
	if fd < 0 {
		return nil
	}
	if err := unix.Fstat(fd, &st); err != nil {
		return []Field{{"fd.errno", errnoName(err)}}
	}
	out := w.attributes("fd", &st)
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		pos, err := unix.Seek(fd, 0, unix.SEEK_CUR)
		out = append(out, Field{"fd.offset", fmt.Sprintf("%d %s", pos, errnoName(err))})
	}
	return out
}

func sizeOf(st *unix.Stat_t) string { return fmt.Sprint(st.Size) }

// attributes returns the attributes that must be equal for both clients. A time from the server's
// clock depends on the time of the request. The test therefore compares only which times an
// operation changed, and whether a time comes from the server's clock.
func (w *side) attributes(what string, st *unix.Stat_t) []Field {
	out := []Field{
		{what + ".mode", fmt.Sprintf("%o", st.Mode)}, {what + ".nlink", fmt.Sprint(st.Nlink)},
		{what + ".uid", fmt.Sprint(st.Uid)}, {what + ".gid", fmt.Sprint(st.Gid)}, {what + ".size", sizeOf(st)},
	}
	if st.Mode&unix.S_IFMT == unix.S_IFIFO { // the server does not see when a FIFO is read or written
		return out
	}
	out = append(out, Field{what + ".mtime", timeClass(st.Mtim)})
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		out = append(out, Field{what + ".rdev", fmt.Sprint(st.Rdev)})
	}
	now := observed{st.Mtim, st.Ctim}
	before, known := w.seen[st.Ino]
	w.seen[st.Ino] = now
	if !known { // the same on both sides, unless an inode number was reused
		return out
	}
	return append(out, Field{what + moved("mtime"), fmt.Sprint(compare(now.mtime, before.mtime))},
		Field{what + moved("ctime"), fmt.Sprint(compare(now.ctime, before.ctime))})
}

// movedSuffix ends the names of fields that are compared only if both sides have them.
const movedSuffix = " moved"

func moved(time string) string { return "." + time + movedSuffix }

func compare(a, b unix.Timespec) int {
	switch x, y := a.Nano(), b.Nano(); {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}
