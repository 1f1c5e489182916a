package virtiofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Layout of a split virtqueue (virtio 1.2 §2.7).
const (
	descSize      = 16
	ringHeader    = 4 // flags and idx
	ringTail      = 2 // used_event or avail_event
	availElement  = 2
	usedElement   = 8
	descNext      = 1 // VIRTQ_DESC_F_NEXT
	descWrite     = 2 // VIRTQ_DESC_F_WRITE
	descIndirect  = 4 // VIRTQ_DESC_F_INDIRECT
	noInterrupt   = 1 // VIRTQ_AVAIL_F_NO_INTERRUPT
	descAlign     = 16
	usedAlign     = 4
	indexPosition = 16 // of idx in the first word of a ring, in bits
)

// addresses of a queue in the VMM.
type addresses struct{ desc, avail, used uint64 }

// A ring is one virtqueue.
//
//	stopped --SET_VRING_KICK and SET_VRING_ENABLE--> running --GET_VRING_BASE--> stopped
//	running --violation--> broken --GET_VRING_BASE--> stopped
//
// Messages of the VMM come one after the other. While the ring runs, its goroutine owns next.
type ring struct {
	c        *conn
	index    int
	requests sync.WaitGroup // in progress

	progress progress // in shared memory
	keptKick uint64
	keptCall uint64

	kick    *os.File
	enabled bool
	stopped chan struct{} // closed when the goroutine has ended; nil while the ring is stopped
	next    uint16        // index of the next request in the available ring
	base    bool          // next is valid

	mu                sync.Mutex // guards the following fields and the used ring
	size              int        // descriptors, a power of 2
	at                addresses
	features          uint64
	mem               *memory // has a reference; nil before SET_MEM_TABLE
	desc, avail, used buffer  // nil without addresses
	direct            [1]buffer
	indirect          []buffer // indirect table of the latest request
	usedIdx           uint16
	call              *os.File // nil for a guest that polls
	busy              []bool   // by the first descriptor of requests in progress
	broken            error    // why the ring does not run any more
}

// oneInterrupt is what an eventfd adds to its counter.
var oneInterrupt = binary.LittleEndian.AppendUint64(nil, 1)

func newRing(c *conn, index int) *ring {
	return &ring{c: c, index: index, progress: c.s.state.progress(index)}
}

var errRuns = errors.New("the queue runs")

func (r *ring) setFeatures(v uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.features = v
	if v&featureProtocol == 0 {
		r.enabled = true // there is no SET_VRING_ENABLE
	}
}

func (r *ring) setSize(n uint32) error {
	if r.stopped != nil {
		return errRuns
	}
	if n == 0 || n > maxRingSize || n&(n-1) != 0 {
		return fmt.Errorf("queue %d: %d descriptors; want a power of 2 up to %d", r.index, n, maxRingSize)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.size, r.desc, r.avail, r.used = int(n), nil, nil, nil
	return nil
}

func (r *ring) setBase(v uint32) error {
	if r.stopped != nil {
		return errRuns
	}
	r.base = true
	r.setNext(uint16(v))
	return nil
}

// setNext sets the index of the next request.
func (r *ring) setNext(i uint16) {
	r.next = i
	r.progress.store(counterNext, uint64(i))
}

// record returns the record of the ring for the next process.
func (r *ring) record() ringRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := ringRecord{index: uint32(r.index), size: uint32(r.size), at: r.at, kick: r.keptKick, call: r.keptCall}
	if r.enabled {
		rec.enabled = 1
	}
	if r.base {
		rec.base = 1
	}
	return rec
}

func (r *ring) setAddresses(at addresses) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at = at
	return r.locate()
}

func (r *ring) setMemory(m *memory) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mem != nil {
		r.mem.release()
	}
	r.mem = m.hold()
	if r.at == (addresses{}) {
		return nil
	}
	if err := r.locate(); err != nil {
		if r.stopped != nil {
			return err
		}
		r.desc, r.avail, r.used = nil, nil, nil // addresses before a reset of the guest
	}
	return nil
}

// locate finds the queue in the guest's memory. The caller holds mu.
func (r *ring) locate() (err error) {
	if r.mem == nil || r.size == 0 {
		return fmt.Errorf("queue %d: addresses without memory or size", r.index)
	}
	n := uint64(r.size)
	var desc, avail, used buffer
	if desc, err = r.mem.atUser(r.at.desc, n*descSize, descAlign); err == nil {
		// The words with flags and idx are read at once.
		avail, err = r.mem.atUser(r.at.avail, ringHeader+n*availElement+ringTail, usedAlign)
	}
	if err == nil {
		used, err = r.mem.atUser(r.at.used, ringHeader+n*usedElement+ringTail, usedAlign)
	}
	if err != nil {
		return fmt.Errorf("queue %d: %w", r.index, err)
	}
	r.desc, r.avail, r.used = desc, avail, used
	return nil
}

// setCall takes over f. kept is the message of the descriptor, see descriptors. It interrupts the
// guest once, because earlier completions may have used the descriptor before.
func (r *ring) setCall(f *os.File, kept uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.call != nil {
		r.call.Close()
	}
	r.call, r.keptCall = f, kept
	r.signal()
}

// setKick takes over f.
func (r *ring) setKick(f *os.File, kept uint64) error {
	r.stop()
	r.kick, r.keptKick = f, kept
	r.breakWith(nil)
	return r.start()
}

func (r *ring) enable(on bool) error {
	if r.enabled = on; on {
		return r.start()
	}
	if r.stopped != nil {
		r.halt()
	}
	return nil
}

// start runs the ring if it is complete.
func (r *ring) start() error {
	if r.stopped != nil || r.kick == nil || !r.enabled {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.desc == nil {
		return fmt.Errorf("queue %d: started without addresses", r.index)
	}
	if err := guarded(func() { r.usedIdx = uint16(atomic.LoadUint32(r.used.word(0)) >> indexPosition) }); err != nil {
		return fmt.Errorf("queue %d: %w", r.index, err)
	}
	if len(r.busy) != r.size {
		r.busy = make([]bool, r.size)
	}
	_ = r.kick.SetReadDeadline(noDeadline)
	r.stopped = make(chan struct{})
	go r.run(r.kick, r.stopped)
	return nil
}

// halt ends the goroutine of a running ring.
func (r *ring) halt() {
	_ = r.kick.SetReadDeadline(longAgo)
	<-r.stopped
	r.stopped = nil
}

// stop ends the goroutine, and closes the kick descriptor. Requests in progress continue.
func (r *ring) stop() {
	if r.stopped != nil {
		r.halt()
	}
	if r.kick != nil {
		r.kick.Close()
		r.kick, r.keptKick = nil, 0
	}
}

// close releases a ring that is stopped and has no requests.
func (r *ring) close() {
	r.requests.Wait()
	r.setCall(nil, 0)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mem != nil {
		r.mem.release()
		r.mem = nil
	}
}

// run handles requests after each kick, until the deadline of kick.
func (r *ring) run(kick *os.File, stopped chan<- struct{}) {
	defer close(stopped)
	defer r.failOnPanic()
	count := make([]byte, 8)
	for {
		if err := r.takeAll(); err != nil {
			r.fail(err)
			return
		}
		if _, err := kick.Read(count); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				r.fail(fmt.Errorf("read of the kick descriptor: %w", err))
			}
			return
		}
	}
}

// failOnPanic makes a panic end the ring instead of the process.
func (r *ring) failOnPanic() {
	if v := recover(); v != nil {
		r.fail(fmt.Errorf("panic: %v\n%s", v, debug.Stack()))
	}
}

// fail ends the ring after a violation. The guest must reset the device.
func (r *ring) fail(err error) {
	r.mu.Lock()
	r.broken = err
	r.mu.Unlock()
	r.c.s.log.Error("virtqueue stopped: the guest broke the rules of virtio; reset the guest", "queue", r.index,
		"error", err)
}

// breakWith makes the ring fail with its next kick. nil ends this.
func (r *ring) breakWith(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.broken = err
}

// takeAll begins all requests that the guest has made available.
func (r *ring) takeAll() error {
	for {
		q, err := r.take()
		if q == nil || err != nil {
			return err
		}
		if err := q.begin(); err != nil {
			return err
		}
	}
}

// take returns the next request, or nil if there is none.
func (r *ring) take() (*request, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken != nil {
		return nil, r.broken
	}
	var idx, head uint16
	err := guarded(func() {
		idx = uint16(atomic.LoadUint32(r.avail.word(0)) >> indexPosition)
		head = r.avail.uint16(ringHeader + availElement*(int(r.next)&(r.size-1)))
	})
	if err != nil {
		return nil, err
	}
	pending := idx - r.next
	switch {
	case pending == 0:
		return nil, nil
	case int(pending) > r.size:
		return nil, fmt.Errorf("available index %d is more than %d after %d", idx, r.size, r.next)
	case int(head) >= r.size:
		return nil, fmt.Errorf("descriptor %d of %d", head, r.size)
	case r.busy[head]:
		return nil, fmt.Errorf("descriptor %d is in use", head)
	}
	q := r.c.newRequest(r, head)
	q.number = r.c.s.last.Add(1)
	if err := r.readChain(q); err != nil {
		return nil, err
	}
	// A process that is killed in between has the request both as one in progress and as the next.
	r.progress.store(int(head), q.number)
	step("request in progress")
	r.setNext(r.next + 1)
	step("request taken")
	r.hold(q)
	return q, nil
}

// hold begins the use of the ring and the memory by a request. The caller holds mu.
func (r *ring) hold(q *request) {
	r.busy[q.head] = true
	r.requests.Add(1)
	q.mem = r.mem.hold()
}

// A descriptor is one entry of a descriptor table.
type descriptor struct {
	addr        uint64
	size        uint32
	flags, next uint16
}

// readDescriptor reads one entry of a table.
func readDescriptor(table []buffer, i int) (d descriptor, err error) {
	var b [descSize]byte
	rest := i * descSize
	for len(table) > 1 && rest >= len(table[0]) {
		rest -= len(table[0])
		table = table[1:]
	}
	if len(table) == 0 || rest+descSize > len(table[0]) {
		return d, fmt.Errorf("descriptor %d crosses the end of a memory region", i)
	}
	if err := copyFrom(b[:], []buffer{table[0][rest : rest+descSize]}); err != nil {
		return d, err
	}
	return descriptor{binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint32(b[8:]),
		binary.LittleEndian.Uint16(b[12:]), binary.LittleEndian.Uint16(b[14:])}, nil
}

// readChain reads the descriptors of a request, each one once. The caller holds mu.
func (r *ring) readChain(q *request) error {
	r.direct[0] = r.desc
	table, entries, i, indirect := r.direct[:], r.size, int(q.head), false
	for n := 0; ; n++ {
		if i >= entries || n >= entries || n >= maxRingSize {
			return fmt.Errorf("request at descriptor %d: chain leaves its table of %d, or has a loop", q.head, entries)
		}
		d, err := readDescriptor(table, i)
		if err != nil {
			return err
		}
		if d.flags&descIndirect != 0 {
			if indirect || d.flags&descNext != 0 || r.features&featureIndirect == 0 || d.size == 0 ||
				d.size%descSize != 0 || d.size/descSize > maxRingSize {
				return fmt.Errorf("request at descriptor %d: invalid indirect table of %d bytes, flags %#x", q.head,
					d.size, d.flags)
			}
			if r.indirect, err = r.mem.appendBuffers(r.indirect[:0], d.addr, uint64(d.size)); err != nil {
				return fmt.Errorf("request at descriptor %d: %w", q.head, err)
			}
			table = r.indirect
			entries, i, indirect, n = int(d.size/descSize), 0, true, -1
			continue
		}
		if err := r.addBuffer(q, &d); err != nil {
			return fmt.Errorf("request at descriptor %d: %w", q.head, err)
		}
		if d.flags&descNext == 0 {
			return nil
		}
		i = int(d.next)
	}
}

// addBuffer adds the buffer of a descriptor to a request.
func (r *ring) addBuffer(q *request, d *descriptor) (err error) {
	if d.flags&descWrite != 0 {
		q.out, err = r.mem.appendBuffers(q.out, d.addr, uint64(d.size))
		return err
	}
	if len(q.out) > 0 {
		return errors.New("a buffer to read follows one to write")
	}
	q.in, err = r.mem.appendBuffers(q.in, d.addr, uint64(d.size))
	return err
}

// complete gives a request back to the guest after n bytes of its buffers were written. The record
// of the completion tells the next process to repeat what is left of it.
func (r *ring) complete(q *request, n int) {
	step("request handled")
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.used == nil || int(q.head) >= len(r.busy) {
		r.progress.store(int(q.head), 0)
		return // the VMM has changed the queue meanwhile
	}
	r.busy[q.head] = false
	d := completionOf(q.head, r.usedIdx, n)
	r.progress.store(counterCompleting, uint64(d))
	step("completion recorded")
	interrupt, err := r.publish(d)
	r.progress.store(int(q.head), 0)
	step("request not in progress")
	r.progress.store(counterCompleting, 0)
	step("request completed")
	if err != nil {
		r.broken = err // as breakWith
		return
	}
	if interrupt {
		r.signal()
	}
}

// A completion is a request that is given back to the guest: the number of bytes plus 1, the index
// in the used ring, and the first descriptor. 0 is none.
type completion uint64

func completionOf(head, used uint16, n int) completion {
	return completion(uint64(n+1)<<32 | uint64(used)<<16 | uint64(head))
}

// publish gives a request back to the guest, and tells whether the guest wants an interrupt. It can
// be repeated until the next completion begins. The caller holds mu.
func (r *ring) publish(d completion) (interrupt bool, err error) {
	head, used, n := uint16(d), uint16(d>>16), uint32(d>>32)-1
	err = guarded(func() {
		at := ringHeader + usedElement*(int(used)&(r.size-1))
		binary.LittleEndian.PutUint32(r.used[at:], uint32(head))
		binary.LittleEndian.PutUint32(r.used[at+4:], n)
		step("used element")
		r.usedIdx = used + 1
		// The guest sees the element before the index, and this process reads the flags after the
		// guest can see the index (virtio 1.2 §2.7.7.2).
		atomic.StoreUint32(r.used.word(0), uint32(r.usedIdx)<<indexPosition)
		interrupt = atomic.LoadUint32(r.avail.word(0))&noInterrupt == 0
	})
	step("published")
	return interrupt, err
}

// signal interrupts the guest. The caller holds mu.
func (r *ring) signal() {
	if r.call != nil {
		_, _ = r.call.Write(oneInterrupt) // EAGAIN: the counter is full, so an interrupt is pending
	}
}
