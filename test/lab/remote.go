package lab

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"time"
)

// A test may run in a guest itself, where the RDMA devices are, and use the lab all the same: its
// host acts for it. Start, and the methods of what it returns, ask the host over one TCP
// connection, which the host makes (remote_host.go) to the process in the guest (remote_guest.go),
// through a port that QEMU forwards: a guest cannot reach the host by itself. On it the host serves
// net/rpc, whose calls may overlap.

// RemoteEnv is the environment variable that a process in a guest has which uses its host's lab,
// with any value. See [Guest.Lend].
const RemoteEnv = "NFSRDMAD_LAB_REMOTE"

// Remote reports whether this process runs in a guest and uses its host's lab.
func Remote() bool { return os.Getenv(RemoteEnv) != "" }

const (
	// remotePort is where a process in a guest waits for the host.
	remotePort = 20100
	// remoteHello is the first line from there. QEMU's end of the connection exists whether or not
	// somebody waits.
	remoteHello = "nfsrdmad lab 1\n"
	// remoteMethod is the one method that the host serves, from a remoteRequest to a remoteAnswer.
	remoteMethod = "Lab.Do"
)

// remoteOp is what the host is asked for.
type remoteOp string

const (
	opServer       remoteOp = "server" // the guest that Lend was given
	opStart        remoteOp = "start"
	opEnd          remoteOp = "end" // of a guest that was started
	opRun          remoteOp = "run"
	opLog          remoteOp = "log"
	opPowerOff     remoteOp = "power off"
	opBoot         remoteOp = "boot"
	opReset        remoteOp = "reset"
	opFreeze       remoteOp = "freeze"
	opThaw         remoteOp = "thaw"
	opCut          remoteOp = "cut network"
	opRestore      remoteOp = "restore network"
	opSlow         remoteOp = "slow network"
	opCapture      remoteOp = "capture"
	opStopCapture  remoteOp = "stop capture"
	opReadCapture  remoteOp = "read capture"
	unknownRequest          = "the host's lab does not know the request %q"
)

// A remoteRequest asks for one thing. What of it is set follows from Op.
type remoteRequest struct {
	Op      remoteOp
	ID      int           // of the guest, or of the capture
	Options Options       // opStart
	Command string        // opRun
	Limit   time.Duration // opRun
	Line    Line          // opSlow
	Name    string        // opCapture
	Args    []string      // opReadCapture, of tshark
	Failed  bool          // opEnd: the test has
}

// A remoteAnswer says what came of it.
type remoteAnswer struct {
	ID                        int // of a new guest or capture
	RDMA, NFS, Mount, Portmap netip.AddrPort
	Linked                    netip.Addr
	Release                   string
	Text                      string
	Logs, Errors              []string // for the test
	Err                       *remoteError
}

// A remoteError is an error on its way.
type remoteError struct {
	Text    string
	Kinds   []string      `json:",omitempty"` // of remoteKinds
	Command *CommandError `json:",omitempty"` // if it is one
}

// remoteKinds are the errors that a test may look for with errors.Is.
var remoteKinds = map[string]error{"power": ErrPower, "panic": ErrPanic, "packets lost": ErrPacketsLost}

// packError makes err fit to be sent; nil stays nil.
func packError(err error) *remoteError {
	if err == nil {
		return nil
	}
	packed := &remoteError{Text: err.Error()}
	errors.As(err, &packed.Command)
	for name, kind := range remoteKinds {
		if errors.Is(err, kind) {
			packed.Kinds = append(packed.Kinds, name)
		}
	}
	return packed
}

// unpack is the error again, as far as it can be looked for.
func (e *remoteError) unpack() error {
	if e == nil {
		return nil
	}
	got := &hostError{text: e.Text}
	if e.Command != nil {
		got.causes = append(got.causes, e.Command)
	}
	for _, name := range e.Kinds {
		if kind := remoteKinds[name]; kind != nil {
			got.causes = append(got.causes, kind)
		}
	}
	return got
}

// A hostError is an error of the host.
type hostError struct {
	text   string
	causes []error
}

func (e *hostError) Error() string   { return e.text }
func (e *hostError) Unwrap() []error { return e.causes }

// pack encodes a request or an answer, neither of which can fail to be.
func pack(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic("lab: " + err.Error())
	}
	return b
}
