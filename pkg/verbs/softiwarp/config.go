package softiwarp

import (
	"os"
	"time"

	"github.com/hashicorp/go-hclog"
)

// Config is what a provider is made from. The zero value is ready for use.
type Config struct {
	// CRC asks for the MPA CRC on every connection. Off by default, a departure from RFC 5044 §4.4:
	// a stock siw peer drops the connection whenever TCP splits an FPDU's trailer, and Linux's own
	// client leaves it off. When the peer asks for CRCs they are used all the same.
	CRC bool
	// MaxFPDU is the size of the largest FPDU sent, in octets. 0 is RFC 5044 §5.1's way: no FPDU is
	// larger than the effective MSS. A value above the MSS is honoured while no CRCs are in force,
	// which siw and this package take, and is faster on small segments. Never exceeds RFC 5044 §3's
	// 64768.
	MaxFPDU int
	// SocketBuffer is the size asked for each TCP buffer, in octets. 0 asks for 4 MiB where
	// the process may force that, and otherwise leaves the sizes to the kernel's auto-tuning.
	SocketBuffer int

	// ConnectTimeout bounds the TCP handshake of an active connection. 0: 10 s.
	ConnectTimeout time.Duration
	// ReplyTimeout bounds the wait for the MPA Reply, and on the passive side the sending of it. 0:
	// 10 s.
	ReplyTimeout time.Duration
	// RequestTimeout bounds the wait for the MPA Request on the passive side (RFC 5044 §7.1.2). 0:
	// 5 s.
	RequestTimeout time.Duration
	// Linger bounds the orderly end of a connection: sending what is left of an
	// FPDU, the Terminate, and reading until the peer's FIN. 0: 500 ms.
	Linger time.Duration

	// Logger gets connection ends and refused handshakes at debug level. nil: none.
	Logger hclog.Logger
}

// Defaults of Config.
const (
	defaultConnectTimeout = 10 * time.Second
	defaultReplyTimeout   = 10 * time.Second
	defaultRequestTimeout = 5 * time.Second
	defaultLinger         = 500 * time.Millisecond
	defaultSocketBuffer   = 4 << 20
	// abandonWait is how long a connect whose caller gave up still waits for the reply: a stock siw
	// listener dies when a fresh connection is closed within some 10 ms, should that be heard (see
	// setTCPRepair).
	abandonWait = 60 * time.Millisecond
)

var pageSize = os.Getpagesize()

// Device limits.
const (
	maxQPWR       = 32768
	maxSendSGE    = 32
	maxReadDepth  = 128 // a power of two; siw has the same
	maxCQE        = 1 << 20
	maxMR         = 1 << 20
	maxFRPages    = 1024
	maxMessageLen = 1<<32 - 1 // RFC 5041 §5.2
)

func (c Config) withDefaults() Config {
	setDuration := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	setDuration(&c.ConnectTimeout, defaultConnectTimeout)
	setDuration(&c.ReplyTimeout, defaultReplyTimeout)
	setDuration(&c.RequestTimeout, defaultRequestTimeout)
	setDuration(&c.Linger, defaultLinger)
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	return c
}
