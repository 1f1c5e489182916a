//go:build rdmacore && cgo && linux

package rdmacore

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// A cmEvent is a connection event.
type cmEvent struct {
	kind               eventKind
	status             int
	id                 *C.struct_rdma_cm_id
	responderResources uint8
	initiatorDepth     uint8
	private            []byte
}

// A channel delivers the connection events of all connections of the process. It exists while there
// is one.
type channel struct {
	c    *C.struct_rdma_event_channel
	file *os.File // stands for it in Go's poller
	done chan struct{}

	mu  sync.Mutex
	ids map[*C.struct_rdma_cm_id]func(*cmEvent) // guarded by mu
}

// events is the channel that there is.
var events struct {
	mu    sync.Mutex
	ch    *channel // guarded by mu
	users int      // guarded by mu
}

// handling is held while librdmacm handles an event, in which it may use the queue pair of the
// connection, and while a queue pair is destroyed.
var handling sync.Mutex

// openChannel returns the channel; each call needs its leave.
func openChannel() (*channel, error) {
	events.mu.Lock()
	defer events.mu.Unlock()
	if events.users == 0 {
		ch := &channel{done: make(chan struct{}), ids: make(map[*C.struct_rdma_cm_id]func(*cmEvent))}
		if err := errnoOf(C.rc_open_channel(&ch.c)); err != nil {
			return nil, fmt.Errorf("open connection event channel: %w", err)
		}
		var err error
		if ch.file, err = waitable(ch.c.fd, "rdma_cm"); err != nil {
			C.rc_close_channel(ch.c)
			return nil, fmt.Errorf("watch connection event channel: %w", err)
		}
		events.ch = ch
		go ch.run()
	}
	events.users++
	return events.ch, nil
}

// leave gives the channel up. With the last user it ends. Not from a handler of events.
func (ch *channel) leave() {
	events.mu.Lock()
	defer events.mu.Unlock()
	if events.users--; events.users > 0 {
		return
	}
	ch.file.SetReadDeadline(time.Unix(1, 0))
	<-ch.done
	ch.file.Close()
	C.rc_close_channel(ch.c)
	events.ch = nil
}

// createID makes a connection id whose events go to handle, which must not block.
func (ch *channel) createID(handle func(*cmEvent)) (*C.struct_rdma_cm_id, error) {
	var id *C.struct_rdma_cm_id
	if err := errnoOf(C.rc_create_id(ch.c, &id)); err != nil {
		return nil, fmt.Errorf("create connection id: %w", err)
	}
	ch.adopt(id, handle)
	return id, nil
}

// adopt has the events of id go to handle.
func (ch *channel) adopt(id *C.struct_rdma_cm_id, handle func(*cmEvent)) {
	ch.mu.Lock()
	ch.ids[id] = handle
	ch.mu.Unlock()
}

// destroyID ends a connection id, and with it its events.
func (ch *channel) destroyID(id *C.struct_rdma_cm_id) error {
	ch.mu.Lock()
	delete(ch.ids, id)
	ch.mu.Unlock()
	return errnoOf(C.rc_destroy_id(id))
}

// run reads events until the channel ends.
func (ch *channel) run() {
	defer close(ch.done)
	raw, err := ch.file.SyscallConn()
	if err != nil {
		return
	}
	ev := new(C.struct_rc_event)
	for {
		var ret C.int
		err := raw.Read(func(uintptr) bool {
			handling.Lock()
			ret = C.rc_next_event(ch.c, ev)
			handling.Unlock()
			return ret != -C.int(syscall.EAGAIN)
		})
		if err != nil {
			return
		}
		if ret == 0 {
			ch.deliver(ev)
			C.rc_ack_event(ev)
		} else if ret != -C.int(syscall.EINTR) {
			// an event that librdmacm could not handle; it says the rest with another
			time.Sleep(time.Millisecond)
		}
	}
}

func (ch *channel) deliver(ev *C.struct_rc_event) {
	target := ev.id
	if eventKind(ev.kind) == evConnectRequest {
		target = ev.listener
	}
	ch.mu.Lock()
	handle := ch.ids[target]
	ch.mu.Unlock()
	e := &cmEvent{kind: eventKind(ev.kind), status: int(ev.status), id: ev.id,
		responderResources: uint8(ev.responder_resources), initiatorDepth: uint8(ev.initiator_depth)}
	if ev.private_len > 0 {
		e.private = C.GoBytes(unsafe.Pointer(&ev.private_data[0]), C.int(ev.private_len))
	}
	switch {
	case handle != nil:
		handle(e)
	case e.kind == evConnectRequest: // the listener has just closed
		C.rc_reject(e.id, nil, 0)
		C.rc_destroy_id(e.id)
	}
}
