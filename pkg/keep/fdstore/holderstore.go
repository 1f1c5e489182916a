package fdstore

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
)

const (
	// restartMin and restartMax bound the pauses between attempts to replace a holder.
	restartMin, restartMax = 200 * time.Millisecond, 10 * time.Second
	// stableTime is how long a holder must run, so that the next one starts without a pause.
	stableTime = time.Minute
)

// A holderStore keeps descriptors in a holder process. It has a duplicate of each, and replaces a
// holder that ends:
//
//	       the connection ends
//	kept ----------------------> lost ---+ attempt failed: pause
//	 ^                            |  ^---+
//	 +----------------------------+
//	   a holder has all entries
//
// Close ends each state. watch makes the attempts; Verify makes one more at once.
type holderStore struct {
	kept
	socket   string
	log      hclog.Logger
	restarts atomic.Uint64
	problem  atomic.Pointer[error] // nil for none
	closing  chan struct{}
	watching sync.WaitGroup

	mu      sync.Mutex            // guards the fields below, and is held during an attempt
	cfg     Config                // of the attempts
	conn    *holderConn           // to the holder with all entries; nil in the state lost
	entries map[string]descriptor // duplicates
	closed  bool
}

// Holder opens the store of the holder process at cfg.Socket. It starts the holder if none runs, and
// again whenever the holder ends.
func Holder(cfg Config) (Store, error) {
	conn, err := openHolder(cfg)
	if err != nil {
		return nil, err
	}
	h := &holderStore{kept: conn.kept, socket: cfg.Socket, log: cfg.Log, closing: make(chan struct{}), cfg: cfg,
		conn: conn, entries: make(map[string]descriptor)}
	if h.log == nil {
		h.log = hclog.NewNullLogger()
	}
	for _, e := range h.Kept() {
		var own descriptor
		err := withFD(e.File, func(fd int) (err error) {
			own, err = duplicateOf(fd)
			return err
		})
		if err != nil {
			h.closeFiles()
			return nil, errors.Join(fmt.Errorf("open %v: %w", h, err), h.Close())
		}
		h.entries[e.Name] = own
	}
	h.watching.Go(h.watch)
	return h, nil
}

// watch waits for the end of the holder and replaces it, until Close.
func (h *holderStore) watch() {
	pause, again := pace.Backoff{Min: restartMin, Max: restartMax}, false
	for {
		conn, closed := h.connection()
		switch {
		case closed:
			return
		case conn != nil:
			began := time.Now()
			conn.awaitEnd()
			h.lose(conn)
			if time.Since(began) > stableTime {
				pause.Reset()
				again = false
			}
			continue
		case again:
			select {
			case <-time.After(pause.Next()):
			case <-h.closing:
				continue
			}
		}
		again = true
		h.mu.Lock()
		if h.conn == nil && !h.closed {
			_ = h.replace()
		}
		h.mu.Unlock()
	}
}

// connection returns the connection to the holder, nil in the state lost.
func (h *holderStore) connection() (c *holderConn, closed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.conn, h.closed
}

// lose is called after the end of the connection c.
func (h *holderStore) lose(c *holderConn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn == c && !h.closed {
		h.drop(fmt.Errorf("%v ended", h))
	}
}

// drop gives the holder up. The caller holds the lock.
func (h *holderStore) drop(reason error) {
	h.conn.close()
	h.conn = nil
	h.fail(reason)
}

// fail notes and logs why the entries are not kept. The caller holds the lock.
func (h *holderStore) fail(reason error) {
	if before := h.problem.Swap(&reason); before == nil || (*before).Error() != reason.Error() {
		h.log.Warn("descriptors are not kept; the daemon replaces the holder", "reason", reason)
	}
}

// replace gives all entries to a holder, and starts one if none runs. The caller holds the lock, in
// the state lost.
func (h *holderStore) replace() error {
	conn, err := openHolder(h.cfg)
	if err == nil {
		err = h.fill(conn)
		conn.closeFiles()
		if err != nil {
			conn.close()
		}
	}
	if err != nil {
		err = fmt.Errorf("replace %v: %w", h, err)
		h.fail(err)
		return err
	}
	h.conn = conn
	h.problem.Store(nil)
	h.log.Info("descriptors are kept again by another holder", "descriptors", len(h.entries), "restarts",
		h.restarts.Add(1))
	return nil
}

// fill makes the entries of a holder those of the store. A holder that did not answer in time may
// have old entries.
func (h *holderStore) fill(conn *holderConn) error {
	for _, e := range conn.Kept() {
		has := false
		err := withFD(e.File, func(fd int) (err error) {
			has, err = h.has(e.Name, fd)
			return err
		})
		if err == nil && !has {
			err = conn.call(opRemove, e.Name, -1, nil)
		}
		if err != nil {
			return err
		}
	}
	for name, d := range h.entries {
		if err := conn.call(opPut, name, d.fd, nil); err != nil {
			return fmt.Errorf("descriptor %q: %w", name, err)
		}
	}
	return nil
}

// has reports whether fd is the open file of the entry name.
func (h *holderStore) has(name string, fd int) (bool, error) {
	own, ok := h.entries[name]
	if !ok {
		return false, nil
	}
	d, err := describe(fd)
	if err != nil {
		return false, err
	}
	return own.isSame(d)
}

// Verify implements Store. A holder that lacks an entry, does not answer, or cannot be reached at
// its socket is replaced.
func (h *holderStore) Verify() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return os.ErrClosed
	}
	if h.conn != nil {
		err := h.check()
		if err == nil {
			return nil
		}
		h.drop(err)
	}
	if err := h.replace(); err != nil {
		return err
	}
	err := h.check()
	if err != nil {
		h.drop(err)
	}
	return err
}

// check asks the holder for its entries. The caller holds the lock, in the state kept.
func (h *holderStore) check() error {
	found := 0
	var compareErr error
	err := h.conn.call(opList, "", -1, func(name string, fd int) {
		has, err := h.has(name, fd)
		unix.Close(fd)
		if has {
			found++
		}
		compareErr = errors.Join(compareErr, err)
	})
	if err = errors.Join(err, compareErr); err != nil {
		return fmt.Errorf("list descriptors of %v: %w", h, err)
	}
	if found != len(h.entries) {
		return fmt.Errorf("%v has %d of %d descriptors", h, found, len(h.entries))
	}
	return h.checkSocket()
}

// checkSocket checks that the next daemon reaches the holder of this connection: the holder at the
// socket must refuse a second daemon because of this one.
func (h *holderStore) checkSocket() error {
	other, err := connectHolder(h.cfg)
	if err == nil {
		other.closeFiles()
		other.close()
		return fmt.Errorf("%v is not the holder of this daemon", h)
	}
	if errors.Is(err, ErrBusy) {
		return nil
	}
	return err
}

// Problem implements Store.
func (h *holderStore) Problem() error {
	if reason := h.problem.Load(); reason != nil {
		return *reason
	}
	return nil
}

// Restarts implements Store.
func (h *holderStore) Restarts() uint64 { return h.restarts.Load() }

// Put implements Store.
func (h *holderStore) Put(name string, f *os.File) error {
	err := checkName(name)
	if err == nil {
		err = withFD(f, func(fd int) error { return h.put(name, fd) })
	}
	if err != nil {
		return fmt.Errorf("keep descriptor %q in %v: %w", name, h, err)
	}
	return nil
}

func (h *holderStore) put(name string, fd int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return os.ErrClosed
	}
	own, err := duplicateOf(fd)
	if err != nil {
		return err
	}
	// The next holder refuses a duplicate too, and would then get no entries.
	for other, d := range h.entries {
		if same, err := d.isSame(own); err == nil && same && other != name {
			own.close()
			return fmt.Errorf("%w: %s", ErrDuplicate, other)
		}
	}
	if err := h.call(opPut, name, own.fd); err != nil {
		own.close()
		return err
	}
	if previous, ok := h.entries[name]; ok {
		previous.close()
	}
	h.entries[name] = own
	return nil
}

// Remove implements Store.
func (h *holderStore) Remove(name string) error {
	err := checkName(name)
	if err == nil {
		err = h.remove(name)
	}
	if err != nil {
		return fmt.Errorf("remove descriptor %q from %v: %w", name, h, err)
	}
	return nil
}

func (h *holderStore) remove(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return os.ErrClosed
	}
	if d, ok := h.entries[name]; ok {
		d.close()
		delete(h.entries, name)
	}
	return h.call(opRemove, name, -1)
}

// call sends a request to the holder. It returns nil in the state lost: the next holder gets the
// entries as they are then. The caller holds the lock.
func (h *holderStore) call(op byte, name string, fd int) error {
	if h.conn == nil {
		return nil
	}
	err := h.conn.call(op, name, fd, nil)
	if errors.Is(err, errLost) {
		h.drop(err)
		return nil
	}
	return err
}

// Close implements Store.
func (h *holderStore) Close() error {
	h.mu.Lock()
	if !h.closed {
		h.closed = true
		close(h.closing)
		if h.conn != nil {
			h.conn.close()
		}
		for _, d := range h.entries {
			d.close()
		}
	}
	h.mu.Unlock()
	h.watching.Wait()
	return nil
}

func (h *holderStore) String() string { return "holder " + h.socket }
