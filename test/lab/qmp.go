package lab

import (
	"encoding/json"
	"fmt"
	"net"
	"sync"
	"time"
)

// qmpTimeout bounds one QMP command. QEMU answers when its main loop is idle.
const qmpTimeout = 60 * time.Second

// A qmp is a client of QEMU's machine protocol. It runs one command at a time and is safe for
// concurrent use.
type qmp struct {
	mu   sync.Mutex // held for one command and its reply
	conn net.Conn
	dec  *json.Decoder
}

// newQMP reads QEMU's greeting and enters command mode.
func newQMP(conn net.Conn) (*qmp, error) {
	q := &qmp{conn: conn, dec: json.NewDecoder(conn)}
	conn.SetDeadline(time.Now().Add(qmpTimeout))
	var greeting struct{ QMP json.RawMessage }
	if err := q.dec.Decode(&greeting); err != nil {
		return nil, fmt.Errorf("read QMP greeting: %w", err)
	}
	return q, q.do("qmp_capabilities", nil)
}

// do runs a command and waits for its reply.
func (q *qmp) do(command string, arguments any) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.conn.SetDeadline(time.Now().Add(qmpTimeout))
	request := struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, arguments}
	if err := json.NewEncoder(q.conn).Encode(request); err != nil {
		return fmt.Errorf("QMP command %s: %w", command, err)
	}
	for {
		var reply struct {
			Event  string
			Return json.RawMessage
			Error  *struct{ Class, Desc string }
		}
		if err := q.dec.Decode(&reply); err != nil {
			return fmt.Errorf("QMP command %s: %w", command, err)
		}
		switch {
		case reply.Event != "": // events are not used
		case reply.Error != nil:
			return fmt.Errorf("QMP command %s: %s", command, reply.Error.Desc)
		default:
			return nil
		}
	}
}
