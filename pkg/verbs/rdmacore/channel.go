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

// A cmEvent is a Go copy of an event of the connection manager.
type cmEvent struct {
	kind               eventKind
	status             int
	id                 *C.struct_rdma_cm_id
	responderResources uint8
	initiatorDepth     uint8
	private            []byte
}

// An eventChannel delivers the connection events of all connection ids of the process. The first
// connection id opens the channel, and the last one closes it.
type eventChannel struct {
	c    *C.struct_rdma_event_channel
	file *os.File // a duplicate of the channel's descriptor, for Go's poller
	done chan struct{}

	handlers struct {
		sync.Mutex
		byID map[*C.struct_rdma_cm_id]func(*cmEvent)
	}
}

// sharedChannel is the event channel of the process. ch is nil while users is 0.
var sharedChannel struct {
	sync.Mutex
	ch    *eventChannel
	users int
}

// eventMu is held while librdmacm handles an event, because librdmacm may use the queue pair of the
// connection. eventMu is also held while a queue pair without an established connection is
// destroyed.
var eventMu sync.Mutex

// acquireChannel returns the shared channel and counts a user. The caller must call release.
func acquireChannel() (*eventChannel, error) {
	sharedChannel.Lock()
	defer sharedChannel.Unlock()
	if sharedChannel.users == 0 {
		ch := &eventChannel{done: make(chan struct{})}
		ch.handlers.byID = make(map[*C.struct_rdma_cm_id]func(*cmEvent))
		if err := errnoOf(C.rc_open_channel(&ch.c)); err != nil {
			return nil, fmt.Errorf("open connection event channel: %w", err)
		}
		var err error
		if ch.file, err = pollableFile(ch.c.fd, "rdma_cm"); err != nil {
			C.rc_close_channel(ch.c)
			return nil, fmt.Errorf("watch connection event channel: %w", err)
		}
		sharedChannel.ch = ch
		go ch.run()
	}
	sharedChannel.users++
	return sharedChannel.ch, nil
}

// release removes a user. The last user closes the channel. An event handler must not call release.
func (ch *eventChannel) release() {
	sharedChannel.Lock()
	defer sharedChannel.Unlock()
	if sharedChannel.users--; sharedChannel.users > 0 {
		return
	}
	ch.file.SetReadDeadline(time.Unix(1, 0))
	<-ch.done
	ch.file.Close()
	C.rc_close_channel(ch.c)
	sharedChannel.ch = nil
}

// createID makes a connection id. The channel's goroutine calls handle with each event; handle must
// not block.
func (ch *eventChannel) createID(handle func(*cmEvent)) (*C.struct_rdma_cm_id, error) {
	var id *C.struct_rdma_cm_id
	if err := errnoOf(C.rc_create_id(ch.c, &id)); err != nil {
		return nil, fmt.Errorf("create connection id: %w", err)
	}
	ch.setHandler(id, handle)
	return id, nil
}

// setHandler makes the channel call handle with the events of id.
func (ch *eventChannel) setHandler(id *C.struct_rdma_cm_id, handle func(*cmEvent)) {
	ch.handlers.Lock()
	ch.handlers.byID[id] = handle
	ch.handlers.Unlock()
}

// destroyID destroys a connection id. Its handler gets no event afterwards.
func (ch *eventChannel) destroyID(id *C.struct_rdma_cm_id) error {
	ch.handlers.Lock()
	delete(ch.handlers.byID, id)
	ch.handlers.Unlock()
	return errnoOf(C.rc_destroy_id(id))
}

// run reads and delivers events until the channel is closed.
func (ch *eventChannel) run() {
	defer close(ch.done)
	raw, err := ch.file.SyscallConn()
	if err != nil {
		return
	}
	ev := new(C.struct_rc_event)
	for {
		var ret C.int
		err := raw.Read(func(uintptr) bool {
			eventMu.Lock()
			ret = C.rc_next_event(ch.c, ev)
			eventMu.Unlock()
			return ret != -C.int(syscall.EAGAIN)
		})
		if err != nil {
			return
		}
		if ret == 0 {
			ch.deliver(ev)
			C.rc_ack_event(ev)
		} else if ret != -C.int(syscall.EINTR) {
			// librdmacm could not handle this event. It reports the result with another event.
			time.Sleep(time.Millisecond)
		}
	}
}

// deliver calls the handler of the event's connection id. A connect request goes to the handler of
// its listener.
func (ch *eventChannel) deliver(ev *C.struct_rc_event) {
	target := ev.id
	if eventKind(ev.kind) == evConnectRequest {
		target = ev.listener
	}
	ch.handlers.Lock()
	handle := ch.handlers.byID[target]
	ch.handlers.Unlock()
	e := &cmEvent{kind: eventKind(ev.kind), status: int(ev.status), id: ev.id,
		responderResources: uint8(ev.responder_resources), initiatorDepth: uint8(ev.initiator_depth)}
	if ev.private_len > 0 {
		e.private = C.GoBytes(unsafe.Pointer(&ev.private_data[0]), C.int(ev.private_len))
	}
	switch {
	case handle != nil:
		handle(e)
	case e.kind == evConnectRequest: // the listener is already closed
		C.rc_reject(e.id, nil, 0)
		C.rc_destroy_id(e.id)
	}
}
