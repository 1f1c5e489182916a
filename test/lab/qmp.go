package lab

import (
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"time"
)

// qmpTimeout bounds one command to QEMU, which answers between two pieces of work.
const qmpTimeout = 60 * time.Second

// A qmp speaks QEMU's machine protocol, one command at a time. Safe for concurrent use.
type qmp struct {
	mu   sync.Mutex // guards the conversation: one command and its answer
	conn net.Conn
	dec  *json.Decoder
}

// newQMP greets QEMU.
func newQMP(conn net.Conn) (*qmp, error) {
	q := &qmp{conn: conn, dec: json.NewDecoder(conn)}
	conn.SetDeadline(time.Now().Add(qmpTimeout))
	var greeting struct{ QMP json.RawMessage }
	if err := q.dec.Decode(&greeting); err != nil {
		return nil, fmt.Errorf("QEMU's greeting: %w", err)
	}
	return q, q.do("qmp_capabilities", nil)
}

// do runs a command.
func (q *qmp) do(command string, arguments any) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.conn.SetDeadline(time.Now().Add(qmpTimeout))
	request := struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, arguments}
	if err := json.NewEncoder(q.conn).Encode(request); err != nil {
		return fmt.Errorf("QEMU command %s: %w", command, err)
	}
	for {
		var answer struct {
			Event  string
			Return json.RawMessage
			Error  *struct{ Class, Desc string }
		}
		if err := q.dec.Decode(&answer); err != nil {
			return fmt.Errorf("QEMU command %s: %w", command, err)
		}
		switch {
		case answer.Event != "": // nobody asked for it
		case answer.Error != nil:
			return fmt.Errorf("QEMU command %s: %s", command, answer.Error.Desc)
		default:
			return nil
		}
	}
}
