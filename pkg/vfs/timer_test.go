package vfs

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestReopenExpires checks that a thread's second open is expected for reopenTime only.
func TestReopenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pid = 7
		var o reopens
		o.expect(pid)
		time.Sleep(reopenTime - time.Nanosecond)
		if o.lookup(pid) == nil {
			t.Error("lookup before the time has passed: got nil, want a reopen")
		}
		time.Sleep(time.Nanosecond)
		if o.lookup(pid) != nil {
			t.Error("lookup after the time has passed: got a reopen, want nil")
		}
		o.expect(pid)
		for range reopenLookups {
			if o.lookup(pid) == nil {
				t.Fatal("lookup within the limit: got nil, want a reopen")
			}
		}
		if o.lookup(pid) != nil {
			t.Error("lookup above the limit: got a reopen, want nil")
		}
	})
}

// TestAwaitHiddenRemovals checks how long rmdir waits for hidden names: not at all while one of
// their files is open, hiddenTimeout after close(2), and until the end of removals that have begun.
func TestAwaitHiddenRemovals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs, dir := &FS{}, &inode{}
		r, cancel := newRequest(t)
		fs.inodes.addHidden(dir)
		h := &fileHandle{ino: &inode{}}
		h.ino.setSilly(&sillyName{dir: dir})
		fs.handles.files = map[uint64]*fileHandle{1: h}
		start := time.Now()
		if fs.awaitHiddenRemovals(r, dir) || time.Since(start) != 0 {
			t.Errorf("wait for an open file: got %v, want 0s and false", time.Since(start))
		}
		h.flushed.Store(true)
		if fs.awaitHiddenRemovals(r, dir) || time.Since(start) != hiddenTimeout {
			t.Errorf("wait for a file after close: got %v, want %v and false", time.Since(start), hiddenTimeout)
		}
		fs.inodes.beginHiddenRemoval(dir)
		time.AfterFunc(time.Minute, func() { fs.inodes.endHiddenRemoval(dir) })
		start = time.Now()
		if !fs.awaitHiddenRemovals(r, dir) || time.Since(start) != time.Minute {
			t.Errorf("wait for a removal of 1m: got %v, want 1m and true", time.Since(start))
		}
		if fs.awaitHiddenRemovals(r, &inode{}) {
			t.Error("wait in a directory without hidden names: got true, want false")
		}
		fs.inodes.addHidden(dir)
		cancel()
		start = time.Now()
		if fs.awaitHiddenRemovals(r, dir) || time.Since(start) != 0 {
			t.Errorf("wait of an interrupted request: got %v, want 0s and false", time.Since(start))
		}
	})
}

// TestUnpinAllKeepsExpectedOpens checks that rmdir(2) of one thread ends the pins of another one,
// and not that its next open is the last attempt of the kernel. The open would otherwise return
// ESTALE to the program, although the file exists.
func TestUnpinAllKeepsExpectedOpens(t *testing.T) {
	var o reopens
	o.expect(7)
	e := o.lookup(7)
	if e == nil {
		t.Fatal("lookup: got no expected open")
	}
	o.unpinAll()
	select {
	case <-e.done:
	default:
		t.Error("the pins have not ended")
	}
	if again := o.lookup(7); again != e {
		t.Errorf("second lookup: got %v, want %v", again, e)
	}
	if last := o.finish(7); !last {
		t.Error("open: got that the kernel repeats it, want that it is the last attempt")
	}
	if last := o.finish(7); last {
		t.Error("next open: got that it is the last attempt, want that the kernel repeats it")
	}
}
