package fdstore

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"
)

const (
	// MaxEntries is the largest number of entries of a holder process. FileDescriptorStoreMax=
	// bounds the store of systemd.
	MaxEntries = 4096
	// MaxName is the largest length of a name in bytes. systemd allows 255 bytes, of which the
	// systemd store uses 11 for a number.
	MaxName = 240
	// defaultTimeout bounds each operation. systemd may need seconds, for example while it reloads
	// its units.
	defaultTimeout = 10 * time.Second
)

// Errors of a [Store]. The errors of the operations wrap them.
var (
	// ErrNoStore means that systemd does not keep descriptors of this process.
	ErrNoStore = errors.New("systemd keeps no descriptors of this process; set FileDescriptorStoreMax= in the unit")
	// ErrFull means that the store keeps as many descriptors as it may keep.
	ErrFull = errors.New("descriptor store is full")
	// ErrDuplicate means that the store keeps the same open file under another name.
	ErrDuplicate = errors.New("descriptor store has the same open file under another name")
	// ErrBusy means that another process uses the store.
	ErrBusy = errors.New("another daemon uses the descriptor store")
	// ErrName means that a name is not valid.
	ErrName = errors.New("name of a descriptor is not valid")
)

// An Entry is a descriptor that an earlier process left in the store.
type Entry struct {
	Name string
	File *os.File // a duplicate with FD_CLOEXEC; the caller closes it
}

// A Store keeps descriptors while no daemon runs. All methods may be called concurrently, and are
// executed one after the other. Each waits for at most a few times Config.Timeout.
type Store interface {
	// Kept returns the entries that the store had when it was opened. Every name occurs once. The
	// caller closes the files; the store keeps its duplicates until Remove.
	Kept() []Entry
	// Put keeps a duplicate of f under name. Put returns nil when the store has the descriptor, and
	// while Problem returns an error: the next holder gets the descriptor then. It replaces the
	// entry of the same name: if this process is killed, the store has the previous descriptor or
	// the new one. After an error the previous entry may be replaced or not.
	//
	// A Put of the open file that the name has already does nothing. An open file (the open file
	// description of open(2)) can have one name only: otherwise the error is ErrDuplicate.
	Put(name string, f *os.File) error
	// Remove removes the entry and returns nil if there is none.
	Remove(name string) error
	// Verify checks that the store has all entries and that the next process can get them. It
	// first tries to correct what is wrong. Its error says what Verify tried.
	Verify() error
	// Problem returns why the store may have lost its entries, nil for none. It never waits.
	Problem() error
	// Restarts returns how often a lost holder process was replaced.
	Restarts() uint64
	// Close detaches this process. The entries stay in the store.
	Close() error
	// String describes the store for the log.
	String() string
}

// Config is the configuration of a store.
type Config struct {
	// Socket is the absolute path of the socket of the holder process. Only the user of the daemon
	// may be able to write to the directory.
	Socket string
	// Command is the program and the arguments that call RunHolder.
	Command []string
	// Timeout bounds each exchange of messages with systemd or the holder. Zero means 10 s.
	Timeout time.Duration
	// Log reports the loss of a holder process and its replacement; nil for no log.
	Log hclog.Logger
}

func (c Config) timeout() time.Duration {
	if c.Timeout == 0 {
		return defaultTimeout
	}
	return c.Timeout
}

// Open opens the store of systemd if systemd keeps descriptors of this process, and otherwise that
// of a holder process. The package documentation describes how Open finds out. If Open uses systemd
// and a holder runs, Open moves the entries of the holder to systemd.
func Open(cfg Config) (Store, error) {
	s, err := openSystemd(cfg)
	if errors.Is(err, ErrNoStore) {
		return Holder(cfg)
	} else if err != nil {
		return nil, err
	}
	h, err := connectHolder(cfg)
	if isAbsent(err) {
		return s, nil
	} else if err != nil {
		return nil, errors.Join(err, s.discard())
	}
	if err := move(h, s); err != nil {
		h.closeFiles()
		h.close()
		return nil, errors.Join(err, s.discard())
	}
	h.close()
	return s, nil
}

// IsSystemd reports whether s is the store of systemd.
func IsSystemd(s Store) bool {
	_, ok := s.(*systemdStore)
	return ok
}

// move moves the entries of from to to.
func move(from *holderConn, to *systemdStore) error {
	for _, e := range from.Kept() {
		// to has the name if a daemon was killed in this loop.
		isNew := !slices.ContainsFunc(to.entries, func(k Entry) bool { return k.Name == e.Name })
		var err error
		if isNew {
			err = to.Put(e.Name, e.File)
		}
		if err == nil {
			err = from.call(opRemove, e.Name, -1, nil)
		}
		if err != nil {
			return fmt.Errorf("move descriptor %q from holder %s to %v: %w", e.Name, from.socket, to, err)
		}
		if isNew {
			to.adopt(e)
		} else {
			e.File.Close()
		}
	}
	return nil
}

// kept holds the entries that a store had when it was opened.
type kept struct{ entries []Entry }

func (k *kept) Kept() []Entry { return slices.Clone(k.entries) }

func (k *kept) adopt(e Entry) { k.entries = append(k.entries, e) }

func (k *kept) closeFiles() {
	for _, e := range k.entries {
		e.File.Close()
	}
}
