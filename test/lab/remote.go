package lab

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"time"
)

// A test that runs in a guest, where the RDMA devices are, can use the lab: its host carries the
// calls out. Start, and the methods of the guests and captures, call the host over one TCP
// connection. A guest cannot connect to the host, so the host (remote_host.go) connects to the
// process in the guest (remote_guest.go), through a port that QEMU forwards. On this connection the
// host serves net/rpc, whose calls may overlap.

// RemoteEnv is the environment variable of a process in a guest that uses its host's lab. Its value
// does not matter. See [Guest.ServeRemote].
const RemoteEnv = "NFSRDMAD_LAB_REMOTE"

// Remote reports whether this process runs in a guest and uses its host's lab.
func Remote() bool { return os.Getenv(RemoteEnv) != "" }

const (
	// remotePort is the port on which a process in a guest waits for the host.
	remotePort = 20100
	// remoteHello is the first line that the process sends. QEMU accepts the connection even if no
	// process listens.
	remoteHello = "nfsrdmad lab 1\n"
	// remoteMethod is the only RPC method of the host. It takes a remoteRequest and returns a
	// remoteAnswer.
	remoteMethod = "Lab.Do"
)

// A remoteOp is a request to the host.
type remoteOp string

const (
	opServer       remoteOp = "server" // the server that ServeRemote got
	opStart        remoteOp = "start"
	opEnd          remoteOp = "end" // end a guest that opStart started
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
	unknownRequest          = "host's lab: unknown request %q"
)

// A remoteRequest is one request. Op determines which other fields are set.
type remoteRequest struct {
	Op         remoteOp
	ID         int           // of a guest or a capture
	Options    Options       // opStart
	Command    string        // opRun
	Limit      time.Duration // opRun
	Impairment Impairment    // opSlow
	Name       string        // opCapture
	Args       []string      // opReadCapture: arguments of tshark
	Failed     bool          // opEnd: the test has failed
}

// A remoteAnswer is the result of a request.
type remoteAnswer struct {
	ID                             int // ID of a new guest or capture
	RDMA, NFS, Mount, Portmap, NLM netip.AddrPort
	Linked                         netip.Addr
	Release                        string
	Text                           string
	Logs, Errors                   []string // output for the test
	Err                            *remoteError
}

// A remoteError is an error in a remoteAnswer.
type remoteError struct {
	Text    string
	Kinds   []string      `json:",omitempty"` // keys of remoteKinds
	Command *CommandError `json:",omitempty"` // set if the error is a CommandError
}

// remoteKinds are the errors that errors.Is finds in an error from the host.
var remoteKinds = map[string]error{"power": ErrPower, "panic": ErrPanic, "packets lost": ErrPacketsLost}

// packError converts err for a remoteAnswer; nil stays nil.
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

// unpack converts e back to an error for errors.Is and errors.As; nil stays nil.
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

// A hostError is an error that the host returned.
type hostError struct {
	text   string
	causes []error
}

func (e *hostError) Error() string   { return e.text }
func (e *hostError) Unwrap() []error { return e.causes }

// pack encodes a request or an answer. Both types can always be encoded.
func pack(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic("lab: " + err.Error())
	}
	return b
}
