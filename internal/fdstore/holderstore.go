package fdstore

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// A holderStore keeps descriptors in a holder process.
type holderStore struct {
	kept
	socket string

	mu     sync.Mutex // guards the fields below
	conn   *holderConn
	closed bool
}

// Holder opens the store of the holder process at cfg.Socket. It starts the holder if none runs.
func Holder(cfg Config) (Store, error) {
	conn, err := openHolder(cfg)
	if err != nil {
		return nil, err
	}
	return &holderStore{kept: conn.kept, socket: cfg.Socket, conn: conn}, nil
}

// Put implements Store.
func (h *holderStore) Put(name string, f *os.File) error {
	err := checkName(name)
	if err == nil {
		err = withFD(f, func(fd int) error { return h.call(opPut, name, fd) })
	}
	if err != nil {
		return fmt.Errorf("keep descriptor %q in %v: %w", name, h, err)
	}
	return nil
}

// Remove implements Store.
func (h *holderStore) Remove(name string) error {
	err := checkName(name)
	if err == nil {
		err = h.call(opRemove, name, -1)
	}
	if err != nil {
		return fmt.Errorf("remove descriptor %q from %v: %w", name, h, err)
	}
	return nil
}

// call sends a request to the holder. After ErrLost the connection ends.
func (h *holderStore) call(op byte, name string, fd int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return os.ErrClosed
	}
	err := h.conn.call(op, name, fd, nil)
	if errors.Is(err, ErrLost) {
		h.conn.close()
	}
	return err
}

// Close implements Store.
func (h *holderStore) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.conn.close()
	return nil
}

func (h *holderStore) String() string { return "holder " + h.socket }
