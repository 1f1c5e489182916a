package nlmwire

import "github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"

// NSM version 1, the status monitor (XNFS chapter 11).
const (
	NSMProgram = 100024
	NSMVersion = 1

	NSMNull   = 0
	NSMStat   = 1
	NSMMon    = 2
	NSMUnmon  = 3
	NSMNotify = 6

	PrivSize = 16
)

// A MonitorCall names a callback of the local status monitor (my_id).
type MonitorCall struct {
	Name             string // of this host
	Prog, Vers, Proc uint32
}

// AppendMon appends the arguments of SM_MON: the host to monitor, the callback, and private data
// that the callback repeats.
func AppendMon(b []byte, host string, c *MonitorCall, priv *[PrivSize]byte) []byte {
	return append(AppendUnmon(b, host, c), priv[:]...)
}

// AppendUnmon appends the arguments of SM_UNMON.
func AppendUnmon(b []byte, host string, c *MonitorCall) []byte {
	b = sunrpc.AppendString(sunrpc.AppendString(b, host), c.Name)
	return sunrpc.AppendUint32(sunrpc.AppendUint32(sunrpc.AppendUint32(b, c.Prog), c.Vers), c.Proc)
}

// AppendNSMStat appends the arguments of SM_STAT: a host that the monitor could monitor.
func AppendNSMStat(b []byte, host string) []byte { return sunrpc.AppendString(b, host) }

// ParseMonRes decodes the results of SM_MON and SM_STAT: whether the monitor accepted the call, and
// the state number of its host.
func ParseMonRes(b []byte) (ok bool, state uint32, err error) {
	d := sunrpc.NewDecoder(b)
	res := d.Uint32()
	state = d.Uint32()
	return res == 0, state, d.Err()
}

// ParseNotify decodes the arguments of SM_NOTIFY and FREE_ALL, which are equal: the host that
// restarted and its state number.
func ParseNotify(b []byte) (host string, state uint32, err error) {
	d := sunrpc.NewDecoder(b)
	host, state = string(d.Opaque(MaxName)), d.Uint32()
	return host, state, d.Err()
}

// ParseStatus decodes the arguments of the monitor's callback.
func ParseStatus(b []byte) (host string, state uint32, priv [PrivSize]byte, err error) {
	d := sunrpc.NewDecoder(b)
	host, state = string(d.Opaque(MaxName)), d.Uint32()
	copy(priv[:], d.Fixed(PrivSize))
	return host, state, priv, d.Err()
}
