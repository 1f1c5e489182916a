package slotfile

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"
)

const (
	killRole = "kill"

	killWriters = 4
	killSlots   = 400
	// killChunk makes the table grow often.
	killChunk = 5
)

// A large record makes it likely that a kill hits a store to a record.
var killSpecs = []TableSpec{{Name: "nodes", RecordBytes: 1501, Counters: 1, MaxSlots: killSlots}}

// child runs a child process of a test until the parent kills it. It has the file in descriptor 3,
// the model in descriptor 4, and a pipe to the parent in descriptor 5.
func child(role string) {
	file, shared, pipe := os.NewFile(3, "file"), os.NewFile(4, "model"), os.NewFile(5, "pipe")
	var err error
	switch role {
	case killRole:
		err = writeUntilKilled(file, shared, pipe)
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	fmt.Fprintln(os.Stderr, "child:", err)
	os.Exit(3)
}

func writeUntilKilled(file, shared, pipe *os.File) error {
	f, err := Open(file, testSchema, killSpecs)
	if err != nil {
		return err
	}
	table := f.Table("nodes")
	table.chunk = killChunk
	m, err := mapModel(shared, killSlots)
	if err != nil {
		return err
	}
	writers, err := newWriters(table, m, killWriters, killSlots)
	if err != nil {
		return err
	}
	if _, err := pipe.Write([]byte{1}); err != nil {
		return err
	}
	failed := make(chan error)
	var work sync.WaitGroup
	for _, w := range writers {
		work.Go(func() {
			for {
				if err := w.step(); err != nil {
					failed <- err
				}
			}
		})
	}
	return <-failed
}

// newWriters divides the records of the table among n writers.
func newWriters(table *Table, m *model, n, slots int) ([]*writer, error) {
	var all []*writer
	for range n {
		w := &writer{table: table, model: m, rng: rand.New(rand.NewPCG(rand.Uint64(), 1)), most: slots / n}
		w.record = make([]byte, table.record)
		all = append(all, w)
	}
	i := 0
	err := table.Each(func(s Slot, _ []byte) {
		all[i%n].own = append(all[i%n].own, s)
		i++
	})
	return all, err
}

// startChild starts the test binary as a child with that role. The caller kills it.
func startChild(t *testing.T, role string, file, shared *os.File) (*exec.Cmd, *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), childEnv+"="+role)
	c.ExtraFiles = []*os.File{file, shared, w}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		r.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return c, r
}

// TestRecordsSurviveKill kills a process that writes at a random time, compares the file with what
// the process told about its operations, and starts the next process on the same file.
func TestRecordsSurviveKill(t *testing.T) {
	rounds, perFile := 200, 20
	if testing.Short() {
		rounds, perFile = 20, 10
	}
	var (
		f      *File
		file   *os.File
		shared *os.File
		m      *model
		ops    uint64
		early  int
	)
	for round := range rounds {
		if round%perFile == 0 {
			f = mustCreate(t, killSpecs)
			file = mustDescriptor(t, f)
			shared, m = newModel(t, killSlots)
		}
		before := f.Restarts()
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		c, pipe := startChild(t, killRole, file, shared)
		delay := rand.N(3 * time.Millisecond)
		if round%4 == 0 {
			delay = rand.N(30 * time.Millisecond) // perhaps before Open
		} else if _, err := pipe.Read(make([]byte, 1)); err != nil {
			t.Errorf("round %d: the child did not start: %v", round, err)
		}
		time.Sleep(delay)
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); c.ProcessState.Exited() {
			t.Fatalf("round %d: child ended before it was killed: %v", round, err)
		}
		pipe.Close()

		f = mustOpen(t, file, killSpecs)
		restarts := f.Restarts() - before
		if restarts == 1 {
			early++
		}
		if restarts < 1 || restarts > 2 {
			t.Errorf("round %d: restart count increased by %d, want 1 or 2", round, restarts)
		}
		if err := m.check(f.Table("nodes"), true); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if round%perFile == perFile-1 {
			ops += m.ops.Load()
			f.Close()
		}
	}
	t.Logf("%d rounds, %d operations; %d kills before Open was complete", rounds, ops, early)
	if ops < uint64(rounds) {
		t.Errorf("got %d operations in %d rounds", ops, rounds)
	}
}
