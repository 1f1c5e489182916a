package slotfile

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// childEnv makes this binary the process that a test kills.
const childEnv = "SLOTFILE_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		fmt.Fprintln(os.Stderr, "child:", writeAndDie(os.NewFile(3, "file")))
		os.Exit(1)
	}
	kit.Main(m)
}

// writeAndDie changes the records of an earlier process and kills itself.
func writeAndDie(d *os.File) error {
	f, err := Open(d, testSchema, testSpecs)
	if err != nil {
		return err
	}
	nodes := f.Table("nodes")
	nodes.Put(0, pad(nodes, "changed"))
	nodes.StoreUint64(0, 1, 5)
	for _, text := range []string{"new", "newer"} {
		s, err := nodes.Alloc()
		if err != nil {
			return err
		}
		nodes.Put(s, pad(nodes, text))
	}
	if _, err := nodes.Alloc(); err != nil { // a slot without record
		return err
	}
	nodes.Free(1)
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

// TestRecordsSurviveKill kills a process that has the file open and has changed records.
func TestRecordsSurviveKill(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	for _, text := range []string{"zero", "one"} {
		mustPut(t, nodes, text)
	}
	d := mustDescriptor(t, f)
	kit.Must(t, f.Close())
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), childEnv+"=1")
	c.ExtraFiles = []*os.File{d}
	c.Stderr = os.Stderr
	if err := c.Run(); c.ProcessState.Exited() {
		t.Fatalf("child ended before it was killed: %v", err)
	}
	f = mustOpen(t, d, testSpecs)
	nodes = f.Table("nodes")
	if got, want := records(t, nodes), map[Slot]string{0: "changed", 2: "new", 3: "newer"}; !maps.Equal(got, want) {
		t.Errorf("records: got %v, want %v", got, want)
	}
	if n := nodes.LoadUint64(0, 1); n != 5 || f.Restarts() != 2 {
		t.Errorf("got counter %d, %d restarts; want 5, 2", n, f.Restarts())
	}
	if a, b := mustAlloc(t, nodes), mustAlloc(t, nodes); a+b != 1+4 {
		t.Errorf("slots without a record: got %d and %d, want 1 and 4", a, b)
	}
}

// TestTornWritesKeepRecords loads a file with each part of the stores of a change. The slot has the
// record of before or after the change, and the other slots are as before.
func TestTornWritesKeepRecords(t *testing.T) {
	for name, change := range map[string]func(table *Table) (s Slot, after string){
		"Put": func(table *Table) (Slot, string) {
			table.Put(1, pad(table, "changed record"))
			return 1, "changed record"
		},
		"Free": func(table *Table) (Slot, string) { table.Free(1); return 1, "" },
		"Alloc and Put": func(table *Table) (Slot, string) {
			s := mustAlloc(t, table)
			table.Put(s, pad(table, "new record"))
			return s, "new record"
		},
	} {
		f := heapFile(t, testSpecs)
		nodes := f.Table("nodes")
		for i := range 3 {
			s := mustPut(t, nodes, fmt.Sprint("old ", i))
			nodes.Put(s, pad(nodes, fmt.Sprint("record ", i)))
		}
		steps := [][]byte{bytes.Clone(f.mem)}
		before := records(t, nodes)
		nodes.step = func() { steps = append(steps, bytes.Clone(f.mem)) }
		s, text := change(nodes)
		steps = append(steps, f.mem)
		after := maps.Clone(before)
		if after[s] = text; text == "" {
			delete(after, s)
		}
		for i, mem := range partial(steps, int(nodes.offset)+int(s)*nodes.slotBytes) {
			loaded, err := loadCopy(mem, testSpecs)
			if err != nil {
				t.Fatalf("%s, image %d: %v", name, i, err)
			}
			if got := records(t, loaded.Table("nodes")); !maps.Equal(got, before) && !maps.Equal(got, after) {
				t.Errorf("%s, image %d: got %v, want %v or %v", name, i, got, before, after)
			}
		}
	}
}

// partial returns the images of a file with each part of the changes of each step. The state, which
// is one word, may be the first change of its step.
func partial(steps [][]byte, state int) (images [][]byte) {
	for i, next := range steps[1:] {
		image := bytes.Clone(steps[i])
		copy(image[state:state+8], next[state:])
		images = append(images, bytes.Clone(image))
		for at := range next {
			if image[at] != next[at] {
				image[at] = next[at]
				images = append(images, bytes.Clone(image))
			}
		}
	}
	return images
}
