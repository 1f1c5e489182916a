package fdstore

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// listenStart is SD_LISTEN_FDS_START of sd_listen_fds(3).
	listenStart = 3
	// spareSlots are those of the probe and of the new descriptor during a replacement.
	spareSlots = 2
	// probeName is the name of the descriptor that tests whether systemd keeps descriptors.
	probeName = "nfsrdmad-probe"
	// closeTime is how long systemd 254 and later may take to close a descriptor that it does not
	// keep, because another process closes it.
	closeTime = 100 * time.Millisecond
)

// A systemdStore keeps descriptors in the file descriptor store of systemd.
//
// systemd adds descriptors and does not replace them. It ignores an open file that it has under any
// name. So the name in systemd is NAME@NUMBER, and Put adds the new descriptor with a larger number
// before it removes the old one. If the daemon ends in between, the next daemon takes the largest
// number and removes the other.
type systemdStore struct {
	kept
	socket  string // $NOTIFY_SOCKET, or empty
	limit   int    // $FDSTORE, or 0 if it is unknown
	timeout time.Duration

	mu sync.Mutex // guards the fields below
	// stored has everything that systemd may have. Besides the entry, a name has the descriptors
	// that failed calls may have added or not removed.
	stored map[string][]stored
	closed bool
}

// A stored is one descriptor in systemd.
type stored struct {
	descriptor        // a duplicate; kcmp(2) needs it
	label      string // name in systemd
	number     uint32
	confirmed  bool // systemd has it
}

// openSystemd opens the store of systemd. It returns ErrNoStore if systemd keeps no descriptors of
// this process.
//
// openSystemd uses the variables of sd_listen_fds(3) and unsets them. The process must not start other
// programs before, because these would inherit the descriptors.
func openSystemd(cfg Config) (*systemdStore, error) {
	s := &systemdStore{socket: os.Getenv("NOTIFY_SOCKET"), timeout: cfg.timeout(), stored: make(map[string][]stored)}
	s.limit, _ = strconv.Atoi(os.Getenv("FDSTORE"))
	if err := s.inherit(); err != nil {
		return nil, errors.Join(fmt.Errorf("descriptors of systemd: %w", err), s.discard())
	}
	if s.socket == "" {
		return nil, errors.Join(fmt.Errorf("no NOTIFY_SOCKET: %w", ErrNoStore), s.discard())
	}
	err := s.notify(func(n *notifier) error {
		for name, all := range s.stored {
			keep := all[len(all)-1].label
			if err := s.remove(n, name, func(o stored) bool { return o.label != keep }); err != nil {
				return err
			}
		}
		wait := closeTime
		if s.limit > 0 {
			wait = 0
		}
		err := s.probe(n, wait)
		if !errors.Is(err, ErrFull) {
			return err
		}
		if len(s.stored) == 0 && s.limit == 0 {
			return ErrNoStore
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %v: %w", s, err), s.discard())
	}
	return s, nil
}

// inherit takes the descriptors that systemd passed: sd_listen_fds(3).
func (s *systemdStore) inherit() error {
	pid, count, names := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES")
	for _, v := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"} {
		os.Unsetenv(v)
	}
	if pid != strconv.Itoa(os.Getpid()) || count == "" {
		return nil // none, or for another process
	}
	labels := strings.Split(names, ":")
	if n, err := strconv.Atoi(count); err != nil || n != len(labels) {
		return fmt.Errorf("LISTEN_FDS=%s and LISTEN_FDNAMES with %d names", count, len(labels))
	}
	for i, label := range labels {
		fd := listenStart + i
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
		}
		if label == probeName { // of a daemon that was killed during Put
			unix.Close(fd)
			continue
		}
		d, err := describe(fd)
		if err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, err)
		}
		name, number := parseLabel(label)
		s.stored[name] = append(s.stored[name], stored{descriptor: d, label: label, number: number, confirmed: true})
	}
	for name, all := range s.stored {
		slices.SortStableFunc(all, func(a, b stored) int { return cmp.Compare(a.number, b.number) })
		fd, err := duplicate(all[len(all)-1].fd)
		if err != nil {
			return err
		}
		s.adopt(Entry{Name: name, File: os.NewFile(uintptr(fd), name)})
	}
	return nil
}

// label returns the name in systemd.
func label(name string, number uint32) string { return fmt.Sprintf("%s@%d", name, number) }

// parseLabel returns the name and the number of a label. A descriptor that this package did not
// store has the number 0.
func parseLabel(s string) (name string, number uint32) {
	i := strings.LastIndexByte(s, '@')
	n, err := strconv.ParseUint(s[i+1:], 10, 32)
	if name := s[:max(i, 0)]; err == nil && name != "" && label(name, uint32(n)) == s {
		return name, uint32(n)
	}
	return s, 0
}

func (s *systemdStore) Put(name string, f *os.File) error {
	err := checkName(name)
	if err == nil {
		err = withFD(f, func(fd int) error { return s.put(name, fd) })
	}
	if err != nil {
		return fmt.Errorf("keep descriptor %q in %v: %w", name, s, err)
	}
	return nil
}

func (s *systemdStore) put(name string, fd int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.find(name, fd)
	if err != nil {
		return err
	}
	if n := len(s.stored[name]); i >= 0 && i == n-1 && s.stored[name][i].confirmed {
		return nil
	}
	return s.notify(func(n *notifier) error {
		if i < 0 {
			if i, err = s.add(name, fd); err != nil {
				return err
			}
		}
		d := s.stored[name][i]
		err := n.send(d.fd, "FDSTORE=1", "FDPOLL=0", "FDNAME="+d.label)
		if err == nil {
			err = s.probe(n, 0)
		}
		if errors.Is(err, ErrFull) && !d.confirmed {
			return errors.Join(err, s.remove(n, name, func(o stored) bool { return o.label == d.label }))
		} else if err != nil {
			return err
		}
		s.stored[name][i].confirmed = true
		return s.remove(n, name, func(o stored) bool { return o.label != d.label })
	})
}

// find returns the index of the open file fd in the descriptors of name, or -1.
func (s *systemdStore) find(name string, fd int) (int, error) {
	d, err := describe(fd)
	if err != nil {
		return -1, err
	}
	for other, all := range s.stored {
		for i, kept := range all {
			same, err := kept.isSame(d)
			if err != nil {
				return -1, err
			}
			if same && other != name {
				return -1, fmt.Errorf("%w: %s", ErrDuplicate, other)
			} else if same {
				return i, nil
			}
		}
	}
	return -1, nil
}

// add appends a duplicate of fd to the descriptors of name and returns its index.
func (s *systemdStore) add(name string, fd int) (int, error) {
	count := 0
	for _, all := range s.stored {
		count += len(all)
	}
	if s.limit > 0 && count+spareSlots > s.limit {
		return -1, fmt.Errorf("%w: %d descriptors of FileDescriptorStoreMax=%d", ErrFull, count, s.limit)
	}
	d, err := duplicateOf(fd)
	if err != nil {
		return -1, err
	}
	number := uint32(1)
	if all := s.stored[name]; len(all) > 0 {
		number = all[len(all)-1].number + 1
	}
	s.stored[name] = append(s.stored[name], stored{descriptor: d, label: label(name, number), number: number})
	return len(s.stored[name]) - 1, nil
}

// remove removes the descriptors of name for which match is true. systemd does that before it
// executes later messages.
func (s *systemdStore) remove(n *notifier, name string, match func(stored) bool) error {
	var err error
	s.stored[name] = slices.DeleteFunc(s.stored[name], func(d stored) bool {
		if !match(d) || err != nil {
			return false
		}
		if err = n.send(-1, "FDSTOREREMOVE=1", "FDNAME="+d.label); err != nil {
			return false
		}
		d.close()
		return true
	})
	if len(s.stored[name]) == 0 {
		delete(s.stored, name)
	}
	return err
}

// probe returns nil when systemd has executed all messages before and had a free place after them.
// systemd does not report that it drops a descriptor. So probe sends one end of a pipe: if systemd
// drops this descriptor, the other end hangs up. The poll of systemd removes the descriptor if this
// process ends first.
func (s *systemdStore) probe(n *notifier, wait time.Duration) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = withFD(w, func(fd int) error { return n.send(fd, "FDSTORE=1", "FDNAME="+probeName) })
	w.Close()
	if err == nil {
		err = n.barrier()
	}
	if err != nil {
		return err
	}
	dropped := hungUp(r, wait)
	if err := n.send(-1, "FDSTOREREMOVE=1", "FDNAME="+probeName); err != nil {
		return err
	}
	if dropped {
		return ErrFull
	}
	return nil
}

func (s *systemdStore) Remove(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := checkName(name)
	if err == nil {
		err = s.notify(func(n *notifier) error {
			if err := s.remove(n, name, func(stored) bool { return true }); err != nil {
				return err
			}
			return n.barrier()
		})
	}
	if err != nil {
		return fmt.Errorf("remove descriptor %q from %v: %w", name, s, err)
	}
	return nil
}

// Verify implements Store. Put has asked systemd, which keeps what it has.
func (s *systemdStore) Verify() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return os.ErrClosed
	}
	for name, all := range s.stored {
		if !all[len(all)-1].confirmed {
			return fmt.Errorf("systemd did not confirm that it keeps descriptor %q", name)
		}
	}
	return nil
}

// Problem implements Store: systemd lives as long as its store.
func (s *systemdStore) Problem() error { return nil }

// Restarts implements Store.
func (s *systemdStore) Restarts() uint64 { return 0 }

// notify calls do with a connection to systemd.
func (s *systemdStore) notify(do func(*notifier) error) error {
	if s.closed {
		return os.ErrClosed
	}
	n, err := dialNotify(s.socket, s.timeout)
	if err != nil {
		return err
	}
	defer n.close()
	return do(n)
}

func (s *systemdStore) String() string { return "systemd" }

func (s *systemdStore) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, all := range s.stored {
		for _, d := range all {
			d.close()
		}
	}
	s.stored, s.closed = nil, true
	return nil
}

func (s *systemdStore) discard() error {
	s.closeFiles()
	return s.Close()
}
