package virtiofs

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// maxStale bounds the messages in the queue of a descriptors whose descriptors are not in use.
const maxStale = 16

// descriptors keep any number of descriptors for the next process behind one: a Unix socket that a
// descriptor store keeps. Each message in the receive queue of the socket has a number and
// descriptors, which stay open as long as the message stays in the queue. The next process looks at
// the messages with MSG_PEEK, which duplicates the descriptors and leaves the queue unchanged.
//
// The queue never loses a message that is in use, also when the process is killed. A message leaves
// the queue only at its head. A head that is in use is therefore sent again to the tail before it
// is received. A process that is killed in between leaves it twice.
//
// The first message has the other end of the socket, which sends the messages. No message has the
// receiving end, so the kernel's collection of unreachable sockets in flight leaves the queue
// alone.
type descriptors struct {
	recv, send int

	mu    sync.Mutex
	queue []uint64 // numbers of the messages, the head first
	live  map[uint64]bool
	last  uint64
}

// baseMessage is the number of the first message.
const baseMessage = 1

const descriptorMessage = 8 // bytes of a message

// newDescriptors makes a socket whose queue has the sending end and base, which stay in use.
func newDescriptors(base ...int) (*descriptors, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	d := &descriptors{recv: fds[0], send: fds[1], live: make(map[uint64]bool)}
	if _, err := d.add(append([]int{d.send}, base...)...); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

// openDescriptors looks at the queue of another process. It takes over recv. files are the
// descriptors of each message. The caller closes them, except for the sending end, which is not in
// files.
func openDescriptors(recv int) (d *descriptors, files map[uint64][]int, err error) {
	d = &descriptors{recv: recv, send: -1, live: make(map[uint64]bool)}
	files = make(map[uint64][]int)
	defer func() {
		_ = unix.SetsockoptInt(recv, unix.SOL_SOCKET, unix.SO_PEEK_OFF, -1)
		if err != nil {
			for _, fds := range files {
				closeAll(fds)
			}
			d.close()
		}
	}()
	if err := unix.SetsockoptInt(recv, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0); err != nil {
		return nil, nil, os.NewSyscallError("setsockopt SO_PEEK_OFF", err)
	}
	for {
		id, fds, err := d.peek()
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			return nil, nil, fmt.Errorf("kept descriptors: %w", err)
		}
		d.queue = append(d.queue, id)
		d.last = max(d.last, id)
		if files[id] != nil {
			closeAll(fds)
			continue
		}
		files[id] = fds
		d.live[id] = true
	}
	base := files[baseMessage]
	if len(base) == 0 {
		return nil, nil, fmt.Errorf("kept descriptors: no message %d", baseMessage)
	}
	d.send, files[baseMessage] = base[0], base[1:]
	return d, files, nil
}

// peek looks at a message. The caller closes the descriptors.
func (d *descriptors) peek() (id uint64, fds []int, err error) {
	var b [descriptorMessage]byte
	oob := make([]byte, unix.CmsgSpace(4*(maxRegions+1)))
	n, oobn, flags, _, err := unix.Recvmsg(d.recv, b[:], oob, unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, nil, err
	}
	fds, err = parseRights(oob[:oobn])
	if err == nil && (n != len(b) || flags&unix.MSG_CTRUNC != 0 || len(fds) == 0) {
		err = fmt.Errorf("message of %d bytes with %d descriptors", n, len(fds))
	}
	if err != nil {
		closeAll(fds)
		return 0, nil, err
	}
	return binary.NativeEndian.Uint64(b[:]), fds, nil
}

func (d *descriptors) put(id uint64, fds []int) error {
	b := binary.NativeEndian.AppendUint64(nil, id)
	if err := unix.Sendmsg(d.send, b, unix.UnixRights(fds...), nil, unix.MSG_DONTWAIT); err != nil {
		return fmt.Errorf("keep %d descriptors: %w", len(fds), os.NewSyscallError("sendmsg", err))
	}
	d.queue = append(d.queue, id)
	return nil
}

// add keeps duplicates of descriptors. It returns the number of their message.
func (d *descriptors) add(fds ...int) (id uint64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.put(d.last+1, fds); err != nil {
		return 0, err
	}
	d.last++
	d.live[d.last] = true
	return d.last, nil
}

// drop ends the use of messages. 0 is no message. At most `most` messages that are not in use stay
// in the queue, with their descriptors.
func (d *descriptors) drop(most int, ids ...uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		delete(d.live, id)
	}
	d.shorten(most)
}

// keepOnly ends the use of all messages except for the base and ids.
func (d *descriptors) keepOnly(ids map[uint64]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.live {
		if id != baseMessage && !ids[id] {
			delete(d.live, id)
		}
	}
	d.shorten(0)
}

// shorten removes messages until at most `most` are left that are not in use or twice in the queue.
func (d *descriptors) shorten(most int) {
	for len(d.queue)-len(d.live) > most {
		head := d.queue[0]
		if d.live[head] && !slices.Contains(d.queue[1:], head) {
			id, fds, err := d.peek()
			if err != nil {
				return
			}
			err = d.put(id, fds)
			closeAll(fds)
			if err != nil {
				return // no room: try again later
			}
		}
		var b [descriptorMessage]byte
		// Without room for descriptors, the kernel closes them.
		if _, err := unix.Read(d.recv, b[:]); err != nil {
			return
		}
		d.queue = d.queue[1:]
		step("dropped descriptors")
	}
}

// file returns a duplicate of the receiving end for a descriptor store.
func (d *descriptors) file() (*os.File, error) {
	fd, err := duplicate(d.recv)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "guest"), nil
}

func (d *descriptors) close() {
	unix.Close(d.recv)
	if d.send >= 0 {
		unix.Close(d.send)
	}
}

func duplicate(fd int) (int, error) {
	to, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	return to, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
