package fusefs

import "testing"

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
