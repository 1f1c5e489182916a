package virtiofs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// runLoad runs workers and messages until the planned kills are over.
func (s *keptShare) runLoad(n, workers int) {
	t := s.t
	v := (&device{socket: s.order.Socket}).connect(t)
	v.mount()
	v.queues[1].create(1, "begin")
	done := make(chan struct{})
	var collectors, all sync.WaitGroup
	var mu sync.Mutex
	loads := []*load{{v: v, q: v.queues[1], mu: &mu}, {v: v, q: v.queues[2], mu: &mu}}
	failed := func() bool { return loads[0].failed.Load() != nil || loads[1].failed.Load() != nil }
	var errMessages atomic.Pointer[error]
	over := func() bool {
		return s.kills.Load() >= int64(n) || t.Failed() || failed() || errMessages.Load() != nil
	}
	for i := range workers {
		l := loads[i%len(loads)]
		w := &worker{load: l, slot: i, name: fmt.Sprintf("w%d", i)}
		rng := rand.New(rand.NewPCG(1, uint64(i)))
		all.Go(func() {
			w.begin()
			for !over() {
				w.round(rng)
			}
			if !failed() {
				w.end(s.dir)
			}
		})
	}
	for _, l := range loads {
		collectors.Go(func() { l.collect(done) })
	}
	stopMessages := make(chan struct{})
	var messages sync.WaitGroup
	messages.Go(func() {
		if err := v.messages(v.queues[0], stopMessages); err != nil {
			errMessages.Store(&err)
		}
	})
	all.Wait()
	close(stopMessages)
	messages.Wait()
	close(done)
	for _, l := range loads {
		_, _ = unix.Write(l.q.call, le64(1))
	}
	collectors.Wait()
	for _, l := range loads {
		if text := l.failed.Load(); text != nil {
			t.Error(*text)
		}
	}
	if err := errMessages.Load(); err != nil {
		t.Errorf("messages of the VMM: %v", *err)
	}
	must(t, v.conn.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	if n, err := v.conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("another reply of the device: %d bytes, %v", n, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t.Logf("%d kills; at steps: %v", s.kills.Load(), s.at)
}

// TestKillAtRandomTimes kills the process of a share under load, also while it continues the share.
func TestKillAtRandomTimes(t *testing.T) {
	n := kills(t, 25)
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	s := newKeptShare(t, n, func(int) killPlan {
		return killPlan{delay: time.Duration(rng.IntN(250)) * time.Millisecond}
	})
	s.runLoad(n, 8)
}

// TestKillAtSteps kills the process of a share between two steps of its operations.
func TestKillAtSteps(t *testing.T) {
	steps := []string{"answer", "completion recorded", "dropped descriptors", "executed a message", "message removed",
		"published", "record of a queue", "record of the share", "reply in the pipe", "reply sent", "request completed",
		"request handled", "request in progress", "request not in progress", "request taken", "used element"}
	n := kills(t, 3*len(steps))
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 2))
	s := newKeptShare(t, n, func(kill int) killPlan {
		return killPlan{step: steps[kill%len(steps)], count: 1 + rng.IntN(20)}
	})
	// With one request at a time on each queue, no other request hides a lost interrupt.
	s.runLoad(n, 2)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, step := range steps {
		if s.at[step] == 0 {
			t.Errorf("no kill at step %q", step)
		}
	}
}

// TestDamagedMemoryEndsConnection truncates the file of the guest's memory before the process is
// killed. The next process ends the connection, and serves another VMM.
func TestDamagedMemoryEndsConnection(t *testing.T) {
	s := newKeptShare(t, 0, nil)
	d := &device{socket: s.order.Socket, unsealed: true}
	v := d.connect(t)
	must(t, unix.Ftruncate(v.memfd, slotBase))
	must(t, os.WriteFile(filepath.Join(s.dir, "begin"), nil, 0o644))
	if n, err := v.conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("connection: got %d bytes, %v, want its end", n, err)
	}
	next := d.connect(t)
	next.mount()
	if _, errno := next.queues[1].lookup(1, "begin"); errno != 0 {
		t.Errorf("lookup of another VMM: %v", errno)
	}
}

// TestDamagedRequestStopsQueue changes the descriptor of a request that waits when the process is
// killed. The next process stops the queue of the request, and the other queue goes on.
func TestDamagedRequestStopsQueue(t *testing.T) {
	s := newKeptShare(t, 0, nil)
	v := (&device{socket: s.order.Socket}).connect(t)
	v.mount()
	q, broken := v.queues[1], v.queues[2]
	broken.prepare(1, encode(v, opLookup, 1, fuse.InHeader{}, "wait\x00"), 256)
	broken.offer(2)
	if _, errno := broken.lookup(1, "none"); errno != unix.ENOENT { // the one before is in progress
		t.Fatalf("lookup: got %v, want ENOENT", errno)
	}
	putDescriptor(broken.desc(2), 4096, 64, 0, 0)
	must(t, os.WriteFile(filepath.Join(s.dir, "begin"), nil, 0o644)) // the test kills the process
	if head, size, ok := broken.used(); !ok || head != 2 || size != 0 {
		t.Fatalf("damaged request: got descriptor %d, %d bytes, %v, want 2, 0 bytes", head, size, ok)
	}
	if _, errno := q.lookup(1, "begin"); errno != 0 {
		t.Errorf("lookup on the other queue: %v", errno)
	}
	broken.prepare(1, encode(v, opLookup, 1, fuse.InHeader{}, "begin\x00"), 256)
	broken.offer(2) // slot 0 is for the other queue
	if _, errno := q.lookup(1, "begin"); errno != 0 {
		t.Errorf("second lookup on the other queue: %v", errno)
	}
	if base := broken.stop(); base != 2 {
		t.Errorf("index of the stopped queue: got %d, want 2", base)
	}
	broken.start(2)
	head, size, ok := broken.used()
	if !ok || head != 2 {
		t.Fatalf("after a reset of the queue: got descriptor %d, %v, want 2", head, ok)
	}
	if _, errno := broken.reply(1, size); errno != 0 {
		t.Errorf("lookup after a reset of the queue: %v", errno)
	}
}
