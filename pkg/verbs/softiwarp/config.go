package softiwarp

import (
	"os"
	"time"

	"github.com/hashicorp/go-hclog"
)

// Config configures a provider. The zero value is ready to use.
type Config struct {
	// CRC asks for the MPA CRC on every connection. The default is off, which departs from RFC 5044
	// §4.4: a stock siw peer drops the connection whenever TCP splits an FPDU's trailer, and
	// Linux's client leaves CRCs off. CRCs are also used when the peer asks for them.
	CRC bool
	// MaxFPDU is the size of the largest sent FPDU in bytes. 0 means the effective MSS (RFC 5044
	// §5.1). A value above the MSS applies only while CRCs are off; siw and this package accept
	// larger FPDUs, which are faster on small segments. The limit is 64768 (RFC 5044 §3).
	MaxFPDU int
	// SocketBuffer is the requested size of each TCP buffer in bytes. 0 requests 4 MiB if the
	// process may force that size, and otherwise leaves the sizes to the kernel's auto-tuning.
	SocketBuffer int

	// AnySourcePort lets the kernel choose the source port of an active connection. By default a
	// connection has a reserved source port if the process may bind one and one is free, because
	// servers that trust AUTH_SYS may require one.
	AnySourcePort bool

	// ConnectTimeout bounds the TCP handshake of an active connection. 0 means 10 s.
	ConnectTimeout time.Duration
	// ReplyTimeout bounds the wait for the MPA Reply, and on the passive side the sending of it. 0
	// means 10 s.
	ReplyTimeout time.Duration
	// RequestTimeout bounds the wait for the MPA Request on the passive side (RFC 5044 §7.1.2). 0
	// means 5 s.
	RequestTimeout time.Duration
	// Linger bounds the orderly end of a connection: sending the rest of an FPDU and the Terminate,
	// and reading until the peer's FIN. 0 means 500 ms.
	Linger time.Duration

	// Logger receives connection ends and refused handshakes at debug level. nil means no logging.
	Logger hclog.Logger
}

// Defaults of Config.
const (
	defaultConnectTimeout = 10 * time.Second
	defaultReplyTimeout   = 10 * time.Second
	defaultRequestTimeout = 5 * time.Second
	defaultLinger         = 500 * time.Millisecond
	defaultSocketBuffer   = 4 << 20
	// abandonTimeout is how long a canceled connect still waits for the reply. A stock siw
	// listener fails permanently when a new connection is closed within about 10 ms and siw sees
	// the close (see setTCPRepair).
	abandonTimeout = 60 * time.Millisecond
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
