package virtiofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// A message of the VMM is handled exactly once, also when the process is killed at any instruction:
//
//  1. peekMessage reads the message with MSG_PEEK, which leaves it in the socket. conn.execute can
//     execute it again: it leads to the same state.
//  2. The reply is put into a pipe, the size of the message is the peek offset of the socket, and
//     then the record of the answer tells that there is nothing to execute any more.
//  3. splice(2) moves the reply from the pipe to the socket.
//  4. The message is removed from the socket. The kernel subtracts the removed bytes from the peek
//     offset.
//  5. The record of the answer is removed.
//
// In steps 3 and 4 the kernel keeps the progress: by the bytes in the pipe, and by the peek offset.
// The next process continues with what is left.

// A message is one message of the VMM.
type message struct {
	kind, flags uint32
	payload     []byte
	fds         []int
}

func (m *message) closeFDs() {
	closeAll(m.fds)
	m.fds = nil
}

// peekMessage waits for a message. It leaves the message in the socket.
func (c *conn) peekMessage() (*message, error) {
	head := make([]byte, messageHeader)
	if err := c.peek(head, nil); err != nil {
		return nil, err
	}
	m := &message{kind: binary.LittleEndian.Uint32(head), flags: binary.LittleEndian.Uint32(head[4:])}
	size := binary.LittleEndian.Uint32(head[8:])
	if m.flags&versionMask != messageVersion || m.flags&flagReply != 0 || size > maxMessage {
		return nil, fmt.Errorf("invalid vhost-user message %d: flags %#x, %d bytes", m.kind, m.flags, size)
	}
	all := make([]byte, messageHeader+int(size))
	if err := c.peek(all, m); err != nil {
		m.closeFDs()
		return nil, err
	}
	m.payload = all[messageHeader:]
	return m, nil
}

// peek reads len(b) bytes from the start of the socket, and adds their descriptors to m if it is
// not nil. One read ends behind the bytes that came with descriptors.
func (c *conn) peek(b []byte, m *message) error {
	for n := 0; n < len(b); {
		var oob []byte
		if m != nil {
			oob = make([]byte, unix.CmsgSpace(4*maxRegions))
		}
		var got, oobn, flags int
		var err error
		rawErr := c.raw.Read(func(fd uintptr) bool {
			if err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEEK_OFF, n); err == nil {
				got, oobn, flags, _, err = unix.Recvmsg(int(fd), b[n:], oob,
					unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
			}
			return err != unix.EAGAIN && err != unix.EINTR
		})
		if err == nil {
			err = rawErr
		}
		if err == nil && got == 0 {
			err = io.EOF
		}
		if m != nil && err == nil {
			var fds []int
			fds, err = parseRights(oob[:oobn])
			m.fds = append(m.fds, fds...)
			if err == nil && (flags&unix.MSG_CTRUNC != 0 || len(m.fds) > maxRegions) {
				err = fmt.Errorf("more than %d descriptors in a message", maxRegions)
			}
		}
		if err != nil {
			return err
		}
		n += got
	}
	return nil
}

func parseRights(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fds, err
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// receive handles messages until the connection ends.
func (c *conn) receive() error {
	if err := c.finishAnswer(); err != nil { // of an earlier process
		return err
	}
	for {
		m, err := c.peekMessage()
		if err != nil {
			return err
		}
		err = c.handle(m)
		m.closeFDs()
		if err != nil {
			return fmt.Errorf("vhost-user message %d: %w", m.kind, err)
		}
	}
}

// handle handles a message, replies, and removes the message from the socket. An error ends the
// connection.
func (c *conn) handle(m *message) error {
	reply, err := c.execute(m)
	step("executed a message")
	if reply == nil && m.flags&flagNeedReply != 0 && c.protocols&protocolReplyAck != 0 {
		reply = make([]byte, 8)
		if err != nil {
			reply[0] = 1
		}
	}
	if reply != nil {
		b := binary.LittleEndian.AppendUint32(nil, m.kind)
		b = binary.LittleEndian.AppendUint32(b, messageVersion|flagReply)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(reply)))
		reply = append(b, reply...)
	}
	a := answer(messageHeader + len(m.payload))
	if err != nil {
		a |= answerEnds
	}
	if answerErr := c.answer(a, reply); err == nil {
		err = answerErr
	}
	return err
}

// answer ends the handling of a message.
func (c *conn) answer(a answer, reply []byte) error {
	if err := c.s.state.fillPipe(reply); err != nil {
		return err
	}
	step("reply in the pipe")
	err := withDescriptor(c.socket, func(fd int) error {
		return os.NewSyscallError("setsockopt SO_PEEK_OFF",
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, int(a&^answerEnds)))
	})
	if err != nil {
		return err
	}
	c.s.state.setAnswer(a)
	return c.finishAnswer()
}

// errAnswered is the reason to end a connection whose invalid message an earlier process answered.
var errAnswered = errors.New("invalid vhost-user message")

// finishAnswer sends the rest of a reply, and removes the rest of the message from the socket.
func (c *conn) finishAnswer() error {
	s := c.s.state
	a := s.answer()
	if a == 0 {
		return nil
	}
	for {
		n, err := unix.IoctlGetInt(s.pipe[0], unix.TIOCINQ)
		if err != nil {
			return os.NewSyscallError("ioctl FIONREAD", err)
		}
		if n == 0 {
			break
		}
		rawErr := c.raw.Write(func(fd uintptr) bool {
			_, err = unix.Splice(s.pipe[0], nil, int(fd), nil, n, unix.SPLICE_F_NONBLOCK)
			return err != unix.EAGAIN && err != unix.EINTR
		})
		if err = errors.Join(rawErr, os.NewSyscallError("splice", err)); err != nil {
			return err
		}
	}
	step("reply sent")
	if err := withDescriptor(c.socket, removeMessage); err != nil {
		return err
	}
	step("message removed")
	s.setAnswer(0)
	if a&answerEnds != 0 {
		return errAnswered
	}
	return nil
}

// removeMessage removes as many bytes from a socket as its peek offset tells.
func removeMessage(fd int) error {
	b := make([]byte, messageHeader+maxMessage)
	for {
		n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF)
		if err != nil {
			return os.NewSyscallError("getsockopt SO_PEEK_OFF", err)
		}
		if n <= 0 {
			return nil
		}
		got, _, _, _, err := unix.Recvmsg(fd, b[:min(n, len(b))], nil, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return os.NewSyscallError("recvmsg", err)
		case got == 0:
			return io.EOF
		}
	}
}

// fillPipe makes a reply the content of the pipe.
func (s *State) fillPipe(reply []byte) error {
	b := make([]byte, messageHeader+maxMessage)
	for { // what a process has left that was killed before it had recorded the answer
		if n, err := unix.Read(s.pipe[0], b); n <= 0 || err != nil {
			break
		}
	}
	if len(reply) == 0 {
		return nil
	}
	_, err := unix.Write(s.pipe[1], reply)
	return os.NewSyscallError("write to the pipe of replies", err)
}

// withDescriptor calls do with the descriptor of c.
func withDescriptor(c syscall.Conn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	rawErr := raw.Control(func(fd uintptr) { err = do(int(fd)) })
	return errors.Join(rawErr, err)
}
