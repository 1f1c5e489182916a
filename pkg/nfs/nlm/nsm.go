package nlm

import "github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"

// NSM version 1, the status monitor (XNFS chapter 11).
const (
	nsmProgram = 100024
	nsmVersion = 1

	nsmNull   = 0
	nsmStat   = 1
	nsmMon    = 2
	nsmUnmon  = 3
	nsmNotify = 6

	nsmPrivSize = 16
)

// A monitorCall names a callback of the local status monitor (my_id).
type monitorCall struct {
	name             string // of this host
	prog, vers, proc uint32
}

// appendMon appends the arguments of SM_MON: the host to monitor, the callback, and private data
// that the callback repeats.
func appendMon(b []byte, host string, c *monitorCall, priv *[nsmPrivSize]byte) []byte {
	return append(appendUnmon(b, host, c), priv[:]...)
}

// appendUnmon appends the arguments of SM_UNMON.
func appendUnmon(b []byte, host string, c *monitorCall) []byte {
	b = sunrpc.AppendString(sunrpc.AppendString(b, host), c.name)
	return sunrpc.AppendUint32(sunrpc.AppendUint32(sunrpc.AppendUint32(b, c.prog), c.vers), c.proc)
}

// appendStat appends the arguments of SM_STAT: a host that the monitor could monitor.
func appendStat(b []byte, host string) []byte { return sunrpc.AppendString(b, host) }

// parseMonRes decodes the results of SM_MON and SM_STAT: whether the monitor accepted the call, and
// the state number of its host.
func parseMonRes(b []byte) (ok bool, state uint32, err error) {
	d := sunrpc.NewDecoder(b)
	res := d.Uint32()
	state = d.Uint32()
	return res == 0, state, d.Err()
}

// parseNotify decodes the arguments of SM_NOTIFY: the host that restarted and its state number.
func parseNotify(b []byte) (host string, state uint32, err error) {
	d := sunrpc.NewDecoder(b)
	host, state = string(d.Opaque(maxName)), d.Uint32()
	return host, state, d.Err()
}

// parseStatus decodes the arguments of the monitor's callback.
func parseStatus(b []byte) (host string, state uint32, priv [nsmPrivSize]byte, err error) {
	d := sunrpc.NewDecoder(b)
	host, state = string(d.Opaque(maxName)), d.Uint32()
	copy(priv[:], d.Fixed(nsmPrivSize))
	return host, state, priv, d.Err()
}
