package main

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
func (w *side) do(o *op) []field {
	setUser(o.as)
	fields, err := verbs[o.do].run(w, o)
	setUser(0)
	out := append([]field{{"errno", errnoName(err)}}, fields...)
	if o.quiet {
		return out
	}
	uses := verbs[o.do].uses
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

func errnoName(err error) string {
	var e unix.Errno
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &e):
		return unix.ErrnoName(e)
	}
	return err.Error()
}

func (w *side) lstat(what, p string) []field {
	var st unix.Stat_t
	if err := unix.Lstat(w.abs(p), &st); err != nil {
		return []field{{what + ".errno", errnoName(err)}}
	}
	if p == ".." || strings.HasPrefix(p, "../") || p == "/" {
		return nil // outside the directory, or its root
	}
	out := w.attributes(what, &st)
	if st.Mode&unix.S_IFMT != unix.S_IFLNK || what != "path" {
		return out
	}
	if err := unix.Stat(w.abs(p), &st); err != nil {
		return append(out, field{"target.errno", errnoName(err)})
	}
	return append(out, w.attributes("target", &st)...)
}

func (w *side) fstat(slot int) []field {
	var st unix.Stat_t
	fd := w.fds[slot]
	if fd < 0 {
		return nil
	}
	if err := unix.Fstat(fd, &st); err != nil {
		return []field{{"fd.errno", errnoName(err)}}
	}
	out := w.attributes("fd", &st)
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		pos, err := unix.Seek(fd, 0, unix.SEEK_CUR)
		out = append(out, field{"fd.offset", fmt.Sprintf("%d %s", pos, errnoName(err))})
	}
	return out
}

func sizeOf(st *unix.Stat_t) string { return fmt.Sprint(st.Size) }

// attributes returns the attributes that must be equal for both clients. A time from the server's
// clock depends on the time of the request. The test therefore compares only which times an
// operation changed, and whether a time comes from the server's clock.
func (w *side) attributes(what string, st *unix.Stat_t) []field {
	out := []field{
		{what + ".mode", fmt.Sprintf("%o", st.Mode)}, {what + ".nlink", fmt.Sprint(st.Nlink)},
		{what + ".uid", fmt.Sprint(st.Uid)}, {what + ".gid", fmt.Sprint(st.Gid)}, {what + ".size", sizeOf(st)},
		{what + ".mtime", timeClass(st.Mtim)},
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		out = append(out, field{what + ".rdev", fmt.Sprint(st.Rdev)})
	}
	now := observed{st.Mtim, st.Ctim}
	before, known := w.seen[st.Ino]
	w.seen[st.Ino] = now
	if !known { // the same on both sides, unless an inode number was reused
		return out
	}
	return append(out, field{what + moved("mtime"), fmt.Sprint(compare(now.mtime, before.mtime))},
		field{what + moved("ctime"), fmt.Sprint(compare(now.ctime, before.ctime))})
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
